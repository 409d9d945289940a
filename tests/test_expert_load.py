"""Load of experts that isn't even: from a file or by Zipf's law, in predictions and plans."""

import json
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from muster.api.verbs import plan, predict
from muster.config.cluster_files import load_cluster
from muster.config.load_config import plan_yaml
from muster.config.named_model import load_model
from muster.config.routing_load_file import parse_routing_load, routing_load_json
from muster.planner.dispatch_choice import dispatch_fields
from muster.planner.plan_evaluator import PlanEvaluator
from muster.planner.request import PlanRequest, with_allowed, with_expert_load
from muster.planner.search import search
from muster.planner.space import draft_plans, mesh_shapes, schedule_choices
from muster.spec.errors import ConfigError, InfeasibleError
from muster.spec.model import ModelSpec
from muster.spec.model_components import MoeSpec
from muster.spec.routing_load import RoutingLoad, balanced_order, rank_shares, zipf_load
from muster.spec.workload import Workload
from muster.train.expert_load_log import ExpertLoadLog
from muster.train.step_result import StepResult, expert_load

MODEL, PLAN = "mixtral-8x7b", "dp32-ep8-z1"


def step_s(load: str | None, name: str = PLAN) -> float:
    return predict(MODEL, "32xh100", name, global_batch=64, expert_load=load).step_time_s


def test_imbalance_is_of_the_fullest_rank() -> None:
    load = RoutingLoad(((0.5, 0.25, 0.125, 0.125), (0.25, 0.25, 0.25, 0.25)), "hand")
    assert load.imbalance(2) == pytest.approx((1.5 + 1.0) / 2)
    assert load.imbalance(4) == load.max_over_mean == pytest.approx((2.0 + 1.0) / 2)
    spread = ((0, 2, 1, 3), (0, 1, 2, 3))
    assert load.imbalance(2, spread) == pytest.approx((1.25 + 1.0) / 2)


def test_zipf_shares_sum_to_one_and_none_exceeds_a_choice_of_every_token() -> None:
    for exponent, experts, k in ((0.0, 8, 2), (1.0, 128, 8), (1.2, 8, 2), (3.0, 16, 4)):
        for shares in zipf_load(exponent, 3, experts, k).shares:
            assert sum(shares) == pytest.approx(1)
            assert max(shares) <= 1 / k + 1e-12
    assert set(zipf_load(0.0, 1, 8, 2).shares[0]) == {0.125}
    assert max(zipf_load(1.0, 1, 128, 8).shares[0]) == 1 / 8


def test_an_uneven_load_takes_longer_and_more_memory_where_ranks_share_experts() -> None:
    even = step_s(None)
    assert step_s("zipf:0") == pytest.approx(even, rel=1e-9)
    assert even < step_s("zipf:0.5") < step_s("zipf:1.2")
    alone = "dp32-z1"
    assert step_s("zipf:1.2", alone) == pytest.approx(step_s(None, alone), rel=1e-9)
    tight, loose = (
        predict(MODEL, "32xh100", PLAN, global_batch=64, expert_load=load).forecast.fullest.terms.total
        for load in (None, "zipf:1")
    )
    assert loose > tight


def test_the_planner_says_the_load() -> None:
    found = plan("tiny-moe", "4xh100", global_batch=64, require="ep4", expert_load="zipf:1.2", top=1, effort=0.02)
    assert any("Zipf" in line for line in found.answer.request.derived_lines)
    assert not found.answer.result.best[0].plan.expert_placement, "names of plans stay short"


def test_experts_are_placed_so_that_ranks_have_like_loads() -> None:
    load = zipf_load(1.0, 4, 32, 2)
    for ep in (2, 4, 8):
        placement = load.placement(ep)
        assert all(sorted(order) == list(range(32)) for order in placement)
        assert load.imbalance(ep, placement) == load.placed().imbalance(ep) <= load.imbalance(ep)
    assert load.imbalance(4, load.placement(4)) < 1.25 < load.imbalance(4)
    shares = (0.4, 0.3, 0.2, 0.06, 0.03, 0.01)
    best = min(max(rank_shares(shares, 3, order)) for order in permutations(range(6)))
    assert max(rank_shares(shares, 3, balanced_order(shares, 3))) == pytest.approx(best)


def test_the_plan_that_is_written_has_its_experts_placed(tmp_path: Path) -> None:
    found = plan(
        "tiny-moe", "4xh100", global_batch=64, require="ep4-epover2", expert_load="zipf:1.2", top=1, effort=0.02
    )
    best, step_s = found.best, found.predictions[0].step_time_s
    assert len(best.expert_placement) == 7
    (tmp_path / "plan.yaml").write_text(plan_yaml(best))
    again, bare = (
        predict("tiny-moe", "4xh100", one, seq_len=4096, global_batch=64, expert_load="zipf:1.2").step_time_s
        for one in (tmp_path / "plan.yaml", best.model_copy(update={"expert_placement": ()}))
    )
    assert again == pytest.approx(step_s)
    assert bare > again
    wrong = best.model_copy(update={"expert_placement": ((0,) * 8,) * 7})
    with pytest.raises(InfeasibleError, match="each of the experts 0 to 7 of layer 1 once"):
        predict("tiny-moe", "4xh100", wrong)
    with pytest.raises(InfeasibleError, match="has 2 layers, but the model has 7"):
        predict("tiny-moe", "4xh100", best.model_copy(update={"expert_placement": (tuple(range(8)),) * 2}))


