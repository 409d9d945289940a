"""Neighbours of a plan, each one change away: reasons for the best plan in words, and steps of local search."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from operator import attrgetter
from typing import Any

from muster.planner.evaluated_plan import EvaluatedPlan
from muster.planner.plan_evaluator import PlanEvaluator
from muster.planner.request import PlanRequest
from muster.planner.search_budget import SearchBudget, simulation_work
from muster.planner.space import is_admitted
from muster.simulate.predict import Prediction
from muster.spec.errors import InfeasibleError
from muster.spec.legality import plan_violations
from muster.spec.plan import LayerOverride, Plan
from muster.spec.schedules import DEFAULT_SCHEDULE, SCHEDULES
from muster.spec.supported import unsupported_features

NOT_EVALUATED = "not looked at (raise --effort)"
SAME_SPEED_TOLERANCE = 0.005
"""Relative difference of step times below which plans count as equally fast."""

_COMPENSATING_AXES = ("dp_shard", "dp_replicate", "pp", "tp", "cp")
"""Axes that compensate for a changed degree, so that all devices stay in use: the first that gives a legal plan."""


@dataclass(frozen=True, slots=True)
class Neighbour:
    """A plan that differs from the winner in one thing, and in what follows from it."""

    change: str
    plan: Plan
    slowdown: float | None
    """Relative increase of the step time; None where the plan doesn't fit, isn't possible or wasn't simulated."""
    sentence: str
    evaluated: EvaluatedPlan | None = None
    """The simulated plan; None where it doesn't fit or wasn't simulated."""

    @property
    def timed_out(self) -> bool:
        """True if there was no time to evaluate it."""
        return self.sentence == f"{self.change}: {NOT_EVALUATED}"


@dataclass(frozen=True, slots=True)
class Change:
    """A changed plan, and the change in words."""

    description: str
    plan: Plan
    may_refit: bool = True
    """True if recompute may change with it; False where recompute itself is what changes."""


def neighbours(winner: EvaluatedPlan, evaluator: PlanEvaluator, budget: SearchBudget | None = None) -> list[Neighbour]:
    """Return the effect of each single change to the winner in a sentence, for changes that leave a legal plan.

    Choices that the search makes for every plan are made for these too: layers are balanced, and a plan that doesn't
    fit gets the cheapest recompute and offload that make it fit. So where the search is proven, no neighbour within its
    space is faster. Once the budget is spent no more are simulated, and their sentences say so.
    """
    found: list[Neighbour] = []
    budget = budget or SearchBudget()
    for change in single_changes(winner.plan, evaluator.request):
        if budget.is_spent:
            found.append(Neighbour(change.description, change.plan, None, f"{change.description}: {NOT_EVALUATED}"))
            continue
        budget.spend(simulation_work(change.plan, evaluator.request.workload))
        try:
            found.append(_evaluate_change(winner, change, evaluator))
        except InfeasibleError:
            continue
    return found


# ----------------------------------------------------------------------------------------------------------------------
# Changes


def single_changes(plan: Plan, request: PlanRequest) -> Iterator[Change]:
    """Yield legal plans one change away; another axis compensates for a changed degree."""
    seen: set[Plan] = set()
    seen.add(plan)
    for change in _all_changes(plan, request):
        if change.plan not in seen and _is_legal(change.plan, request):
            seen.add(change.plan)
            yield change


