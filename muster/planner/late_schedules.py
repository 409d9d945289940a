"""Schedules that are seldom the best, tried for the shapes of the best plans.

Nothing but the work of its ranks bounds a step of such a schedule (DualPipe, Hanayo, GPipe …), so that a proof over all
shapes would look at several times as many plans. A search tries the others for all shapes, and these last.
"""

from collections import Counter
from dataclasses import replace

from muster.planner.evaluated_plan import FoundPlan
from muster.planner.frontier import Frontier
from muster.planner.search_budget import SearchBudget
from muster.planner.search_phases import best_first
from muster.planner.search_result import SearchResult
from muster.planner.space import MeshShape, schedule_choices
from muster.spec.plan import Plan


def try_late_schedules(result: SearchResult, top: int, budget: SearchBudget, leaves_open: bool = False) -> SearchResult:
    """Return the result with better plans that have the best plans' shapes, and schedules that are tried late.

    `leaves_open`: what the budget isn't enough for counts as open.
    """
    evaluator = result.evaluator
    request = evaluator.request
    if not result.best or "schedule" in request.fixed or request.objective == "memory":
        return result
    frontier = Frontier(evaluator, top, 1, result.best[0].value, budget)
    frontier.keep(FoundPlan(one.sort_key, one.plan) for one in result.best)
    for shape in dict.fromkeys(_shape_of(one.plan) for one in result.best if one.plan.pp > 1):
        for choice in schedule_choices(request, shape, tried_late=True):
            frontier.push("orders", evaluator.bounds.of_choice(choice), choice)
    best_first(frontier, budget.work)
    known = {one.plan: one for one in result.best} | frontier.evaluated
    best = [known[found.plan] for found in frontier.best]
    if leaves_open and not frontier.is_settled:
        result = replace(result, open_bound=min(result.open_bound, frontier.open_bound))
    return replace(result, best=best, counts=result.counts + Counter(frontier.counts))


def _shape_of(plan: Plan) -> MeshShape:
    own = plan.mesh(0).dp_size, plan.tp, plan.pp, plan.cp, plan.ep, plan.micro_batch_size
    return MeshShape(*own, plan.ep_redundant_experts)
