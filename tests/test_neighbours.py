"""Neighbours of the best plan: each line about a change is true, and compares like with like."""

import pytest

from muster.api.verbs import plan, predict
from muster.config.cluster_files import load_cluster
from muster.config.named_model import load_model
from muster.planner.answer import _adopt_better_neighbours
from muster.planner.explain import families
from muster.planner.frontier import Frontier
from muster.planner.heterogeneous import PlanSearch, find_best_plans
from muster.planner.neighbours import Neighbour, neighbour_plans, neighbours
from muster.planner.plan_evaluator import PlanEvaluator
from muster.planner.request import PlanRequest
from muster.planner.search import search
from muster.planner.search_budget import SearchBudget
from muster.planner.search_phases import local_search, probe
from muster.spec.workload import Workload


def _why(model: str, cluster: str, **asked) -> tuple[PlanSearch, dict[str, Neighbour]]:
    arranged = plan(model, cluster, **asked).answer.search
    return arranged, {one.change: one for one in neighbours(arranged.result.best[0], arranged.evaluator)}


def _request(model: str, cluster: str, seq_len: int, batch: int, **fixed: int) -> PlanRequest:
    workload = Workload(seq_len=seq_len, global_batch_size=batch)
    return PlanRequest(load_model(model), load_cluster(cluster), workload, fixed=fixed)


@pytest.mark.parametrize(
    ("cluster", "asked"),
    [
        ("8xh100", {"global_batch": 16, "require": "cp1"}),
        ("7xh100", {"global_batch": 28}),
        ("8xh100", {"global_batch": 1, "seq_len": 8192}),
        ("8xh100", {"global_batch": 32, "require": "cp1-pp2", "objective": "cost"}),
    ],
)
def test_no_change_makes_the_best_faster_and_each_is_what_predict_says(cluster, asked):
    arranged, found = _why("llama3-8b", cluster, **asked)
    best, request = arranged.result.best[0], arranged.request
    assert arranged.result.proven
    assert len(found) >= 4
    for one in found.values():
        alone = predict(
            request.model,
            request.cluster,
            one.plan,
            global_batch=request.workload.global_batch_size,
            seq_len=request.workload.seq_len,
        )
        if one.slowdown is None:
            limits = [arranged.evaluator.memory_budget.limit_bytes(rank.rank) or 0 for rank in alone.memory]
            assert any(rank.total > limit for rank, limit in zip(alone.memory, limits, strict=True)), one.sentence
            assert "doesn't fit" in one.sentence
        else:
            assert alone.step_time_s / best.prediction.step_time_s - 1 == pytest.approx(one.slowdown)
            assert one.slowdown > -1e-9 or one.sentence.endswith("not as asked"), one.sentence


def test_another_schedule_keeps_the_layers_where_they_suit_it():
    arranged, found = _why("llama3-8b", "7xh100", global_batch=112, require="pp7-mb2", top=2, memory_limit="71GiB")
    first, second = search(arranged.request, 2).best
    assert first.plan == arranged.result.best[0].plan
    assert first.plan.stages
    assert second.plan.stages
    assert second.plan.schedule != first.plan.schedule
    other = found[f"schedule {second.plan.schedule}"]
    assert other.plan == second.plan


def test_where_nothing_is_data_parallel_other_axes_make_up_for_a_degree():
    arranged, found = _why("llama3-8b", "8xh100", global_batch=1, require="tp4")
    best = arranged.result.best[0].plan
    assert best.tp == 4
    assert best.mesh(0).dp_size == 1
    assert all(one.plan.world_size == 8 for one in found.values())
    assert any(change.startswith("tp 8 and ") for change in found)


def test_what_does_not_fit_is_compared_with_the_recompute_that_it_needs():
    arranged, found = _why("llama3-8b", "7xh100", global_batch=256, require="pp7-mb2", top=1, memory_limit="71GiB")
    deeper = found["schedule interleaved"]
    assert not arranged.result.best[0].plan.overrides
    assert deeper.slowdown is not None
    assert deeper.slowdown > 0
    assert "with what makes it fit" in deeper.sentence
    assert deeper.plan.overrides


def test_where_memory_is_what_counts_its_difference_is_said():
    _, found = _why("tiny", "4xh100", global_batch=8, seq_len=256, objective="memory", require="cp1-dp4")
    assert any("memory" in one.sentence for one in found.values())


def test_changes_that_there_is_no_time_for_are_named():
    arranged, known = _why("tiny", "4xh100", seq_len=256, global_batch=16)
    late = neighbours(arranged.result.best[0], arranged.evaluator, SearchBudget(0.0))
    assert known.keys() <= {one.change for one in late}
    assert all(one.evaluated is None and one.sentence.endswith("not looked at (raise --effort)") for one in late)


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


def test_no_family_is_called_the_best_of_all_but_the_first_plans_own():
    found = plan("tiny", "4xh100", seq_len=256, global_batch=16).answer
    slow = found.search.result.best[-1]
    said = families(found.request, slow)
    assert [one for one in said if one.best and one.best.value < slow.value]
    assert not [one.sentence for one in said if one.sentence.endswith("is the best of all")]
    assert any("better than the first" in one.sentence for one in said)
    fast = families(found.request, found.search.result.best[0])
    assert sum(one.sentence.endswith("is the best of all") for one in fast) == 1


def test_a_stopped_search_takes_the_better_plans_beside_its_first():
    request = _request("tiny", "4xh100", 256, 16)
    arranged = find_best_plans(request, 2, SearchBudget(1e-6))
    first = arranged.result.best[0]
    assert not arranged.result.proven
    best = _adopt_better_neighbours(arranged.result, 2, SearchBudget()).best
    assert arranged.result.best[0] == first, "the result that was given stays as it is"
    assert len(best) == 2
    assert len({one.plan for one in best}) == 2
    assert best[0].value < first.value
