"""Gradients that travel in bf16 and are summed in float32."""

from pathlib import Path

import pytest

from muster.config.cluster_files import load_cluster
from muster.config.named_model import load_model
from muster.planner.evaluated_plan import EvaluatedPlan
from muster.planner.request import build_request
from muster.planner.search import search
from muster.spec.errors import InfeasibleError
from muster.spec.model_components import MoeSpec
from muster.spec.nearest_plans import require_runnable
from muster.spec.plan_name import format_plan_name, parse_plan_name
from muster.spec.workload import Workload
from tests.ranks import run_ranks
from tests.sampling import quick_sample
from tests.test_experts import SPEC, assert_forecast

CASES = {
    2: [("dp2-z1-mb2-fp32", "llama"), ("dp2-mb2-bf16", "llama")],
    4: [
        *((f"dp4-{zero}-mb1-fp32", "llama") for zero in ("z1", "z2", "z3")),
        *((f"dp4-ep2-{zero}-mb1-fp32", "experts") for zero in ("z1", "z2", "z3")),
        *((f"dp2x2-{zero}-mb1-fp32", "llama") for zero in ("z1", "z3")),
        ("dp2-cp2-mb1-bf16", "llama"),
        ("dp2-tp2-sp-mb1-z2-fp32", "llama"),
        ("pp2-dp2-mb1-z1-szbh1-fp32", "llama"),
        ("dp4-ep4-mb1-z1-bf16", "experts"),
        ("dp2-tp2-ep4-mb1-fp32", "experts"),
    ],
}


def assert_reduced_as_by_one_process(ranks: int, cases: list[tuple[str, str]], tmp_path: Path) -> None:
    """The gradients are those of a process that has all ranks' gradients to the bit, and differ from those of a
    reduction in float32 by at most a 256th of the magnitudes that they are sums of."""
    payload = {"cases": cases, "cache": str(tmp_path), "faults": ranks > 2}
    results = run_ranks(ranks, "tests.grad_reduce_ranks:compare", payload)
    for by_rank in zip(*results, strict=True):
        case = by_rank[0]["case"]
        assert all(one["equal"] for one in by_rank), case
        assert all(one["beyond"] <= 0 for one in by_rank), (case, [one["beyond"] for one in by_rank])
        # Gradients that passes make in bf16 are rounded no further, but where z1 has added them up.
        assert any(one["differs"] for one in by_rank) or "-bf16" in case, case
    if ranks > 2:
        for fault in ("dropped rank", "rounded sum"):
            assert any(one["caught"][fault] for one in results[0]), fault


def test_gradients_in_bf16_are_those_of_one_process(tmp_path: Path) -> None:
    assert_reduced_as_by_one_process(2, CASES[2][:1], tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("ranks", CASES)
def test_gradients_in_bf16_are_those_of_one_process_under_more_plans(ranks: int, tmp_path: Path) -> None:
    assert_reduced_as_by_one_process(ranks, CASES[ranks], tmp_path)


def test_bytes_are_halved_where_gradients_travel_in_bf16(tmp_path: Path) -> None:
    check_bytes(["dp2-z1-gbf16"], tmp_path)


@pytest.mark.soak
def test_bytes_of_more_plans_are_halved_where_gradients_travel_in_bf16(tmp_path: Path) -> None:
    check_bytes(["dp2-z2-gbf16-bf16", "dp2-gbf16"], tmp_path)


def check_bytes(names: list[str], tmp_path: Path) -> None:
    cases = [(name, False) for name in names]
    for rank in run_ranks(2, "tests.comm_volume_ranks:count", {"cases": cases, "cache": str(tmp_path)}):
        for case in rank:
            assert case["counted"] == case["predicted"], case["plan"]
            assert "reduce_scatter" not in case["counted"]["dp_shard"]
            assert case["counted"]["dp_shard"]["all_to_all"] > 0


def test_a_name_says_that_gradients_travel_in_bf16() -> None:
    plan = parse_plan_name("dp4-mb2-z1-gbf16-bf16")
    assert (plan.grad_reduce_dtype, format_plan_name(plan)) == ("bf16", "dp4-mb2-z1-gbf16-bf16")
    assert plan.hash != parse_plan_name("dp4-mb2-z1-bf16").hash


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("pp2-gbf16", "gradients between ranks that share state, but dp_shard and cp are 1"),
        ("dp4-zp2g2-gbf16", "zpNgM with gbf16"),
        ("dp2-gbf16-fp64", "rounds gradients, which precision fp64 is to keep"),
    ],
)
def test_gradients_that_can_not_travel_in_bf16(name: str, sentence: str) -> None:
    plan, workload = parse_plan_name(name), Workload(seq_len=64, global_batch_size=8)
    with pytest.raises(InfeasibleError, match=sentence):
        require_runnable(plan, load_model("tiny"), workload, plan.world_size)


def test_the_planner_plans_for_gradients_in_bf16() -> None:
    """All plans have what is required. Half the bytes save time where each rank is alone on its node; a ring of all
    ranks adds up those of a node before the network carries them, which an all-to-all doesn't."""
    cluster, model = load_cluster("32xa100"), load_model("llama3-8b")

    def planned(*words: str) -> EvaluatedPlan:
        return search(build_request(model, cluster, 2048, 64, fix="-".join(words))).best[0]

    plain, required = planned("tp8-dp4-z2-mb1"), planned("tp8-dp4-z2-mb1-gbf16")
    assert (plain.plan.grad_reduce_dtype, required.plan.grad_reduce_dtype) == ("fp32", "bf16")
    assert required.prediction.step_time_s < plain.prediction.step_time_s
    plain, required = planned("dp32-z2-mb1"), planned("dp32-z2-mb1-gbf16")
    assert required.prediction.step_time_s > plain.prediction.step_time_s


LARGER = SPEC.model_copy(update={"vocab_size": 512, "hidden_size": 256, "num_layers": 3})


@pytest.mark.parametrize("name", quick_sample(["dp4-z1-gbf16-fp32", "dp2-z2-gbf16-bf16", "dp4-gbf16-bf16"], 1))
def test_forecast_of_gradients_in_bf16_is_what_pytorch_counts(name: str) -> None:
    assert_forecast(LARGER.model_copy(update={"moe": None, "intermediate_size": 512}), name)


@pytest.mark.parametrize("name", quick_sample(["dp4-ep2-z1-gbf16-fp32", "dp2-ep2-gbf16-bf16", "dp4-ep2-gbf16-fp32"], 2))
def test_forecast_of_experts_gradients_in_bf16_is_what_pytorch_counts(name: str) -> None:
    moe = MoeSpec(num_experts=8, top_k=2, expert_size=384)
    assert_forecast(LARGER.model_copy(update={"moe": moe}), name)
