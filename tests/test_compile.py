"""Compilation: where a machine lacks what it needs, and that a tensor-parallel block is one graph."""

from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._inductor import config
from torch.testing._internal.distributed.fake_pg import FakeStore

from muster.model.decoder import Decoder
from muster.model.norms import RmsNorm
from muster.parallel import compile as compiling
from muster.parallel.axis import TensorAxis
from muster.parallel.compile import compile_blocks, eager_note
from muster.parallel.projection_norms import apply_projection_norms, normalize_sharded_projections
from muster.parallel.tensor_parallel import (
    apply_parallel_linears,
    column_parallel_linear,
    row_parallel_linear,
)
from muster.parallel.tensor_parallel_ops import traceable_seam
from muster.parallel.weight_grad_store import WeightGradStore
from muster.spec.errors import MusterError
from muster.spec.plan import Plan
from tests.test_model import SMALL

GPU = torch.device("cuda")


def test_without_a_compiler_one_sentence_says_so() -> None:
    module = Decoder(SMALL, range(1), first=True, last=True)
    with patch.object(config.cpp, "cxx", ("no-such-compiler",)), pytest.raises(MusterError, match="needs a C.. compil"):
        compile_blocks(module, torch.device("cpu"))


def test_blocks_that_run_eagerly_for_want_of_triton_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "has_triton", lambda: False)
    assert "needs Triton" in (eager_note(Plan(), SMALL, GPU) or "")
    for plan, device in ((Plan(compile=False), GPU), (Plan(), torch.device("cpu"))):
        assert eager_note(plan, SMALL, device) is None, "nothing would be compiled anyway"
    with pytest.raises(MusterError, match="needs Triton"):
        compile_blocks(Decoder(SMALL, range(1), first=True, last=True), GPU)
    monkeypatch.setattr(compiling, "has_triton", lambda: True)
    assert eager_note(Plan(), SMALL, GPU) is None


# ----------------------------------------------------------------------------------------------------------------------
# Tensor parallelism within a graph


@pytest.fixture
def alone() -> Iterator[None]:
    """A group of this process alone, whose collectives really run."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def one_of_two() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_tensor_parallel_block_is_one_graph(sequence_parallel: bool, one_of_two: None) -> None:
    """With norms over all heads, too; functions that aren't traceable would cut it into six graphs."""
    spec = SMALL.model_copy(update={"qk_norm": True, "qk_norm_width": "projection", "qkv_bias": True})
    module = Decoder(spec, range(1), first=False, last=False, has_vocab=False)
    axis = TensorAxis(dist.group.WORLD, 2, 0, sequence_parallel)
    apply_parallel_linears(module, axis, WeightGradStore())
    apply_projection_norms(module, spec, axis)
    with patch.object(torch, "compile", lambda function: function):
        compile_blocks(module, torch.device("cpu"))
    whole = torch.randn(2, 16, spec.hidden_size)
    x = (whole[:, :8] if sequence_parallel else whole).clone().requires_grad_()
    tables = module.position_state.rotary_cos_sin(whole, None)
    found = torch._dynamo.explain(module.blocks()[0].forward)(x, *tables, None, None)
    assert (found.graph_count, found.graph_break_count) == (1, 0), found.break_reasons


@pytest.mark.parametrize("kind", ["tp", "sp", "async"])
def test_operators_of_tensor_parallelism_compute_what_its_functions_compute(kind: str, alone: None) -> None:
    """Outputs and gradients, bit by bit, also where some weights are frozen; and PyTorch's own checks of operators."""
    axis = TensorAxis(dist.group.WORLD, 1, 0, kind != "tp", "ring" if kind == "async" else "none")
    q, k, o = nn.Linear(8, 6), nn.Linear(8, 4, bias=False), nn.Linear(6, 8)
    k.weight.requires_grad_(kind == "sp")
    q.bias.requires_grad_(kind != "tp")
    norms = RmsNorm(6, 1e-6), RmsNorm(4, 1e-6)
    seams = (
        partial(column_parallel_linear, axis, WeightGradStore()),
        partial(row_parallel_linear, axis, WeightGradStore()),
        partial(normalize_sharded_projections, axis, (6, 4), 1),
    )
    x = torch.randn(2, 4, 8)

    def gradients(column: Any, row: Any, normalize: Any) -> list[Tensor]:
        own = x.clone().requires_grad_()
        queries, keys = normalize(*column(own, q, k), *norms)
        out = row(queries * keys.mean(), o)
        trained = [p for part in (q, k, o, *norms) for p in part.parameters() if p.requires_grad]
        return [out, *torch.autograd.grad(out.square().sum(), [own, *trained])]

    traceable = [traceable_seam(seam) for seam in seams]
    assert all(seam is not None for seam in traceable)
    for plain, operator in zip(gradients(*seams), gradients(*traceable), strict=True):
        assert torch.equal(plain, operator)
    names = axis.group.group_name, 1, 0, axis.sequence_parallel, axis.overlap
    weights = [one.weight for one in (q, k)]
    torch.library.opcheck(
        torch.ops.muster.column_parallel_linear.default, (x, weights, [q.bias], [True, False], *names)
    )
    torch.library.opcheck(torch.ops.muster.row_parallel_linear.default, (torch.randn(2, 4, 6), o.weight, *names))
