"""What one change to a plan makes of it: why the best is the best, in words."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf
from time import perf_counter
from typing import Any

from muster.planner.judge import Judge
from muster.planner.request import Request
from muster.planner.space import admitted
from muster.planner.verdict import Verdict
from muster.simulate.predict import Prediction
from muster.spec.errors import InfeasibleError
from muster.spec.legal import problems
from muster.spec.plan import LayerRun, Plan
from muster.spec.runnable import not_yet

NO_TIME = "not looked at within --limit"
LIKE = 0.005
"""Plans closer than this part of the step are called alike."""

_PARTNERS = ("dp_shard", "dp_replicate", "pp", "tp", "cp")
"""Axes that make up for a changed degree, so that all devices stay in use: the first with which the plan is legal."""


@dataclass(frozen=True, slots=True)
class Neighbour:
    """A plan that differs from the winner in one thing, and in what follows from it."""

    change: str
    plan: Plan
    slower: float | None
    """The part by which its step is longer; None where it doesn't fit, can't be or was not simulated."""
    sentence: str
    verdict: Verdict | None = None
    """None where it doesn't fit, or was not simulated."""

    @property
    def is_late(self) -> bool:
        """Whether there was no time to look at it."""
        return self.sentence == f"{self.change}: {NO_TIME}"


@dataclass(frozen=True, slots=True)
class Change:
    """A change to a plan, in words and made."""

    words: str
    plan: Plan
    refits: bool = True
    """Whether recompute may follow from it; not where recompute is what is changed."""


def neighbours(winner: Verdict, judge: Judge, limit_s: float = inf) -> list[Neighbour]:
    """What one change to the winner would do, each in a sentence; only changes that leave a legal plan.

    What the search chooses for every plan is chosen for these too: layers lie on stages so that none has more to do
    than it must, and what doesn't fit is given the cheapest recompute and offload that make it fit. So where the search
    is proven, none within its space is faster. After `limit_s` no more are simulated, and that is said of each.
    """
    found, end_s = [], perf_counter() + limit_s
    for change in changes(winner.plan, judge.request):
        if perf_counter() > end_s:
            found.append(Neighbour(change.words, change.plan, None, f"{change.words}: {NO_TIME}"))
            continue
        try:
            found.append(_judged(winner, change, judge))
        except InfeasibleError:
            continue
    return found


# ----------------------------------------------------------------------------------------------------------------------
# Changes


def changes(plan: Plan, request: Request) -> Iterator[Change]:
    """One change at a time, to legal plans alone; another axis makes up for a changed degree."""
    seen: set[Plan] = set()
    seen.add(plan)
    for change in _all_changes(plan, request):
        if change.plan not in seen and _is_legal(change.plan, request):
            seen.add(change.plan)
            yield change


def _all_changes(plan: Plan, request: Request) -> Iterator[Change]:
    for axis in ("tp", "pp", "cp"):
        for grows in (True, False):
            yield from _traded(plan, request, axis, grows)
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
            yield Change(f"recompute {mode}", _everywhere(plan, recompute=mode), refits=False)
    if any(strategy.offload != "none" for strategy in plan.strategies):
        yield Change("no offload", _everywhere(plan, offload="none"), refits=False)
    if plan.pp > 1 and any(strategy.offload != "activations" for strategy in plan.strategies):
        yield Change("offload of all layers", _everywhere(plan, offload="activations"), refits=False)
    for schedule, chunks in (("1f1b", 1), ("interleaved", 2), ("zb-h1", 1), ("zb-v", 2)):
        if plan.pp > 1 and (schedule, chunks) != (plan.schedule, plan.vpp):
            stages = plan.stages if chunks == plan.vpp else ()
            yield Change(
                f"schedule {schedule}",
                plan.model_copy(
                    update={
                        "schedule": schedule,
                        "vpp": chunks,
                        "stages": stages,
                        "order": None,
                        "activation_limit": None,
                    }
                ),
            )


