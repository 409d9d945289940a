"""Mixture of experts: the layer, every plan that spreads it, and what is refused."""

import shutil
from math import log
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from muster.config.named_model import load_model
from muster.cost.memory.forecast import forecast_memory
from muster.layout.tensor_layout import is_expert, rank_layouts
from muster.model.decoder import recomputable
from muster.model.experts import MoeMlp
from muster.model.routing import RouterState
from muster.schedule.build import build_program
from muster.spec.errors import InfeasibleError
from muster.spec.model import ModelSpec
from muster.spec.model_components import MoeSpec
from muster.spec.nearest_plans import require_runnable
from muster.spec.plan_name import parse_plan_name
from muster.spec.workload import Workload
from muster.train.memory_check import FAKE_KERNELS, measure_fake_rank
from tests.ranks import run_ranks
from tests.test_memory_forecast import FAKE_CPU
from tests.train_runs import AT_ONCE, QUICK, rows_of, train

CASES: dict[int, list[dict[str, Any]]] = {
    1: [
        {"plan": "dp1", "family": "experts"},
        {"plan": "dp1-rfull", "family": "experts"},
        {"plan": "dp1-relem", "family": "switch"},
        {"plan": "dp1-mb2", "family": "grouped"},
    ],
    2: [
        {"plan": "dp2-z1", "family": "experts"},
        {"plan": "pp2-szbh1", "family": "experts"},
        {"plan": "tp2-etp2-sp-relem", "family": "experts"},
        {"plan": "tp2-etp2-rfull", "family": "grouped"},
        {"plan": "dp2-ep2", "family": "experts"},
        {"plan": "dp2-ep2-z1-relem", "family": "switch"},
        {"plan": "dp2-ep2-z2-rfull", "family": "grouped"},
        {"plan": "cp2-ep2-rfull", "family": "experts"},
        {"plan": "dp2-ep2", "family": "experts", "fault": "unsorted rows"},
        {"plan": "dp2-ep2", "family": "switch", "fault": "averaged experts"},
        {"plan": "tp2-etp2", "family": "experts", "fault": "repeated balance"},
        {"plan": "tp2-etp2", "family": "experts", "fault": "lost copies"},
    ],
    4: [
        {"plan": "dp4-ep4", "family": "experts"},
        {"plan": "dp4-ep2-z3-rfull", "family": "switch"},
        {"plan": "dp2-tp2-ep2-etp2-sp", "family": "experts"},
    ],
}
SOAK: dict[int, list[dict[str, Any]]] = {
    2: [
        {"plan": "dp2-z2", "family": "switch"},
        {"plan": "dp2-rfull", "family": "experts"},
        {"plan": "dp2x1", "family": "grouped"},
        {"plan": "pp2", "family": "experts", "tied": True},
        {"plan": "pp2-vocab", "family": "experts"},
        {"plan": "pp2v2-szbv", "family": "grouped"},
        {"plan": "pp2v2-sdualpipe", "family": "experts"},
        {"plan": "tp2-etp2", "family": "switch"},
        {"plan": "tp2-etp2-sp-mb2", "family": "experts", "packing": "none"},
        {"plan": "dp2-ep2-mb2", "family": "experts", "packing": "none"},
        {"plan": "dp2-ep2-z3-rfull", "family": "experts"},
        {"plan": "cp2a-mb2", "family": "grouped"},
        {"plan": "cp2u-z1", "family": "switch"},
    ],
    4: [
        {"plan": "dp4-ep2-z1", "family": "experts"},
        {"plan": "dp4-ep2-z2-relem", "family": "grouped"},
        {"plan": "dp2-pp2-ep2-szbh1", "family": "experts"},
        {"plan": "dp2-pp2v2-ep2-z1-sinterleaved", "family": "experts", "tied": True},
        {"plan": "dp2-tp2-ep2-etp2-z2-rfull", "family": "grouped"},
        {"plan": "dp2x2-ep2-z1", "family": "grouped"},
        {"plan": "dp2x2-ep2-z3", "family": "switch"},
        {"plan": "tp4-etp4-sp", "family": "experts"},
        {"plan": "dp4-ep4-z2", "family": "switch"},
        {"plan": "dp2-cp2-ep4", "family": "experts"},
        {"plan": "dp2-cp2-ep2-z1", "family": "grouped"},
        {"plan": "cp2-tp2-etp2-sp", "family": "experts"},
    ],
}


