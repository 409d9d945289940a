"""Branch and bound over plans: nodes with the lowest bounds first, and only simulated values are trusted."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import inf
from time import perf_counter

from muster.planner.evaluated_plan import EvaluatedPlan
from muster.planner.frontier import Frontier
from muster.planner.node_order import is_heterogeneous
from muster.planner.plan_evaluator import PlanEvaluator
from muster.planner.request import PlanRequest
from muster.planner.search_phases import best_first, local_search, probe, seed
from muster.planner.search_result import SearchResult, total_counts
from muster.planner.space import draft_plans, mesh_shapes, schedule_choices
from muster.schedule.gc_pause import gc_paused
from muster.spec.plan import Plan

SEED_TIME_SHARE = 0.25
"""Share of the time limit that seeds may take."""

MIN_EXPAND_S = 4.0
"""Seconds for the bounds of all choices, however little time there is: the probes are chosen among them."""

PROBE_TIME_SHARE = 0.75
"""Share of the time that is left after expansion that probes may take."""

LOCAL_SEARCH_BEGINS = 0.5
"""Share of the time limit after which a search that isn't settled turns to local search."""

LOCAL_SEARCH_ENDS = 0.75
"""Share of the time limit at which local search stops."""


def search(
    request: PlanRequest,
    top: int = 5,
    limit_s: float = inf,
    evaluator: PlanEvaluator | None = None,
    ceiling: float = inf,
    seeds: Sequence[Plan] = (),
    exact: int | None = None,
) -> SearchResult:
    """Return the `top` best plans of a request. `seeds` are simulated first; values above `ceiling` may be left out.

    A plan is only left out when its bound is above simulated values, or when it doesn't fit in memory. So the first
    `exact` plans (default: all) are those that simulating every plan would give; the others are the best of those that
    were simulated. After `limit_s` the search stops, and the result's `gap` says by how much its best may be improved.
    Where no plan leaves the head-room of the memory budget free, a second search does without it.
    """
    evaluator = evaluator or PlanEvaluator(request)
    exact = exact or top
    first = _search(evaluator, top, exact, seeds, limit_s, ceiling)
    if first.best or not evaluator.memory_budget.head_room or ceiling < inf:
        return first
    left_s = max(limit_s - first.seconds, limit_s / 2)
    second = _search(evaluator.without_head_room(), top, exact, seeds, left_s, ceiling)
    return replace(
        second,
        gave_up_head_room_early=not first.proven,
        seconds=first.seconds + second.seconds,
        counts=total_counts(second, [first, second]),
    )


def _search(
    evaluator: PlanEvaluator, top: int, exact: int, seeds: Sequence[Plan], limit_s: float, ceiling: float
) -> SearchResult:
    """Run the phases on a new frontier, within one memory budget."""
    begin_s = perf_counter()
    with gc_paused():
        frontier = Frontier(evaluator, top, exact, ceiling)
        add_likely = not seeds and is_heterogeneous(evaluator.request.cluster)
        seed(frontier, seeds, add_likely, begin_s + SEED_TIME_SHARE * limit_s)
        frontier.expand(begin_s + max(limit_s, MIN_EXPAND_S))
        now_s = perf_counter()
        probe(frontier, now_s + PROBE_TIME_SHARE * (begin_s + limit_s - now_s))
        best_first(frontier, begin_s + LOCAL_SEARCH_BEGINS * limit_s)
        if not frontier.is_settled:
            local_search(frontier, begin_s + LOCAL_SEARCH_ENDS * limit_s)
        best_first(frontier, begin_s + limit_s)
        if frontier.unexpanded and not frontier.best and ceiling == inf:  # only shapes that weren't reached are left
            frontier.expand(inf)
            probe(frontier, perf_counter())
    return frontier.result(perf_counter() - begin_s)


def evaluate_seeds(
    evaluator: PlanEvaluator, top: int, limit_s: float, seeds: Sequence[Plan], add_likely: bool
) -> SearchResult:
    """Return the best of `seeds` and, with `add_likely`, of plans that are likely to be good, without a search."""
    begin_s = perf_counter()
    with gc_paused():
        frontier = Frontier(evaluator, top, top, inf)
        seed(frontier, seeds, add_likely, begin_s + limit_s)
    return replace(frontier.result(perf_counter() - begin_s), open_bound=0.0)


def exhaustive_search(evaluator: PlanEvaluator) -> Iterator[EvaluatedPlan]:
    """Simulate every plan of the space that fits, without any bound: the reference that `search` must agree with."""
    request = evaluator.request
    for shape in mesh_shapes(request):
        for choice in schedule_choices(request, shape):
            for draft in draft_plans(request, choice):
                plan = evaluator.complete_draft(draft, choice)
                if plan is not None:
                    yield from map(evaluator.evaluate, evaluator.memory_budget.fit(plan)[0])
