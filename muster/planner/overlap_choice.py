"""Choice of the overlap of tensor-parallel collectives, among the ways that a request allows (`--allow domino`)."""

from dataclasses import replace

from muster.planner.plan_evaluator import PlanEvaluator
from muster.planner.request import PlanRequest, with_overlap_word
from muster.planner.search_budget import SearchBudget
from muster.planner.tiers import best_values
from muster.spec.formatting import format_fraction


def choose_tp_overlap(request: PlanRequest, budget: SearchBudget) -> PlanRequest:
    """Return the request for plans with the way that the best plans have, each way's found by a search of its own.

    A way is only taken where it is better by more than the request's tolerance than none, and than those before it.
    """
    words = ("", *request.allowed_overlap_words)
    evaluators = [PlanEvaluator(with_overlap_word(request, word)) for word in words]
    values = best_values(evaluators, budget)
    found = [number for number, value in enumerate(values) if value is not None]
    if not found:
        return request
    chosen = found[-1]
    if chosen:
        before, value = values[found[-2]] if len(found) > 1 else None, values[chosen]
        gain = f"{format_fraction(before / value - 1)} more without" if before and value else "no plan fits without"
    else:
        gain = f"none is more than {request.tolerance:.0%} better" if request.tolerance else "none is better"
    line = f"{' and '.join(request.allowed_overlap_words)} allowed, {words[chosen] or 'none'} taken: {gain}"
    return replace(evaluators[chosen].request, derived_lines=(*request.derived_lines, line))