@pytest.mark.parametrize("ranks", CASES)
def test_every_plan_trains_the_same_experts(ranks: int, tmp_path: Path) -> None:
    assert_parity(ranks, CASES[ranks], tmp_path, steps=1)


@pytest.mark.soak
@pytest.mark.parametrize("ranks", SOAK)
def test_more_plans_train_the_same_experts(ranks: int, tmp_path: Path) -> None:
    assert_parity(ranks, SOAK[ranks], tmp_path, steps=3)


def assert_parity(ranks: int, cases: list[dict[str, Any]], tmp_path: Path, steps: int) -> None:
    """In float64, to 1e-10: losses and gradients of the whole batch in one process; sown bugs are found."""
    cases = [{"micro_batch_size": 2} | case | {"precision": "fp64", "steps": steps} for case in cases]
    results = run_ranks(ranks, "tests.parity:run_cases", {"cases": cases, "cache": str(tmp_path)})
    for case, found in zip(cases, zip(*results, strict=True), strict=True):
        assert all(one["num_gradients"] for one in found), case
        errors = [max(one["loss_error"], one["gradient_error"]) for one in found]
        assert max(errors) < 1e-10 if "fault" not in case else max(errors) > 1e-4, (case, errors)


BYTES: dict[int, list[tuple[Any, ...]]] = {
    2: [
        ("tp2-etp2-sp-rfull", False, {"family": "experts"}),
        ("tp2-etp2-bf16", False, {"family": "switch"}),
        ("tp2-etp2", False, {"family": "experts"}, {"default_strategy": {"sp": True, "tp_overlap": "async_tp"}}),
        ("dp2-ep2-rfull", False, {"family": "experts"}),
        ("dp2-ep2-z1-bf16", False, {"family": "switch"}),
        ("dp2-z2", False, {"family": "grouped"}),
        ("cp2-ep2-rfull", False, {"family": "experts"}),
    ],
    4: [
        ("dp4-ep2-z3", False, {"family": "experts"}),
        ("dp2-tp2-ep2-etp2-sp-z2", False, {"family": "experts"}),
        ("dp2x2-ep2-z1", False, {"family": "grouped"}),
    ],
}


@pytest.mark.parametrize("ranks", BYTES)
def test_bytes_equal_the_formula(ranks: int, tmp_path: Path) -> None:
    """The rows that come back depend on the routing, but over all ranks they are as many as were sent."""
    payload = {"cases": BYTES[ranks], "cache": str(tmp_path)}
    found = run_ranks(ranks, "tests.comm_volume_ranks:count", payload)
    for cases in zip(*found, strict=True):
        exchanged = {
            key: sum(case[key].get("ep", {}).pop("all_to_all", 0) for case in cases) for key in ("counted", "predicted")
        }
        assert exchanged["counted"] == exchanged["predicted"], cases[0]["plan"]
        assert (exchanged["counted"] > 0) == ("ep2" in cases[0]["plan"].split("-"))
        for case in cases:
            for key in ("counted", "predicted"):
                case[key].pop("ep", None)
            assert case["counted"] == case["predicted"], case["plan"]


# ----------------------------------------------------------------------------------------------------------------------
# The layer


SPEC = ModelSpec(
    vocab_size=16, hidden_size=8, num_layers=1, num_heads=2, intermediate_size=8, activation="silu", num_kv_heads=1
)