def test_a_run_records_the_load_that_predictions_read(tmp_path: Path) -> None:
    model, log = load_model("tiny-moe"), ExpertLoadLog(tmp_path)
    assert model.moe is not None
    for step in (1, 2):
        counts = [10.0 * step, *[2.0] * (model.moe.num_experts - 1)]
        load = tuple(expert_load(layer, counts, 0) for layer in model.expert_layers)
        log.add(StepResult(step, 1.0, 0.0, 1.0, 0.1, 8, 1.0, 0.0, None, 0, 0, False, expert_load=load))
    log.write()
    found = parse_routing_load(str(tmp_path), model)
    assert json.loads((tmp_path / "expert-load.json").read_text())["steps"] == [1, 2]
    assert found.shares[0][:2] == (30 / 58, 4 / 58)


def test_files_and_words_that_name_no_load_are_told(tmp_path: Path) -> None:
    model = load_model("tiny-moe")
    path = tmp_path / "expert-load.json"
    cases = {
        "": "is no JSON",
        "[1]": "no counts of experts by layer",
        '{"version": 1, "layers": {"1": "x"}}': "no counts",
        '{"version": 1, "layers": {"1": [0, 0]}}': "no counts",
        '{"version": 9, "layers": {"1": [1, 2]}}': "version 9 isn't known",
        routing_load_json({1: [1, 2]}, (1, 1)): "has 7 of 8",
    }
    for text, expected in cases.items():
        path.write_text(text)
        with pytest.raises(ConfigError, match=expected):
            parse_routing_load(str(path), model)
    words = {"zipf:": "exponent", "zipf:nan": "exponent", "zipf:1e9": "from 0 to 10", "nowhere": "can't be read"}
    for word, expected in words.items():
        with pytest.raises(ConfigError, match=expected):
            parse_routing_load(word, model)
    with pytest.raises(ConfigError, match="has no experts"):
        parse_routing_load("zipf:1", load_model("tiny"))


def test_the_planner_copies_experts_as_trying_every_number_of_copies_does() -> None:
    """Every plan of the space with 0 to 3 copies is fitted and simulated; the search finds none that is worse."""
    moe = MoeSpec(num_experts=4, top_k=2, expert_size=2048)
    own = {"num_layers": 2, "num_heads": 4, "intermediate_size": 512}
    model = ModelSpec(vocab_size=512, hidden_size=512, moe=moe, **own)
    workload = Workload(seq_len=4096, global_batch_size=8)
    fixed = {"cp": 1, "tp": 1, "pp": 1, "ep": 4, "recompute": "none"}
    even = PlanRequest(model, load_cluster("4xa100"), workload, fixed=fixed, runnable=True, tolerance=0.0)
    chosen = []
    for request in (even, with_expert_load(even, zipf_load(1.2, 2, 4, 2))):
        for limit_bytes in (None, int(2.7e9)):
            asked = replace(request, memory_limit_bytes=limit_bytes)
            evaluator = PlanEvaluator(asked)
            values = []
            for shape in mesh_shapes(asked):
                for choice in schedule_choices(asked, shape):
                    for draft in draft_plans(asked, choice) if not shape.copies else ():
                        for copies in range(4) if shape.ep > 1 else (0,):
                            own = draft.tp, draft.cp, draft.ep, draft.default_strategy.sp, copies
                            plan = draft.model_copy(update=dispatch_fields(asked, *own))
                            if evaluator.memory_budget.fits(plan):
                                values.append(evaluator.evaluate(plan).value)
            best = search(asked, 1).best[0]
            assert best.value <= min(values) * (1 + 1e-9)
            chosen.append(best.plan.ep_redundant_experts)
    assert chosen == [0, 0, 1, 1], "copies where the load is uneven"


def test_hidden_states_travel_in_8_bits_or_as_centroids_only_where_that_is_allowed() -> None:
    workload = Workload(seq_len=4096, global_batch_size=64)
    plain = PlanRequest(load_model("qwen3-30b-a3b"), load_cluster("64xh100"), workload)
    lossy = with_allowed(plain, "epint8-epfp8")
    assert dispatch_fields(plain, 1, 1, 64, False)["ep_dispatch_dtype"] == "none"
    assert dispatch_fields(lossy, 1, 1, 64, False)["ep_dispatch_dtype"] == "int8"
    joined = with_allowed(plain, "eplsh")
    assert dispatch_fields(joined, 1, 1, 64, False)["ep_lsh_rate"] == 0.2
    both = dispatch_fields(with_allowed(plain, "eplsh0.5-epfp8"), 1, 1, 64, False)
    assert (both["ep_lsh_rate"], both["ep_dispatch_dtype"], both["ep_chunks"]) == (0.5, "fp8", 1)
    assert any("as centroids of alike ones, which changes losses" in line for line in joined.derived_lines)
    required = replace(lossy, fixed={"ep_dispatcher": "all_gather"})
    assert dispatch_fields(required, 1, 1, 64, False)["ep_dispatch_dtype"] == "none"
    assert any("changes losses" in line for line in lossy.derived_lines)
    asked: dict[str, Any] = {"global_batch": 64, "top": 1}
    with pytest.raises(
        ConfigError,
        match="eplsh or islands, which change losses, or asynctp, domino or tppairs; did you mean 'epfp8'",
    ):
        plan("mixtral-8x7b", "64xh100", allow="epfp", **asked)
    with pytest.raises(ConfigError, match="has no experts"):
        plan("tiny", "64xh100", allow="epfp8", **asked)
