"""Families of plans: those that use exactly the same axes beside data parallelism, and the best of each.

Plans of one family are variants of one idea. So the plans that `muster plan` shows are the best of different families,
and `--explain` says of every family what its best plan is, or why it has none.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from muster.planner.alternatives import (
    Alternative,
    FirstPlan,
    compare_alternative,
    find_alternatives,
)
from muster.planner.evaluated_plan import EvaluatedPlan, FoundPlan
from muster.planner.explain import describe_nearest_miss, explain_illegal, explain_offload
from muster.planner.plan_evaluator import PlanEvaluator
from muster.planner.request import PlanRequest
from muster.planner.search_budget import SearchBudget
from muster.planner.space import MODEL_AXES

OFFLOAD_EFFORT = 0.1
"""Work of finding a plan with offload for a family that doesn't fit without, as a part of the answer's."""


@dataclass(frozen=True, slots=True)
class PlanFamily:
    """The plans that use exactly these axes beside data parallelism, and the search for the best of them."""

    axes: tuple[str, ...]
    alternative: Alternative

    @property
    def name(self) -> str:
        return family_name(self.axes)


def family_name(axes: Sequence[str]) -> str:
    """Return the name of the family with these model axes."""
    return " × ".join(("data", *axes)) if axes else "data alone"


def all_families(request: PlanRequest) -> Iterator[tuple[str, ...]]:
    """Yield the axes of each family of a model, the fewest first."""
    axes = [axis for axis in MODEL_AXES if axis != "ep" or request.model.moe is not None]
    for size in range(len(axes) + 1):
        yield from combinations(axes, size)


def search_families(
    evaluator: PlanEvaluator,
    known: Sequence[EvaluatedPlan],
    budget: SearchBudget,
    notable: Sequence[FoundPlan] = (),
) -> list[PlanFamily]:
    """Return all families with their best plans. `known` and `notable`: plans to begin with."""
    subsets = list(all_families(evaluator.request))
    evaluators = [evaluator.narrowed(replace(evaluator.request, axes=frozenset(axes))) for axes in subsets]
    found = find_alternatives(list(map(family_name, subsets)), evaluators, known, budget, notable)
    return [PlanFamily(axes, alternative) for axes, alternative in zip(subsets, found, strict=True)]


def explain_family(family: PlanFamily, first: FirstPlan, budget: SearchBudget) -> str:
    """Return the best plan of a family against the first of all in words; for a family without a plan, why none is
    legal or fits, and what would change that."""
    found = family.alternative
    if found.best is not None:
        if found.best.plan == first.evaluated.plan:
            return f"{found.best.name} is the best of all"
        return f"{found.best.name}, {compare_alternative(first, found).sentence}"
    if not found.proven:
        return compare_alternative(first, found).sentence
    request = found.result.evaluator.request
    if found.result.nearest_miss is not None:
        why = f"doesn't fit: {describe_nearest_miss(found.result)}"
        return why + explain_offload(request, budget)
    return f"no legal plan: {explain_illegal(request, family.axes)}"
