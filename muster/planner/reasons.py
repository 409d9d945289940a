"""Reasons for the first plan: the best plan for each requirement that the first doesn't meet, against it.

A requirement is one part of a plan's name: another degree, micro-batch size, sharding level or schedule, or full
recompute. All other choices are made anew for it, as `muster plan --require` makes them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from muster.planner.alternatives import (
    Alternative,
    Comparison,
    FirstPlan,
    compare_alternative,
    describe_difference,
    find_alternatives,
)
from muster.planner.evaluated_plan import EvaluatedPlan, FoundPlan
from muster.planner.neighbours import shard_groups, with_all_layers
from muster.planner.plan_evaluator import PlanEvaluator
from muster.planner.request import PlanRequest, require_more
from muster.planner.search_budget import SearchBudget, simulation_work
from muster.spec.errors import InfeasibleError
from muster.spec.mesh_axes import SUPPORTED_AXES
from muster.spec.mesh_cuts import divisors
from muster.spec.plan import Plan
from muster.spec.schedules import SCHEDULES


@dataclass(frozen=True, slots=True)
class Reason:
    """An alternative to the first plan, and how it compares."""

    part: str
    """Part of a plan's name that the alternative has to have; empty where it is the first plan with a change."""
    comparison: Comparison
    alternative: Alternative | None = None
    """The search for the plan that it compares with; None where that is the first plan with a change."""

    def against(self, first: FirstPlan) -> "Reason | None":
        """Return the same alternative compared with another first plan; None where it is that plan."""
        if self.alternative is None or self.comparison.best == first.evaluated:
            return None
        return replace(self, comparison=compare_alternative(first, self.alternative))

    @property
    def sentence(self) -> str:
        """The comparison with its plan, for people."""
        best = self.comparison.best
        shown = f" ({best.name})" if best is not None and self.part else ""
        return f"{self.comparison.name}: {self.comparison.sentence}{shown}"


def find_reasons(
    first: FirstPlan,
    known: Sequence[EvaluatedPlan],
    budget: SearchBudget,
    notable: Sequence[FoundPlan] = (),
    fastest: EvaluatedPlan | None = None,
) -> list[Reason]:
    """Return the best plan for each requirement that the first plan doesn't meet, for those that have legal plans.

    `known` and `notable`: plans to begin with. The first plan and the `fastest`, changed only as required, are too.
    """
    request = first.evaluator.request
    parts = list(_other_parts(first.evaluated.plan, request))
    evaluators = []
    for _, part in parts:
        wanted = require_more(request, part)
        is_alike = "recompute" not in wanted.fixed
        evaluators.append(first.evaluator.narrowed(wanted) if is_alike else PlanEvaluator(wanted))
    names = [words for words, _ in parts]
    centres = list(dict.fromkeys(one.plan for one in (first.evaluated, fastest or first.evaluated)))
    alternatives = find_alternatives(names, evaluators, known, budget, notable, centres)
    found = [
        Reason(part, compare_alternative(first, alternative), alternative)
        for (_, part), alternative in zip(parts, alternatives, strict=True)
        if alternative.best is not None or not alternative.proven or alternative.result.nearest_miss is not None
    ]
    work = simulation_work(first.evaluated.plan, request.workload)
    return [*found, *(_without_savings(first.evaluated, first.evaluator) if budget.has_time_for(2 * work) else ())]