def layer(**moe: Any) -> MoeMlp:
    fields = {"num_experts": 4, "top_k": 2, "expert_size": 6, "aux_loss_coef": 0.0} | moe
    torch.manual_seed(1)
    return MoeMlp(SPEC.model_copy(update={"moe": MoeSpec(**fields)}), RouterState(), recomputable).double()


def dense(part: MoeMlp, x_ND: Tensor) -> Tensor:
    """Every expert computes every token; what the router didn't choose counts 0."""
    weight_Nk, expert_Nk = part.router(x_ND[None])
    factor_NE = torch.zeros(len(x_ND), part.router.moe.num_experts, dtype=x_ND.dtype).scatter(1, expert_Nk, weight_Nk)
    own = part.experts
    inner_ENI = F.silu(x_ND @ own.gate.weight.transpose(1, 2)) * (x_ND @ own.up.weight.transpose(1, 2))
    return torch.einsum("end,ne->nd", inner_ENI @ own.down.weight.transpose(1, 2), factor_NE)


@pytest.mark.parametrize(
    "moe",
    [
        {},
        {"norm_top_k": False, "route_scale": 2.0},
        {"top_k": 1, "norm_top_k": False},
        {"top_k": 4},
        {"router": "sigmoid", "num_groups": 2, "top_groups": 1},
    ],
)
def test_the_layer_is_its_dense_form(moe: dict[str, Any]) -> None:
    part = layer(**moe)
    x_BSD = torch.randn(2, 5, 8, dtype=torch.float64, requires_grad=True)
    names, parameters = zip(*part.named_parameters(), strict=True)
    out = torch.randn(2, 5, 8, dtype=torch.float64)
    ours = torch.autograd.grad((part(x_BSD, None) * out).sum(), (x_BSD, *parameters), allow_unused=True)
    theirs = torch.autograd.grad((dense(part, x_BSD.flatten(0, 1)) * out.flatten(0, 1)).sum(), (x_BSD, *parameters))
    for name, a, b in zip(("x", *names), ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12, msg=name)


def test_experts_without_tokens_have_gradients_of_zero() -> None:
    part = layer(num_experts=8, top_k=1)
    part(torch.randn(1, 2, 8, dtype=torch.float64), None).sum().backward()
    gradient = part.experts.up.weight.grad
    assert gradient is not None
    assert sum(bool(one.any()) for one in gradient) <= 2


def test_an_even_load_costs_the_coefficient() -> None:
    """Where all experts score alike the loss of a sequence is its coefficient, whatever the choice; the z-loss is
    log² of their number."""
    part = layer(aux_loss_coef=0.5, router_z_loss_coef=0.25)
    with torch.no_grad():
        part.router.weight.zero_()
    part(torch.randn(3, 5, 8, dtype=torch.float64), None).sum().backward()
    sums = part.router.state.pop_sums()
    assert sums is not None
    assert sums.tolist() == pytest.approx([0.5 * 15, 0.25 * 15 * log(4) ** 2])


def test_a_sigmoid_router_s_bias_chooses_and_weighs_nothing() -> None:
    part = layer(router="sigmoid", router_bias=True, top_k=1, norm_top_k=False)
    bias, x_BSD = part.router.bias, torch.randn(1, 6, 8, dtype=torch.float64)
    assert bias is not None
    assert not bias.requires_grad
    with torch.no_grad():
        bias[2] = 9.0
    weight_Nk, expert_Nk = part.router(x_BSD)
    assert expert_Nk.unique().tolist() == [2]
    expected = (x_BSD[0] @ part.router.weight[2]).sigmoid()
    torch.testing.assert_close(weight_Nk[:, 0], expected)


# ----------------------------------------------------------------------------------------------------------------------
# What is refused, stored and forecast