def _all_changes(plan: Plan, request: PlanRequest) -> Iterator[Change]:
    for axis in ("tp", "pp", "cp"):
        for grows in (True, False):
            yield from _degree_change(plan, request, axis, grows)
    for degree in (plan.ep * 2, plan.ep // 2):
        if request.model.moe is not None and degree and plan.ep % min(degree, plan.ep) == 0:
            yield Change(f"ep {degree}", plan.model_copy(update={"ep": degree}))
    for size in (plan.micro_batch_size * 2, plan.micro_batch_size / 2):
        if size >= 1 and size == int(size):
            yield Change(f"micro-batches of {int(size)}", plan.model_copy(update={"micro_batch_size": int(size)}))
    for level in ("z1", "z2", "z3"):
        if plan.dp_shard > 1 and level != plan.default_strategy.zero:
            yield Change(f"sharding level {level}", _with_strategy(plan, zero=level))
    for mode in ("none", "full"):
        if plan.overrides or mode != plan.default_strategy.recompute:
            yield Change(f"recompute {mode}", _with_all_layers(plan, recompute=mode), may_refit=False)
    if any(strategy.offload != "none" for strategy in plan.strategies):
        yield Change("no offload", _with_all_layers(plan, offload="none"), may_refit=False)
    if plan.pp > 1 and any(strategy.offload != "activations" for strategy in plan.strategies):
        yield Change("offload of all layers", _with_all_layers(plan, offload="activations"), may_refit=False)
    for schedule, entry in SCHEDULES.items():
        chunks = entry.planner.compared_with_chunks
        if plan.pp > 1 and chunks is not None and (schedule, chunks) != (plan.schedule, plan.vpp):
            stages = plan.stages if chunks == plan.vpp else ()
            yield Change(
                f"schedule {schedule}",
                plan.model_copy(
                    update={
                        "schedule": schedule,
                        "vpp": chunks,
                        "stages": stages,
                        "pinned_schedule": None,
                        "max_in_flight_micro_batches": None,
                    }
                ),
            )


def _degree_change(plan: Plan, request: PlanRequest, axis: str, grows: bool) -> Iterator[Change]:
    """Yield the plan with a doubled or halved degree, with the first axis that compensates for it."""
    for partner in _COMPENSATING_AXES:
        degree = getattr(plan, axis)
        other = getattr(plan, partner)
        if partner == axis or (other if grows else degree) % 2:
            continue
        degrees = {axis: degree * 2, partner: other // 2} if grows else {axis: degree // 2, partner: other * 2}
        changed = _with_degrees(plan, degrees, request)
        if _is_legal(changed, request):
            also = "" if partner.startswith("dp") else f" and {partner} {degrees[partner]}"
            yield Change(f"{axis} {degrees[axis]}{also}", changed)
            return


def _with_degrees(plan: Plan, degrees: dict[str, int], request: PlanRequest) -> Plan:
    """Return the plan with other degrees, and the fields that these decide."""
    update: dict[str, Any] = dict(degrees)
    pp = degrees.get("pp", plan.pp)
    if pp != plan.pp:
        update["stages"] = ()
    if pp == 1:
        update |= {"schedule": DEFAULT_SCHEDULE, "vpp": 1}
    changed = plan.model_copy(update=update)
    strategy: dict[str, object] = {}
    if changed.tp == 1 or request.workload.seq_len % (changed.tp * changed.cp):
        strategy["sp"] = False
    elif plan.tp == 1:
        strategy["sp"] = request.fixed.get("sp", True)
    if plan.mesh(0).dp_size == 1 < changed.mesh(0).dp_size:
        strategy["zero"] = request.fixed.get("zero", "z1")
    return _with_strategy(changed, **strategy) if strategy else changed


def _is_legal(plan: Plan, request: PlanRequest) -> bool:
    return not plan_violations(plan, request.model, request.workload, request.cluster.num_devices)


def _with_all_layers(plan: Plan, **changed: object) -> Plan:
    """Return the plan with a change for all layers; overrides that no longer differ from the default are dropped."""
    default = plan.default_strategy.model_copy(update=changed)
    runs = (run.model_copy(update={"strategy": run.strategy.model_copy(update=changed)}) for run in plan.overrides)
    overrides = tuple(run for run in runs if run.strategy != default)
    return plan.model_copy(update={"default_strategy": default, "overrides": overrides})


def _with_strategy(plan: Plan, **changed: object) -> Plan:
    """Return the plan with a change for all layers that keeps recompute by layer as it is."""
    overrides = tuple(
        LayerOverride(
            start=run.start,
            count=run.count,
            strategy=run.strategy.model_copy(update={**changed, "recompute": run.strategy.recompute}),
        )
        for run in plan.overrides
    )
    default = plan.default_strategy.model_copy(update=changed)
    return plan.model_copy(update={"default_strategy": default, "overrides": overrides})


# ----------------------------------------------------------------------------------------------------------------------
# Evaluation


def _evaluate_change(winner: EvaluatedPlan, change: Change, evaluator: PlanEvaluator) -> Neighbour:
    request = evaluator.request
    plan = _rebalanced(winner.plan, change.plan, evaluator)
    if not (change.may_refit and _may_refit(request)):
        return _compare(winner, change.description, evaluator.evaluate(plan), evaluator)
    bare = _without_fitting(plan, request)
    fitting = sorted(map(evaluator.evaluate, evaluator.memory_budget.fit(bare)[0]), key=attrgetter("sort_key"))
    if not fitting:
        full = evaluator.evaluate(_with_all_layers(bare, recompute="full"))
        return _compare(winner, change.description, full, evaluator, " with all recomputed")
    note = "" if fitting[0].plan is bare or _was_fitted(winner.plan, request) else ", with what makes it fit"
    return _compare(winner, change.description, fitting[0], evaluator, note)


def neighbour_plans(plan: Plan, evaluator: PlanEvaluator, part: tuple[int, int] = (0, 1)) -> Iterator[Plan]:
    """Yield the plans one change away that fit, with recompute and offload where these are needed, within the space of
    the search. `part`: number of a part of the changes, which are dealt out in turn, and number of parts."""
    request = evaluator.request
    number, parts = part
    for change in islice(single_changes(plan, request), number, None, parts):
        if change.may_refit and _may_refit(request):
            try:
                found = evaluator.memory_budget.fit(
                    _without_fitting(_rebalanced(plan, change.plan, evaluator), request)
                )[0]
            except InfeasibleError:
                continue
            yield from (fitting for fitting in found if is_admitted(request, fitting))


def _may_refit(request: PlanRequest) -> bool:
    """Return True if the search chooses recompute by layer."""
    return "recompute" not in request.fixed and request.objective != "memory" and not request.base.overrides


def _without_fitting(plan: Plan, request: PlanRequest) -> Plan:
    """Return the plan with only the recompute and offload that are required."""
    offload = request.fixed.get("offload", request.base.default_strategy.offload)
    return _with_all_layers(plan, recompute="none", offload=offload)


def _was_fitted(plan: Plan, request: PlanRequest) -> bool:
    """Return True if the plan recomputes or offloads in order to fit."""
    return plan != _without_fitting(plan, request)


def _rebalanced(winner: Plan, plan: Plan, evaluator: PlanEvaluator) -> Plan:
    """Return the changed plan with layers balanced and the batch split for it, where the winner has them so."""
    request = evaluator.request
    fixed = request.fixed.get("stages") or request.base.stages
    if winner.stages and not fixed and winner.is_uniform and plan.pp > 1 and plan.vpp == 1:
        # The evaluator has cached times of plans without recompute, which hardly changes the best balance.
        even = _without_fitting(plan, request).model_copy(update={"stages": ()})
        moved = evaluator.with_balanced_layers(even)
        if moved is not None and evaluator.bounds.of_plan(moved) < evaluator.bounds.of_plan(even):
            plan = plan.model_copy(update={"stages": moved.stages})
        else:
            plan = plan.model_copy(update={"stages": ()})
    if winner.uneven_micro_batches and "uneven_micro_batches" not in request.fixed:
        even = plan.model_copy(update={"uneven_micro_batches": ()})
        plan = evaluator.batch_splitter.with_best_split(even) or even
    return plan


def _compare(
    winner: EvaluatedPlan, change: str, other: EvaluatedPlan, evaluator: PlanEvaluator, note: str = ""
) -> Neighbour:
    plan = other.plan
    over = [
        (rank.total - limit, rank.total, limit)
        for rank in other.prediction.memory
        if (limit := evaluator.memory_budget.limit_bytes(rank.rank)) is not None
    ]
    if over and max(over)[0] > 0:
        _, total, limit = max(over)
        fits = f"doesn't fit{note}, {total / 2**30:.1f} GiB of {limit / 2**30:.1f} GiB"
        return Neighbour(change, plan, None, f"{change}: {fits}")
    starred = "; can't be run yet" if unsupported_features(plan) and not winner.unsupported else ""
    if not is_admitted(replace(evaluator.request, runnable=False), plan):
        starred += "; not as asked"
    words, slower = _difference(winner, other, evaluator.request)
    return Neighbour(change, plan, slower, f"{change}: {words}{note}{starred}", other)


def _difference(winner: EvaluatedPlan, other: EvaluatedPlan, request: PlanRequest) -> tuple[str, float]:
    """Return the difference in words, and the relative increase of the step time."""
    mine = winner.prediction
    its = other.prediction
    slower = its.step_time_s / mine.step_time_s - 1
    if request.objective == "memory" and abs(more := other.value / winner.value - 1) >= SAME_SPEED_TOLERANCE:
        return f"{abs(more):.1%} {'more' if more > 0 else 'less'} memory, {_slower(slower)}", slower
    if abs(slower) < SAME_SPEED_TOLERANCE:
        return "as fast", slower
    name, more_s = largest_difference(mine, its, slower > 0)
    return f"{_slower(slower)}, {abs(more_s):.3g} s {'more' if slower > 0 else 'less'} {name}", slower


def _slower(part: float) -> str:
    return f"{abs(part):.1%} {'slower' if part > 0 else 'faster'}" if abs(part) >= SAME_SPEED_TOLERANCE else "as fast"


def largest_difference(mine: Prediction, its: Prediction, grows: bool) -> tuple[str, float]:
    """Return the part of a step that grows or shrinks most, and by how many seconds."""
    mine_s = _parts(mine)
    its_s = _parts(its)
    differences = {name: its_s.get(name, 0.0) - mine_s.get(name, 0.0) for name in {**mine_s, **its_s}}
    name = (max if grows else min)(differences, key=lambda part: differences[part])
    return name, differences[name]


def _parts(prediction: Prediction) -> dict[str, float]:
    parts = prediction.parts
    waiting = {f"waiting for {axis}": time_s for axis, time_s in parts.communication_s.items()}
    return {"of computing": parts.compute_s, "bubble": parts.bubble_s, "optimizer": parts.optimizer_s, **waiting}
