"""Why a plan won, in words: what its neighbours lose; and why whole families of plans are out."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations
from math import prod

from muster.cost.forecast import HEAD_ROOM
from muster.cost.own_memory import OTHER_KERNELS, own_stage
from muster.planner.judge import Judge
from muster.planner.request import Request
from muster.planner.search import Found, search
from muster.planner.space import MODEL_AXES
from muster.planner.verdict import Verdict
from muster.simulate.predict import Prediction
from muster.spec.errors import InfeasibleError
from muster.spec.legal import not_yet, problems
from muster.spec.plan import Plan
from muster.spec.plan_name import format_plan_name

LIKE = 0.005
"""Plans closer than this part of the step are called alike."""


@dataclass(frozen=True, slots=True)
class Neighbour:
    """A plan that differs from the winner in one thing."""

    change: str
    plan: Plan
    slower: float | None
    """The part by which its step is longer; None where it doesn't fit or can't be."""
    sentence: str


def neighbours(winner: Verdict, judge: Judge) -> list[Neighbour]:
    """What one change to the winner would do, each in a sentence; only changes that leave a legal plan."""
    found = []
    for change, plan in changes(winner.plan, judge.request):
        if problems(plan, judge.request.model, judge.request.workload, plan.world_size):
            continue
        try:
            found.append(_compare(winner, change, judge.verdict(plan), judge))
        except InfeasibleError:
            continue
    return found


def changes(plan: Plan, request: Request) -> Iterator[tuple[str, Plan]]:
    """One change at a time; data-parallel ranks make up for a changed degree."""
    plain = plan.model_copy(update={"stages": (), "overrides": ()})
    for axis in ("tp", "pp", "cp"):
        for factor in (2, 0.5):
            degree = getattr(plan, axis) * factor
            shard = plan.dp_shard / factor
            if degree >= 1 and shard >= 1 and degree == int(degree) and shard == int(shard):
                changed = plain.model_copy(update={axis: int(degree), "dp_shard": int(shard)})
                if plan.tp == 1 and changed.tp > 1:
                    changed = _with_strategy(changed, sp=True)
                yield f"{axis} {int(degree)}", _legal_pipeline(changed)
    for size in (plan.micro_batch_size * 2, plan.micro_batch_size / 2):
        if size >= 1 and size == int(size):
            yield f"micro-batches of {int(size)}", plan.model_copy(update={"micro_batch_size": int(size)})
    for level in ("z1", "z2", "z3"):
        if plan.dp_shard > 1 and level != plan.default_strategy.zero:
            yield f"sharding level {level}", _with_strategy(plan, zero=level)
    for mode in ("none", "full"):
        if plan.overrides or mode != plan.default_strategy.recompute:
            yield f"recompute {mode}", _with_strategy(plan.model_copy(update={"overrides": ()}), recompute=mode)
    for schedule, chunks in (("1f1b", 1), ("interleaved", 2), ("zb-h1", 1), ("zb-v", 2)):
        if plan.pp > 1 and (schedule, chunks) != (plan.schedule, plan.vpp):
            yield f"schedule {schedule}", plain.model_copy(update={"schedule": schedule, "vpp": chunks})


def _legal_pipeline(plan: Plan) -> Plan:
    sp = plan.tp > 1 and plan.default_strategy.sp
    plan = _with_strategy(plan, sp=sp)
    return plan.model_copy(update={"schedule": "1f1b", "vpp": 1}) if plan.pp == 1 else plan


def _with_strategy(plan: Plan, **changes: object) -> Plan:
    overrides = tuple(
        run.model_copy(
            update={"strategy": run.strategy.model_copy(update={**changes, "recompute": run.strategy.recompute})}
        )
        for run in plan.overrides
    )
    default = plan.default_strategy.model_copy(update=changes)
    return plan.model_copy(update={"default_strategy": default, "overrides": overrides})


def _compare(winner: Verdict, change: str, other: Verdict, judge: Judge) -> Neighbour:
    over = [
        (rank.total - limit, rank.total, limit)
        for rank in other.prediction.memory
        if (limit := judge.room.limit_bytes(rank.rank)) is not None
    ]
    if over and max(over)[0] > 0:
        _, total, limit = max(over)
        return Neighbour(change, other.plan, None, f"{change}: doesn't fit, {_gib(total)} of {_gib(limit)}")
    mine, its = winner.prediction, other.prediction
    slower = its.step_time_s / mine.step_time_s - 1
    if abs(slower) < LIKE:
        return Neighbour(change, other.plan, slower, f"{change}: as fast")
    name, more_s = _largest_difference(mine, its, slower > 0)
    sign, word = ("more", "slower") if slower > 0 else ("less", "faster")
    return Neighbour(
        change, other.plan, slower, f"{change}: {abs(slower):.1%} {word}, {abs(more_s):.3g} s {sign} {name}"
    )


def _largest_difference(mine: Prediction, its: Prediction, grows: bool) -> tuple[str, float]:
    one, other = _parts(mine), _parts(its)
    differences = {name: other.get(name, 0.0) - one.get(name, 0.0) for name in {**one, **other}}
    name = (max if grows else min)(differences, key=lambda part: differences[part])
    return name, differences[name]


def _parts(prediction: Prediction) -> dict[str, float]:
    parts = prediction.parts
    waiting = {f"waiting for {axis}": time_s for axis, time_s in parts.communication_s.items()}
    return {"of computing": parts.compute_s, "bubble": parts.bubble_s, "optimizer": parts.optimizer_s, **waiting}


# ----------------------------------------------------------------------------------------------------------------------
# Families


@dataclass(frozen=True, slots=True)
class Family:
    """The plans that use exactly these axes beside data parallelism, and what became of them."""

    name: str
    best: Verdict | None
    sentence: str


def families(request: Request, winner: Verdict | None, limit_s: float = 2.0) -> list[Family]:
    """The best of each family; for families without one, why none is legal or fits, and what would change that."""
    axes = [axis for axis in MODEL_AXES if axis != "ep" or request.model.moe is not None]
    found = []
    for size in range(len(axes) + 1):
        for chosen in combinations(axes, size):
            found.append(_family(replace(request, axes=frozenset(chosen)), chosen, winner, limit_s))
    return found


def _family(request: Request, axes: tuple[str, ...], winner: Verdict | None, limit_s: float) -> Family:
    name = " × ".join(("data", *axes)) if axes else "data alone"
    judge = Judge(request)
    found = search(request, 1, limit_s, judge)
    if found.best:
        best = found.best[0]
        if winner is None or best.value <= winner.value:
            fuller = not judge.room.head_room and request.memory_limit_bytes is None
            room = f", but leaves less than {HEAD_ROOM:.0%} of the memory free" if fuller else ""
            return Family(name, best, f"{best.name} is the best of all{room}")
        slower = best.value / winner.value - 1
        part, _ = _largest_difference(winner.prediction, best.prediction, True)
        return Family(name, best, f"{best.name}, {slower:.1%} behind: more {part}")
    if not found.proven:
        return Family(name, None, f"not settled within {limit_s:g} s")
    if found.closest is not None:
        return Family(name, None, doesnt_fit(judge, judge.verdict(found.closest)))
    return Family(name, None, f"no legal plan: {why_illegal(request, axes)}")


def doesnt_fit(judge: Judge, verdict: Verdict) -> str:
    """Why a plan doesn't fit, with its largest terms."""
    fullest = max(verdict.prediction.memory, key=lambda rank: rank.total / (judge.room.limit_bytes(rank.rank) or 1))
    terms = sorted(((size, name) for name, size in fullest.terms.items() if size), reverse=True)[:2]
    shown = " and ".join(f"{_gib(size)} of {name.replace('_', ' ')}" for size, name in terms)
    limit = judge.room.limit_bytes(fullest.rank)
    of = f" of {_gib(limit)}" if limit else ""
    return f"doesn't fit: the smallest, {verdict.name}, takes {_gib(fullest.total)}{of} ({shown})"


