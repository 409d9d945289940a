"""Orders of passes that are found for the best plans' own times and memory, where nodes are alike.

A registered schedule holds a certain number of micro-batches: 1F1B and ZB-H1 as many as the pipeline has ranks, ZB-H2
twice as many. Where the memory is enough for a number between them, or micro-batches are few, an order that is searched
for just that memory is shorter. Nothing bounds it but the work of the ranks, so only the best plans' stages get one.
"""

from collections.abc import Iterator
from dataclasses import replace
from operator import attrgetter

from muster.planner.evaluated_plan import EvaluatedPlan
from muster.planner.plan_evaluator import PlanEvaluator
from muster.planner.plan_orders import MAX_PASSES, draft_of, with_orders
from muster.planner.search_budget import SearchBudget, simulation_work
from muster.planner.search_result import ROUNDING_TOLERANCE, SearchResult
from muster.planner.space import is_admitted
from muster.spec.frameworks import runs_schedule
from muster.spec.legality import plan_violations
from muster.spec.plan import Plan
from muster.spec.stage_placement import wave_placement

IN_FLIGHT = (2.0, 1.75, 1.5, 1.25, 1.0, 0.75, 0.5)
"""Micro-batches in flight that are tried, over the pipeline's ranks, the most first: those of ZB-H2, of 1F1B and ZB-H1,
of schedules in a V with a half, and what lies between."""
ORDER_WORK = 150.0
"""Units of work of finding an order, at most and nearly always."""


def try_searched_orders(result: SearchResult, top: int, budget: SearchBudget) -> SearchResult:
    """Return the result with the best plan, if it is better, that has the stages of one of its plans, or these in a V,
    and an order found for them."""
    request = result.evaluator.request
    searches = "schedule" not in request.fixed and runs_schedule(request.framework, "auto")
    if not result.best or not searches or request.objective == "memory":
        return result
    bases = dict.fromkeys(base for one in result.best for base in _bases(one.plan, result.evaluator))
    found = [one for base in bases if (one := _best_order(base, result.evaluator, budget)) is not None]
    best = min(found, key=attrgetter("sort_key"), default=None)
    if best is None or best.value >= result.best[0].value * (1 - ROUNDING_TOLERANCE):
        return result
    return replace(result, best=[best, *result.best][:top])


def _bases(plan: Plan, evaluator: PlanEvaluator) -> Iterator[Plan]:
    """Yield plans with the stages of one, and with two stages of each of its ranks in a V, whose orders can be
    searched."""
    request = evaluator.request
    is_simple = plan.pipeline_replicas == 1 and plan.is_uniform and not plan.uneven_micro_batches
    if plan.pp == 1 or not is_simple or plan.pinned_schedule is not None:
        return
    placements = [(plan.placement, plan.stages)]
    if plan.vpp == 1 and not {"vpp", "stages"} & set(request.fixed):
        placements.append((wave_placement(plan.pp, 2), ()))
    for placement, stages in placements:
        base = draft_of(plan, request, placement, stages, float(plan.pp))
        is_short = 3 * base.num_stages * base.num_micro_batches(request.workload) <= MAX_PASSES
        if is_short and not plan_violations(base, request.model, request.workload, request.cluster.num_devices):
            yield base


def _best_order(base: Plan, evaluator: PlanEvaluator, budget: SearchBudget) -> EvaluatedPlan | None:
    """Return the best of a plan's orders, of which one that recomputes and offloads no more than the plan is followed
    by none with less memory; None where none fits or there is no budget."""
    found: list[EvaluatedPlan] = []
    for factor in IN_FLIGHT:
        if budget.is_spent:
            break
        limited = base.model_copy(update={"max_in_flight_micro_batches": factor * base.pp})
        plans = list(_fitting(limited, evaluator, budget))
        for plan in plans:
            budget.spend(simulation_work(plan, evaluator.request.workload))
            found.append(evaluator.evaluate(plan))
        if any(not plan.overrides and plan.default_strategy == base.default_strategy for plan in plans):
            break
    return min(found, key=attrgetter("sort_key"), default=None)


def _fitting(base: Plan, evaluator: PlanEvaluator, budget: SearchBudget) -> Iterator[Plan]:
    """Yield the plan with each order found for it, or what makes it fit."""
    budget.spend(ORDER_WORK)
    for ordered in with_orders(base, evaluator.request):
        for plan in evaluator.memory_budget.fit(ordered)[0]:
            if is_admitted(evaluator.request, plan):
                yield plan
