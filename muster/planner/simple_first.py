"""The search for the simplest of the plans that are about as good as the best.

A search for the best plan ends with one value that no plan beats. What it saw within the prediction's error of that
value is accidental: simpler plans may lie there that it had no reason to simulate. So it is repeated among simpler and
simpler plans, each time with the best value and the error as ceiling, until there is none. Few plans are simple and
nearly all bounds are above the ceiling, so that these searches take less time than the first.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from muster.planner.evaluated_plan import EvaluatedPlan, FoundPlan
from muster.planner.plan_evaluator import PlanEvaluator
from muster.planner.search import search
from muster.planner.search_budget import SearchBudget
from muster.planner.search_result import ROUNDING_TOLERANCE, SearchResult
from muster.planner.simplicity import Simplicity, simplest, simplicity

STEP_SHARE = 0.5
"""Share of the budget left for each of the searches."""


@dataclass(frozen=True, slots=True)
class SimplestPlan:
    """The simplest plan within the prediction's error of the best, as far as the budget allowed to look."""

    evaluated: EvaluatedPlan
    proven: bool
    """True if no simpler plan is within the error, and no other that is as simple is better."""


def find_simplest(
    best: EvaluatedPlan,
    known: Sequence[EvaluatedPlan | FoundPlan],
    evaluator: PlanEvaluator,
    budget: SearchBudget,
) -> SimplestPlan:
    """Return the simplest plan whose value is within the prediction's error of the best plan's.

    `known`: plans that were simulated on the way; `evaluator` has the memory budget that plans must keep.
    """
    tolerance = evaluator.request.tolerance
    if not tolerance:
        return SimplestPlan(best, True)
    ceiling = best.value * (1 + tolerance)
    chosen, proven = best, True
    known_one: EvaluatedPlan | FoundPlan = simplest([best, *known], best.value, tolerance) or best
    below = min(_no_more_than(known_one), simplicity(best.plan))
    while below.num_mechanisms or below.differs_by_layer:
        if budget.is_spent:
            return SimplestPlan(_evaluated(known_one, evaluator) if chosen is best else chosen, False)
        found = _best_below(below, ceiling, evaluator, known, budget.share(STEP_SHARE))
        least = min([ceiling, *(one.value for one in found.best)])
        proven = proven and found.open_bound > least * (1 - ROUNDING_TOLERANCE)
        if not found.best or found.best[0].value > ceiling:
            break
        chosen = found.best[0]
        below = simplicity(chosen.plan)
    return SimplestPlan(chosen, proven)


def _evaluated(one: EvaluatedPlan | FoundPlan, evaluator: PlanEvaluator) -> EvaluatedPlan:
    return one if isinstance(one, EvaluatedPlan) else evaluator.evaluate(one.plan)


def _no_more_than(evaluated: EvaluatedPlan | FoundPlan) -> Simplicity:
    """Return the limit that admits plans as simple as this one, and simpler ones."""
    own = simplicity(evaluated.plan)
    return own._replace(num_mechanisms=own.num_mechanisms + 1)


def _best_below(
    below: Simplicity,
    ceiling: float,
    evaluator: PlanEvaluator,
    known: Sequence[EvaluatedPlan | FoundPlan],
    budget: SearchBudget,
) -> SearchResult:
    """Search the plans that are simpler than `below` for the best, with values up to `ceiling`."""
    narrow = evaluator.narrowed(replace(evaluator.request, simpler_than=below))
    simpler = [one for one in known if one.value <= ceiling and narrow.request.is_simple_enough(one.plan)]
    return search(narrow.request, 1, budget, narrow, ceiling, known=simpler)
