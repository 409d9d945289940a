"""Neighbours of the best plan: the steps of local search."""

from muster.config.cluster_files import load_cluster
from muster.config.named_model import load_model
from muster.planner.frontier import Frontier
from muster.planner.neighbours import BREADTH_FIRST, active_stages, neighbour_plans
from muster.planner.plan_evaluator import PlanEvaluator
from muster.planner.request import PlanRequest
from muster.planner.search_phases import local_search, probe
from muster.schedule.resolve import resolve_schedule
from muster.spec.plan_name import parse_plan_name
from muster.spec.workload import Workload


def _request(model: str, cluster: str, seq_len: int, batch: int, **fixed: int) -> PlanRequest:
    workload = Workload(seq_len=seq_len, global_batch_size=batch)
    return PlanRequest(load_model(model), load_cluster(cluster), workload, fixed=fixed)


def test_a_search_that_is_cut_short_leaves_no_better_neighbour():
    request = _request("qwen2.5-7b", "8xa100-40", 4096, 128, cp=1)
    frontier = Frontier(evaluator := PlanEvaluator(request), 5, 5)
    frontier.expand()
    probe(frontier, 0.0)
    first = frontier.best[0]
    assert any(not worked for worked in local_search(frontier))
    best = frontier.best[0]
    assert best.value < 0.97 * first.value, "what is tried first is not the best, or this shows nothing"
    assert all(evaluator.evaluate(plan).value >= best.value for plan in neighbour_plans(best.plan, evaluator))


def test_a_plan_that_promises_much_is_simulated_before_as_many_as_are_shown_are_known():
    request = _request("tiny", "4xh100", 256, 16)
    frontier = Frontier(PlanEvaluator(request), 5, 5)
    frontier.expand()
    probe(frontier, 0.0)
    frontier.best = frontier.best[-1:]
    assert frontier._is_promising(frontier.best[0].plan, frontier.best[0].value / 2)
    assert not frontier._is_promising(frontier.best[0].plan, frontier.best[0].value)


def test_units_of_passes_keep_no_searched_schedule():
    """Without its pinned order, where it puts stages is unknown."""
    request = _request("tiny", "4xh100", 256, 16)
    plan = resolve_schedule(parse_plan_name("dp2-pp2v2-z3-sauto"), request.model, request.workload)
    assert plan.pinned_schedule is not None
    found = active_stages(plan, request)
    assert found
    assert {fields["schedule"] for fields in found} == {BREADTH_FIRST}


def test_tensor_parallelism_is_tried_without_sequence_parallelism():
    """Where all-reduces hide behind gradients of weights, and gathers of hidden states wouldn't; not where norms of all
    positions on every rank take longer than that."""
    for cluster, sp in (("8xh100", False), ("8xa100", True)):
        request = _request("llama3-8b", cluster, 1024, 64, tp=8, micro_batch_size=4)
        frontier = Frontier(PlanEvaluator(request), 5, 5)
        frontier.expand()
        probe(frontier, 0.0)
        assert all(one.plan.default_strategy.sp for one in frontier.best)
        assert any(not worked for worked in local_search(frontier))
        assert frontier.best[0].plan.default_strategy.sp == sp
