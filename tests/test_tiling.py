"""Tiles of a micro-batch's positions: parity with one process, the memory that they hold, what they cost."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from muster.cli.memory_check import _compare
from muster.config.cluster_files import load_cluster
from muster.config.named_model import load_model
from muster.model.chunk_sizes import large_chunks
from muster.model.loss import loss_sums
from muster.model.tiling import compute_in_tiles, tile_rows
from muster.planner.memory.budget import MemoryBudget
from muster.planner.plan_costs import PlanCosts
from muster.planner.request import PlanRequest
from muster.planner.space import MeshShape, make_plan
from muster.planner.tiles import tiled_plan
from muster.simulate.predict import predict
from muster.spec.legality import plan_violations
from muster.spec.model import ModelSpec
from muster.spec.plan_name import parse_plan_name
from muster.spec.supported import unsupported_features
from muster.spec.workload import Workload
from muster.train.memory_check import _make_tracker, _total
from tests.parity import with_two_layers
from tests.sampling import quick_sample
from tests.test_comm_volume import assert_bytes_equal
from tests.test_context_parallel import in_float64
from tests.test_parity import CHUNKED, cache, check_parity  # noqa: F401

CASES: dict[int, list[dict[str, Any]]] = {
    1: [
        {"plan": "dp1-tile4"},
        {"plan": "dp1-tile7-rfull-mb2", "tied": True, "packing": "document_mask"},
        {"plan": "dp1-tile3-relem", "family": "gpt2", "profile": True},
        {"plan": "dp1-tile2-rfull", "family": "gemma2", "z_loss": 0.1},
        {"plan": "dp1-tile4", "family": "gpt_neox"},
    ],
    2: [
        *({"plan": f"dp2-tile4-{zero}", "tied": True, "z_loss": 0.1} for zero in ("z1", "z2", "z3")),
        *({"plan": f"dp2-tile4-rfull-{zero}", "family": "qwen3"} for zero in ("z1", "z2", "z3")),
        {"plan": "tp2-sp-mb2-tile3", "family": "qwen3", "packing": "none", "profile": True},
        {"plan": "tp2-tile2-rfull", "family": "gemma2", "z_loss": 0.1, "profile": True},
        {"plan": "tp2-sp-tile2-rfull", "family": "gemma3", "tied": True, "profile": True},
        {"plan": "tp2-tile2", "changes": CHUNKED},
        {"plan": "pp2-sgpipe-tile4-oact", "profile": True},
        {"plan": "pp2-tile5", "tied": True},
        {"plan": "cp2-tile4", "family": "gemma3", "packing": "next_fit"},
        {"plan": "cp2u-tile2-rfull", "family": "olmo2"},
    ],
    4: [
        {"plan": "tp2-sp-cp2-tile2-mb2", "packing": "none", "profile": True},
        {"plan": "dp2-cp2a-tile4-rfull"},
        {"plan": "pp2-cp2-tile2", "tied": True, "z_loss": 0.1},
    ],
}


def test_gradients_equal_one_process(cache: Path) -> None:  # noqa: F811
    check_parity(1, in_float64([with_two_layers(CASES[1][1]), CASES[1][3]]), cache)
    check_parity(2, in_float64(list(map(with_two_layers, random.Random(0).sample(CASES[2], 3)))), cache)


@pytest.mark.soak
@pytest.mark.parametrize("num_ranks", CASES)
def test_gradients_of_every_plan_equal_one_process(num_ranks: int, cache: Path) -> None:  # noqa: F811
    check_parity(num_ranks, in_float64(CASES[num_ranks]), cache)


BYTES: list[tuple[Any, ...]] = [
    ("tp2-sp-tile3", True, {"layers": 2}),
    ("dp2-tile2-z3-rfull", True, {"layers": 2}),
    ("tp2-tile4-rfull", False, {"family": "qwen3"}),
    ("tp2-sp-tile2-rfull", False, {"family": "olmo2"}),
    ("tp2-tile2", False, {"default_strategy": CHUNKED["default_strategy"] | {"recompute": "full"}}),
]


def test_step_bytes_equal_the_formula(tmp_path: Path) -> None:
    assert_bytes_equal(2, BYTES[:2], tmp_path)


@pytest.mark.soak
def test_step_bytes_of_more_plans_equal_the_formula(tmp_path: Path) -> None:
    assert_bytes_equal(2, [*(case[:2] for case in BYTES[:2]), *BYTES[2:]], tmp_path)


@pytest.mark.parametrize("num_tiles", [4, 16])
def test_the_logits_of_one_tile_live_at_a_time(num_tiles: int) -> None:
    """Counted by PyTorch: beside the hidden states, the weight and their gradients, logits and gradient of one tile."""
    tokens, width, vocab = 4096, 16, 2048
    with FakeTensorMode(), large_chunks():
        x_BSD = torch.empty(1, tokens, width, requires_grad=True)
        weight_VD = nn.Parameter(torch.empty(vocab, width))
        labels_N = torch.zeros(tokens, dtype=torch.long)
        rows = list(tile_rows(tokens, num_tiles))

        def losses(x_nD: Tensor, index: int) -> Tensor:
            found = loss_sums((x_nD @ weight_VD.t()).unsqueeze(0), labels_N[rows[index]].unsqueeze(0))
            return torch.stack(found).unsqueeze(0)

        tracker = _make_tracker()
        tracker.track_external(x_BSD, weight_VD, labels_N)
        with tracker:
            compute_in_tiles(losses, x_BSD, num_tiles, [weight_VD]).sum(0)[0].backward()
    logits = tokens * vocab * 4
    others = 2 * x_BSD.nbytes + 4 * weight_VD.nbytes + 16 * tokens
    slack = 2 * logits // num_tiles  # the gradient of a tile's logits, and the softmax that it is made of
    assert _total(tracker, "peak") <= logits / num_tiles + slack + others


@pytest.mark.parametrize(
    ("name", "seq_len"),
    quick_sample(
        [("tile4", 2048), ("cp4-tile8-rfull", 8192), ("tp2-sp-tile3-relem", 4096), ("dp4-tile16", 4096)], 0, 2
    ),
)
def test_forecast_is_what_pytorch_counts(name: str, seq_len: int) -> None:
    model = ModelSpec(
        vocab_size=20_000, hidden_size=128, num_layers=3, num_heads=8, num_kv_heads=4, intermediate_size=512
    )
    plan = parse_plan_name(name)
    workload = Workload(seq_len=seq_len, global_batch_size=2 * plan.mesh(0).dp_size)
    (found,) = _compare(model, plan, workload, real=False, optim=None)
    assert abs(found.difference) < 0.05


@pytest.mark.parametrize(
    ("name", "seq_len"), quick_sample([("cp2-tile16-fp32", 16_384), ("cp4-tile16-fp32", 65_536)], 0)
)
def test_bands_of_a_window_over_a_ring_are_counted(name: str, seq_len: int) -> None:
    model = ModelSpec(
        vocab_size=257,
        hidden_size=64,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        intermediate_size=256,
        sliding_window=512,
    )
    (found,) = _compare(
        model, parse_plan_name(name), Workload(seq_len=seq_len, global_batch_size=1), real=False, optim=None
    )
    assert abs(found.difference) < 0.03


def test_tiles_cost_another_forward_of_mlps_and_head() -> None:
    cluster = load_cluster("8xh100")
    model = load_model("llama3-8b")
    workload = Workload(seq_len=131_072, global_batch_size=1)
    steps = {
        name: predict(model, parse_plan_name(name), workload, cluster).step_time_s
        for name in ("cp8u", "cp8u-tile4", "cp8u-rfull", "cp8u-tile4-rfull", "cp8u-tile64")
    }
    assert steps["cp8u"] < steps["cp8u-tile4"] < steps["cp8u-tile64"]
    assert steps["cp8u-tile4"] < steps["cp8u-rfull"] < steps["cp8u-tile4-rfull"] < 1.05 * steps["cp8u-rfull"]


def test_what_tiles_do_not_go_with_is_said() -> None:
    model = load_model("tiny")
    workload = Workload(seq_len=64, global_batch_size=4)
    for name, words in {
        "pp2-szbh1-tile2": "sequence_tiles with a schedule whose backward is split",
        "pp2-vocab-tile2": "sequence_tiles with vocab_parallel",
        "tile65": "legal are 1 to 64",
    }.items():
        plan = parse_plan_name(name)
        problems = plan_violations(plan, model, workload, plan.world_size) + unsupported_features(plan)
        assert any(words in problem for problem in problems), name


def request_of(model: str, cluster: str, seq_len: int) -> PlanRequest:
    """A question with four sequences."""
    workload = Workload(seq_len=seq_len, global_batch_size=4)
    return PlanRequest(load_model(model), load_cluster(cluster), workload)


def test_planner_tiles_long_sequences_that_do_not_fit() -> None:
    request = request_of("llama3-8b", "8xh100", 1_048_576)
    plan = make_plan(request, MeshShape(1, 1, 1, 8, 1, 1), (1, 1, "z3"), recompute="full")
    tiled = tiled_plan(request, plan)
    assert tiled is not None
    assert tiled.sequence_tiles == 16
    budget = MemoryBudget(request, PlanCosts(request))
    assert not budget.fits(plan)
    assert budget.fits(tiled)
    assert tiled_plan(request_of("llama3-8b", "8xh100", 131_072), plan) is None, "positions of a rank are few"
    named = parse_plan_name("cp8u-mb1-rfull-bf16")
    fixes = predict(
        request.model, named, Workload(seq_len=1_048_576, global_batch_size=1), request.cluster
    ).memory_fixes
    assert ("tiles 16",) in [fix.changes for fix in fixes]