MODEL = load_model("tiny-moe")


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("dp3-ep3", "ep 3 doesn't divide the model's 8 experts"),
        ("tp2", "etp other than tp"),
        ("tp2-ep2", "etp other than tp"),
        ("dp2-ep4", "ep 4 doesn't divide the 2 ranks"),
        ("pp2-sgpipe-oact", "offload of the activations of experts"),
        ("dp2-ep2-z1-uneven3.1", "uneven_micro_batches"),
    ],
)
def test_plans_of_experts_that_do_not_run(name: str, sentence: str) -> None:
    plan = parse_plan_name(name)
    with pytest.raises(InfeasibleError, match=sentence):
        require_runnable(plan, MODEL, Workload(seq_len=64, global_batch_size=24), plan.world_size)


@pytest.mark.parametrize("name", ["dp2-ep2-z2-bf16", "dp4-ep2-z3-rfull-fp32", "tp2-etp2-sp-fp32"])
def test_forecast_of_experts_is_what_pytorch_counts(name: str) -> None:
    moe = MoeSpec(num_experts=8, top_k=2, expert_size=384, shared_size=64, shared_gate=True)
    spec = SPEC.model_copy(update={"vocab_size": 512, "hidden_size": 256, "num_layers": 3, "moe": moe})
    spec = spec.model_copy(update={"num_heads": 8, "num_kv_heads": 4, "head_dim": 32})
    plan = parse_plan_name(name)
    workload = Workload(seq_len=512, global_batch_size=2 * plan.mesh(0).dp_size)
    program = build_program(plan, spec, workload)
    found = forecast_memory(spec, plan, workload, FAKE_CPU, program, kernel_workspace=FAKE_KERNELS).ranks[0]
    real = measure_fake_rank(spec, plan, workload, 0)
    assert found.terms.total == pytest.approx(real.peak_bytes, rel=0.05), found.peak_instruction


@pytest.mark.parametrize(
    "name", ["dp4-ep4", "dp4-ep2", "dp8-ep2", "dp2x2-ep2", "dp2-tp2-ep2-etp2", "dp16-ep2", "dp2-pp2-ep2", "tp4-etp4"]
)
def test_layouts_hold_every_element_of_the_experts(name: str) -> None:
    """Each element is on as many ranks as a layout says: what checkpoints, norms and initial values rest on."""
    plan = parse_plan_name(name)
    held: dict[str, Tensor] = {}
    for rank in range(plan.world_size):
        for layout in rank_layouts(MODEL, plan, rank):
            count = held.setdefault(layout.name, torch.zeros(layout.shape, dtype=torch.int64))
            for box in layout.boxes:
                count[box.slices] += 1
                assert not is_expert(layout.name) or layout.num_copies == plan.dp_replicate
    ranks = range(plan.world_size)
    copies = {layout.name: layout.num_copies for rank in ranks for layout in rank_layouts(MODEL, plan, rank)}
    for tensor, count in held.items():
        assert bool((count == copies[tensor]).all()), tensor


@pytest.mark.soak
def test_a_run_of_experts_resumes_under_any_other_plan(tmp_path: Path) -> None:
    usual = ("--preset", "tiny-moe", *QUICK, *AT_ONCE, "--train.save_every", "1", "--allow-changes")
    first = tmp_path / "first"
    assert train(*usual, "--train.steps", "2", "--parallel", "dp2-ep2-z1", "--run", first).code == 0
    losses = {}
    for name in ("dp1", "tp2-etp2-sp", "dp2-ep2-rfull", "dp4-ep2-z2", "pp2"):
        run = Path(shutil.copytree(first, tmp_path / name))
        ended = train(*usual, "--train.steps", "4", "--parallel", name, "--run", run)
        assert ended.code == 0, ended.out + ended.err
        losses[name] = [row["train/loss"] for row in rows_of(run)]
    assert all(len(one) == 4 for one in losses.values())
    for name, one in losses.items():
        assert one == pytest.approx(losses["dp1"], rel=1e-5), name