def why_illegal(request: Request, axes: tuple[str, ...]) -> str:
    """The first reason that stands against the smallest use of these axes."""
    world = request.cluster.num_devices
    if ones := [axis for axis in axes if request.fixed.get(axis) == 1]:
        return f"{ones[0]} 1 is asked for"
    if world < 2 ** len(axes):
        return f"it needs {2 ** len(axes)} devices, there are {world}"
    if request.fixed:
        return _why_fixed_is_illegal(request)
    degrees = {axis: 2 for axis in axes if axis != "ep"}
    rest = world // max(1, 2 ** len(degrees))
    plan = request.base.model_copy(update={**degrees, "dp_shard": rest, "ep": 2 if "ep" in axes else 1})
    reasons = problems(plan, request.model, request.workload, world)
    if reasons:
        return f"{format_plan_name(plan)}: {reasons[0].replace('process', 'device')}"
    return "no degrees divide devices, heads, layers, sequence and batch into a step of a size that can be simulated"


def _why_fixed_is_illegal(request: Request) -> str:
    """What stands against the parts of a plan that must be, with data parallelism for the rest of the devices."""
    world = request.cluster.num_devices
    fields = {name: value for name, value in request.fixed.items() if name in Plan.model_fields}
    strategy = {name: value for name, value in request.fixed.items() if name not in fields}
    cut = prod(fields.get(axis, 1) for axis in ("tp", "pp", "cp", "dp_replicate"))
    plan = request.base.model_copy(
        update={
            "dp_shard": max(1, world // cut),
            **fields,
            "default_strategy": request.base.default_strategy.model_copy(update=strategy),
        }
    )
    reasons = problems(plan, request.model, request.workload, world)
    reasons += not_yet(plan) if request.runnable else []
    if reasons:
        return f"with {request.asked}, {reasons[0].replace('processes', 'devices').replace('process', 'device')}"
    asked = request.asked or "what is asked for"
    return f"{asked} is not among the plans that are searched ('muster predict' takes any plan)"


def no_plan(request: Request, found: Found, judge: Judge) -> str:
    """Why a search found nothing: which limit binds, and what would relax it."""
    world = request.cluster.num_devices
    if found.closest is not None:
        return f"no plan fits: {doesnt_fit(judge, judge.verdict(found.closest))}; {relief(request)}"
    if found.seen["too_large"]:
        state = state_bytes(request)
        together = "all of it that may be used" if request.memory_limit_bytes else "all memory together"
        return (
            f"no plan fits: parameters, gradients and optimizer state of {request.model.name} take {_gib(state)},"
            f" {together} is {_gib(judge.room.usable_bytes)}; {relief(request)}"
        )
    return f"no plan is legal for {world} devices: {why_illegal(request, ())}"


def relief(request: Request) -> str:
    """What would make room."""
    asked = [f"without {request.asked}"] if request.asked else []
    if request.memory_limit_bytes:
        asked.append(f"with more than {_gib(request.memory_limit_bytes)} of each device")
    return "it takes more devices or larger ones" + (f", or a plan {' or '.join(asked)}" if asked else "")


def state_bytes(request: Request) -> int:
    """Parameters, gradients and AdamW's moments, once."""
    held = own_stage(request.model, request.base, request.workload, 0, OTHER_KERNELS)
    return held.resident.parameters + held.resident.optimizer + held.gradients


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"
