"""Traits by which searches for alternatives ask for plans.

A search sees plans of all kinds on its way to the best. It keeps the best with each trait, so that a search for the
best plan of a family, or with another degree, has one to begin with.
"""

from collections.abc import Iterator, Sequence
from operator import attrgetter

from muster.planner.evaluated_plan import FoundPlan
from muster.planner.plan_evaluator import PlanEvaluator
from muster.planner.space import is_admitted, used_axes
from muster.spec.plan import Plan

Trait = tuple[object, ...]

MAX_WEIGHED = 3
"""Plans whose memory is weighed until one fits."""

_FIELDS = ("tp", "pp", "cp", "ep", "micro_batch_size", "schedule")


def plan_traits(plan: Plan) -> Iterator[Trait]:
    """Yield the traits of a plan that a requirement may ask for."""
    yield "axes", used_axes(plan)
    yield from ((name, getattr(plan, name)) for name in _FIELDS)
    default = plan.default_strategy
    yield "data", plan.dp_replicate, plan.dp_shard, default.zero
    if default.recompute == "full" and not plan.overrides:
        yield "recompute", "full"


def fitting_notable(evaluator: PlanEvaluator, notable: Sequence[FoundPlan], weighs: bool) -> list[FoundPlan]:
    """Return the best of notable plans that the evaluator's request asks for and, where it `weighs` memory, fits."""
    wanted = (one for one in sorted(notable, key=attrgetter("sort_key")) if is_admitted(evaluator.request, one.plan))
    for _, one in zip(range(MAX_WEIGHED), wanted, strict=False):
        if not weighs or evaluator.memory_budget.fits(one.plan):
            return [one]
    return []
