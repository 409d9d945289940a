"""Asynchronous tensor parallelism through symmetric memory, by an emulation of PyTorch's operators."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from muster.parallel import symmetric_memory
from muster.parallel.axis import TensorAxis
from muster.parallel.symmetric_memory import has_fused_operators, overlap_of, reaches_all
from muster.parallel.tensor_parallel import column_parallel_linear, row_parallel_linear
from muster.parallel.weight_grad_store import WeightGradStore
from tests import emulated_symmetric_memory
from tests.test_parity import CHUNKED, GRADIENT_TOLERANCE, LOSS_TOLERANCE, run

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


FULL = {"default_strategy": CHUNKED["default_strategy"] | {"recompute": "full"}}
PLANS: list[dict[str, Any]] = [
    {"plan": "tp2", "changes": CHUNKED, "micro_batch_size": 4},
    {"plan": "tp2-mb2", "changes": CHUNKED, "family": "gpt2", "tied": True, "layers": 2},
]
MORE_PLANS: dict[int, list[dict[str, Any]]] = {
    2: [{"plan": "tp2", "changes": FULL}, {"plan": "tp2-mb2", "changes": CHUNKED | {"compile": True}}],
    4: [{"plan": plan, "changes": CHUNKED} for plan in ("tp4-mb2", "tp2-pp2-szbh1", "tp2-dp2-z3")],
}
EXACT = {"precision": "fp64", "steps": 1, "fault": "symmetric memory"}


def check_gradients(num_ranks: int, cases: list[dict[str, Any]], cache: Path) -> None:
    for case, found in zip(cases, run(num_ranks, cases, cache), strict=True):
        is_good = case["fault"] == "symmetric memory"
        error = max(rank["gradient_error"] for rank in found)
        assert error < GRADIENT_TOLERANCE if is_good else error > 1e4 * GRADIENT_TOLERANCE, (case, error)
        assert not is_good or max(rank["loss_error"] for rank in found) < LOSS_TOLERANCE, case


def test_gradients_equal_one_process_and_a_wrong_order_is_found(cache: Path) -> None:
    cases = [case | EXACT for case in PLANS]
    check_gradients(2, [*cases, cases[0] | {"fault": "gradients out of order"}], cache)


@pytest.mark.soak
@pytest.mark.parametrize("num_ranks", MORE_PLANS)
def test_gradients_of_more_plans_equal_one_process(num_ranks: int, cache: Path) -> None:
    check_gradients(num_ranks, [case | EXACT for case in MORE_PLANS[num_ranks]], cache)


def test_the_operators_are_called_with_positions_weights_and_group_in_order(
    alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[Any, ...]] = []
    for name in ("all_gather_matmul", "matmul_reduce_scatter"):
        original = getattr(emulated_symmetric_memory, name)

        def seen(*args: Any, name: str = name, original: Any = original, **options: Any) -> Any:
            shapes = [tuple(one.shape) if isinstance(one, Tensor) else one for one in args]
            shapes[1] = [tuple(one.shape) for one in args[1]] if isinstance(args[1], list) else shapes[1]
            calls.append((name, *shapes, options))
            return original(*args, **options)

        monkeypatch.setattr(emulated_symmetric_memory, name, seen)
    with emulated_symmetric_memory.symmetric_memory():
        axis = TensorAxis(dist.group.WORLD, 1, 0, True, overlap_of(dist.group.WORLD, CPU))
        assert axis.overlap == "symmetric_memory"
        q, k, o = nn.Linear(8, 6), nn.Linear(8, 4, bias=False), nn.Linear(6, 8)
        x = torch.randn(3, 5, 8, requires_grad=True)
        queries, keys = column_parallel_linear(axis, WeightGradStore(), x, q, k)
        assert torch.equal(queries, q(x))
        assert queries.is_contiguous()
        assert torch.equal(keys, k(x))
        row_parallel_linear(axis, WeightGradStore(), queries * keys.mean(), o).sum().backward()
    group = dist.group.WORLD.group_name
    assert calls == [
        ("all_gather_matmul", (3, 5, 8), [(8, 6), (8, 4)], 1, group, {"return_A": False}),
        ("matmul_reduce_scatter", (3, 5, 6), (6, 8), "sum", 1, group, {}),
        ("all_gather_matmul", (3, 5, 8), [(8, 6)], 1, group, {}),
    ]


def test_the_ring_runs_where_torch_has_no_kernels() -> None:
    assert not has_fused_operators(CPU)
    with emulated_symmetric_memory.symmetric_memory():
        assert has_fused_operators(CPU)
    assert not has_fused_operators(CPU)
    key = torch._C._dispatch_key_for_device("cuda")
    for name in ("fused_all_gather_matmul", "fused_matmul_reduce_scatter"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"symm_mem::{name}", key), "torch has them for GPUs"


def test_kernels_take_the_arguments_that_the_emulation_takes() -> None:
    assert has_fused_operators(CPU) is False  # declares them
    gather, scatter = (
        str(getattr(torch.ops.symm_mem, name).default._schema)
        for name in ("fused_all_gather_matmul", "fused_matmul_reduce_scatter")
    )
    assert "(Tensor A, Tensor[] Bs, int gather_dim, str group_name, *, bool return_A=True)" in gather
    assert "(Tensor A, Tensor B, str reduce_op, int scatter_dim, str group_name) -> Tensor" in scatter


@pytest.mark.parametrize(
    ("places", "reaches"),
    [
        ([("a", 0), ("a", 1), ("a", 2)], True),
        ([("a", 0), ("b", 1), ("a", 2)], False),
        ([("a", 0), ("a", 0), ("a", 0)], False),
        ([("a", 0), ("a", 1), ("a", 7)], False),
    ],
    ids=["one node", "two nodes", "each sees its own GPU alone", "a pair that can't"],
)
def test_gpus_use_symmetric_memory_where_all_of_a_group_reach_each_other(
    places: list[tuple[str, int | None]], reaches: bool
) -> None:
    assert reaches_all(places, 0, lambda own, other: (own, other) != (0, 7)) is reaches


def test_a_gpu_out_of_reach_of_one_rank_is_out_of_reach_for_all(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(symmetric_memory, "has_fused_operators", lambda device: True)
    gpu = torch.device("cuda", 0)
    assert overlap_of(dist.group.WORLD, gpu) == "symmetric_memory"  # one rank reaches all
    monkeypatch.setattr(symmetric_memory, "reaches_all", lambda *_: False)
    assert overlap_of(dist.group.WORLD, gpu) == "ring"
