"""Removal of offload that saves no time from the best plan.

A search makes a plan fit by the choice that takes the least time, and of several such by the one that leaves the most
memory: so layers are offloaded that need not be, as long as no pass waits for the copies. Of plans that take equally
long, people want the one that copies least.
"""

from dataclasses import replace
from operator import attrgetter

from muster.planner.memory.fitter import ROUNDING_TOLERANCE
from muster.planner.search_budget import SearchBudget, simulation_work
from muster.planner.search_result import SearchResult


def trim_offload(result: SearchResult, budget: SearchBudget) -> SearchResult:
    """Return the result with as little offload in its first plan as makes it no slower, where there is time for it."""
    if not result.best or all(strategy.offload == "none" for strategy in result.best[0].plan.strategies):
        return result
    evaluator = result.evaluator
    first, *others = result.best
    if not budget.has_time_for(simulation_work(first.plan, evaluator.request.workload)):
        return result
    plan = evaluator.memory_budget.with_less_offload(first.plan)
    trimmed = next((one for one in result.best if one.plan == plan), None) or evaluator.evaluate(plan)
    if trimmed.value > first.value * (1 + ROUNDING_TOLERANCE):
        return result
    kept = [one for one in others if one.plan != plan]
    return replace(result, best=sorted([trimmed, *kept], key=attrgetter("sort_key")))