def _other_parts(plan: Plan, request: PlanRequest) -> Iterator[tuple[str, str]]:
    """Yield changes in words, each with the part of a plan's name that requires it."""
    fixed = request.fixed
    for axis in ("tp", "pp", "cp", "ep"):
        degree = getattr(plan, axis)
        is_tried = axis not in fixed and (axis in SUPPORTED_AXES or not request.runnable)
        if is_tried and (axis != "ep" or request.model.moe is not None):
            yield from ((f"{axis} {other}", f"{axis}{other}") for other in _nearest_degrees(degree))
    if "micro_batch_size" not in fixed:
        size = plan.micro_batch_size
        yield from ((f"micro-batches of {other}", f"mb{other}") for other in _nearest_degrees(size))
    if "zero" not in fixed and plan.dp_shard > 1:
        data = f"dp{plan.dp_replicate}x{plan.dp_shard}" if plan.dp_replicate > 1 else f"dp{plan.dp_shard}"
        levels = (level for level in ("z1", "z2", "z3") if level != plan.default_strategy.zero)
        yield from ((f"sharding level {level} ({data}-{level})", f"{data}-{level}") for level in levels)
        for _, group in shard_groups(plan, request)[:1]:
            whole = f"dp{plan.dp_replicate * plan.dp_shard}-z3-zp{group}g{group}"
            yield f"parameters and gradients within nodes ({whole})", whole
    if "recompute" not in fixed and (plan.overrides or plan.default_strategy.recompute != "full"):
        yield "recompute of all layers", "rfull"
    if "schedule" not in fixed and plan.pp > 1:
        for name, entry in SCHEDULES.items():
            if entry.planner.compared_with_chunks is not None and name != plan.schedule:
                yield f"schedule {name}", "s" + name.replace("-", "")


def _nearest_degrees(degree: int) -> list[int]:
    """Return half of a number, or where it is odd the next smaller divisor, and its double."""
    smaller = [degree // 2] if degree % 2 == 0 else [other for other in divisors(degree) if other < degree][-1:]
    return [degree * 2, *smaller]


_EXCHANGES = (
    ("the same plan without copies of experts", "ep_redundant_experts", 0),
    ("the same plan with hidden states sent as they are", "ep_dispatch_dtype", "none"),
    ("the same plan with buckets of one layer", "bucket_layers", 1),
    ("the same plan with hidden states instead of centroids", "ep_lsh_rate", 0.0),
)


def _without_savings(first: EvaluatedPlan, evaluator: PlanEvaluator) -> Iterator[Reason]:
    """Yield the first plan without its recompute, its offload, its copies of experts, its rows in 8 bits and its
    larger buckets, where these aren't required."""
    plan, fixed = first.plan, evaluator.request.fixed
    for field in ("recompute", "offload"):
        if field not in fixed and any(getattr(strategy, field) != "none" for strategy in plan.strategies):
            changed = with_all_layers(plan, **{field: "none"})
            yield _changed_reason(f"the same plan without {field}", changed, first, evaluator)
    for words, field, value in _EXCHANGES:
        if field not in fixed and getattr(plan, field) != value:
            yield _changed_reason(words, plan.model_copy(update={field: value}), first, evaluator)
    if plan.compile is None and first.prediction.compiled:
        eager = plan.model_copy(update={"compile": False})
        yield _changed_reason("the same plan without compile", eager, first, evaluator)


def _changed_reason(words: str, plan: Plan, first: EvaluatedPlan, evaluator: PlanEvaluator) -> Reason:
    """Return what becomes of the first plan with a change, everything else as it is."""
    try:
        other = evaluator.evaluate(plan)
    except InfeasibleError as error:
        return Reason("", Comparison(words, None, None, None, str(error)))
    budget = evaluator.memory_budget
    if budget.fits(plan):
        slower = other.prediction.step_time_s / first.prediction.step_time_s - 1
        sentence = describe_difference(first, other, evaluator.request.objective)
        return Reason("", Comparison(words, other, slower, None, sentence))
    fullest = max(other.prediction.memory, key=lambda rank: rank.total - (budget.limit_bytes(rank.rank) or 0))
    limit = budget.limit_bytes(fullest.rank)
    of = "" if limit is None else f" of {limit / 2**30:.1f} GiB"
    sentence = f"doesn't fit, {fullest.total / 2**30:.1f} GiB{of}"
    return Reason("", Comparison(words, None, None, None, sentence))
