"""What the best plan copies to its hosts for nothing stays on the device.

A search makes a plan fit by what takes least time, and of that by what leaves most room: so that layers are copied that
need not be, as long as nothing waits for them. Of plans that take as long, people want the one that copies least.
"""

from dataclasses import replace

from muster.planner.memory.fitter import ROUNDING_TOLERANCE
from muster.planner.plan_evaluator import PlanEvaluator
from muster.planner.search_result import SearchResult


def trim_offload(result: SearchResult, evaluator: PlanEvaluator) -> SearchResult:
    """What was found, its first plan with as little offload as is no slower."""
    if not result.best:
        return result
    first, *others = result.best
    plan = evaluator.memory_budget.with_less_offload(first.plan)
    lean = next((one for one in result.best if one.plan == plan), None) or evaluator.evaluate(plan)
    if lean.value > first.value * (1 + ROUNDING_TOLERANCE):
        return result
    kept = [one for one in others if one.plan != plan]
    return replace(result, best=sorted([lean, *kept], key=lambda one: one.sort_key))