def _traded(plan: Plan, request: Request, axis: str, grows: bool) -> Iterator[Change]:
    """Twice or half a degree, with the first axis that can make up for it."""
    for partner in _PARTNERS:
        one, other = getattr(plan, axis), getattr(plan, partner)
        if partner == axis or (other if grows else one) % 2:
            continue
        degrees = {axis: one * 2, partner: other // 2} if grows else {axis: one // 2, partner: other * 2}
        changed = _with_degrees(plan, degrees, request)
        if _is_legal(changed, request):
            also = "" if partner.startswith("dp") else f" and {partner} {degrees[partner]}"
            yield Change(f"{axis} {degrees[axis]}{also}", changed)
            return


def _with_degrees(plan: Plan, degrees: dict[str, int], request: Request) -> Plan:
    """With other degrees, and what these decide."""
    update: dict[str, Any] = dict(degrees)
    pp = degrees.get("pp", plan.pp)
    if pp != plan.pp:
        update["stages"] = ()
    if pp == 1:
        update |= {"schedule": "1f1b", "vpp": 1}
    changed = plan.model_copy(update=update)
    strategy: dict[str, object] = {}
    if changed.tp == 1 or request.workload.seq_len % (changed.tp * changed.cp):
        strategy["sp"] = False
    elif plan.tp == 1:
        strategy["sp"] = request.fixed.get("sp", True)
    if plan.mesh(0).data_ranks == 1 < changed.mesh(0).data_ranks:
        strategy["zero"] = request.fixed.get("zero", "z1")
    return _with_strategy(changed, **strategy) if strategy else changed


def _is_legal(plan: Plan, request: Request) -> bool:
    return not problems(plan, request.model, request.workload, request.cluster.num_devices)


def _everywhere(plan: Plan, **changed: object) -> Plan:
    """With this for all layers; runs that then differ in nothing from the default are left out."""
    default = plan.default_strategy.model_copy(update=changed)
    runs = (run.model_copy(update={"strategy": run.strategy.model_copy(update=changed)}) for run in plan.overrides)
    own = tuple(run for run in runs if run.strategy != default)
    return plan.model_copy(update={"default_strategy": default, "overrides": own})


def _with_strategy(plan: Plan, **changed: object) -> Plan:
    """With this for all layers; recompute by layer stays as it is."""
    overrides = tuple(
        LayerRun(
            start=run.start,
            count=run.count,
            strategy=run.strategy.model_copy(update={**changed, "recompute": run.strategy.recompute}),
        )
        for run in plan.overrides
    )
    default = plan.default_strategy.model_copy(update=changed)
    return plan.model_copy(update={"default_strategy": default, "overrides": overrides})


# ----------------------------------------------------------------------------------------------------------------------
# What they make of the plan


def _judged(winner: Verdict, change: Change, judge: Judge) -> Neighbour:
    request, plan = judge.request, _with_layers_moved(winner.plan, change.plan, judge)
    if not (change.refits and _may_refit(request)):
        return _compared(winner, change.words, judge.verdict(plan), judge)
    bare = _bare(plan, request)
    fitting = sorted(map(judge.verdict, judge.room.made_to_fit(bare)[0]), key=lambda one: one.order)
    if not fitting:
        full = judge.verdict(_everywhere(bare, recompute="full"))
        return _compared(winner, change.words, full, judge, " with all recomputed")
    note = "" if fitting[0].plan is bare or _refits(winner.plan, request) else ", with what makes it fit"
    return _compared(winner, change.words, fitting[0], judge, note)


def changed_plans(plan: Plan, judge: Judge) -> Iterator[Plan]:
    """The plans that one change to a plan leads to, with what makes them fit, as far as they are searched for."""
    request = judge.request
    for change in changes(plan, request):
        if change.refits and _may_refit(request):
            try:
                found = judge.room.made_to_fit(_bare(_with_layers_moved(plan, change.plan, judge), request))[0]
            except InfeasibleError:
                continue
            yield from (one for one in found if admitted(request, one))


def _may_refit(request: Request) -> bool:
    """Whether recompute is the search's to choose by layer."""
    return "recompute" not in request.fixed and request.objective != "memory" and not request.base.overrides


def _bare(plan: Plan, request: Request) -> Plan:
    """With neither recompute nor offload but what is asked for."""
    offload = request.fixed.get("offload", request.base.default_strategy.offload)
    return _everywhere(plan, recompute="none", offload=offload)


def _refits(plan: Plan, request: Request) -> bool:
    """Whether the plan itself recomputes or offloads so that it fits."""
    return plan != _bare(plan, request)


def _with_layers_moved(winner: Plan, plan: Plan, judge: Judge) -> Plan:
    """With the layers where they suit the changed plan, and data in shares that do, where the winner's are so."""
    request = judge.request
    fixed = request.fixed.get("stages") or request.base.stages
    if winner.stages and not fixed and winner.is_uniform and plan.pp > 1 and plan.vpp == 1:
        # The judge knows the times of plans that recompute nothing; where layers lie best hardly depends on it.
        even = _bare(plan, request).model_copy(update={"stages": ()})
        moved = judge.moved(even)
        if moved is not None and judge.bound(moved) < judge.bound(even):
            plan = plan.model_copy(update={"stages": moved.stages})
        else:
            plan = plan.model_copy(update={"stages": ()})
    if winner.data_shares and "data_shares" not in request.fixed:
        even = plan.model_copy(update={"data_shares": ()})
        plan = judge.shares.given(even) or even
    return plan


def _compared(winner: Verdict, change: str, other: Verdict, judge: Judge, note: str = "") -> Neighbour:
    plan = other.plan
    over = [
        (rank.total - limit, rank.total, limit)
        for rank in other.prediction.memory
        if (limit := judge.room.limit_bytes(rank.rank)) is not None
    ]
    if over and max(over)[0] > 0:
        _, total, limit = max(over)
        fits = f"doesn't fit{note}, {total / 2**30:.1f} GiB of {limit / 2**30:.1f} GiB"
        return Neighbour(change, plan, None, f"{change}: {fits}")
    starred = "; can't be run yet" if not_yet(plan) and not winner.not_yet else ""
    if not admitted(replace(judge.request, runnable=False), plan):
        starred += "; not as asked"
    words, slower = _difference(winner, other, judge.request)
    return Neighbour(change, plan, slower, f"{change}: {words}{note}{starred}", other)


def _difference(winner: Verdict, other: Verdict, request: Request) -> tuple[str, float]:
    """In words; and the part by which the other's step is longer."""
    mine, its = winner.prediction, other.prediction
    slower = its.step_time_s / mine.step_time_s - 1
    if request.objective == "memory" and abs(more := other.value / winner.value - 1) >= LIKE:
        return f"{abs(more):.1%} {'more' if more > 0 else 'less'} memory, {_slower(slower)}", slower
    if abs(slower) < LIKE:
        return "as fast", slower
    name, more_s = largest_difference(mine, its, slower > 0)
    return f"{_slower(slower)}, {abs(more_s):.3g} s {'more' if slower > 0 else 'less'} {name}", slower


def _slower(part: float) -> str:
    return f"{abs(part):.1%} {'slower' if part > 0 else 'faster'}" if abs(part) >= LIKE else "as fast"


def largest_difference(mine: Prediction, its: Prediction, grows: bool) -> tuple[str, float]:
    """The part of a step that grows or shrinks most, and by how many seconds."""
    one, other = _parts(mine), _parts(its)
    differences = {name: other.get(name, 0.0) - one.get(name, 0.0) for name in {**one, **other}}
    name = (max if grows else min)(differences, key=lambda part: differences[part])
    return name, differences[name]


def _parts(prediction: Prediction) -> dict[str, float]:
    parts = prediction.parts
    waiting = {f"waiting for {axis}": time_s for axis, time_s in parts.communication_s.items()}
    return {"of computing": parts.compute_s, "bubble": parts.bubble_s, "optimizer": parts.optimizer_s, **waiting}
