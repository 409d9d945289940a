"""Why whole families of plans are out, in words, and why there is no plan at all."""

from dataclasses import dataclass, replace
from itertools import combinations, islice
from math import inf, prod

from muster.cost.forecast import HEAD_ROOM
from muster.cost.own_memory import OTHER_KERNELS, own_stage
from muster.planner.found import Found
from muster.planner.judge import Judge
from muster.planner.neighbours import largest_difference
from muster.planner.request import Request, asking_for
from muster.planner.search import search
from muster.planner.space import MODEL_AXES, axes_of, data_splits, make_plan, orders, plans, shapes
from muster.planner.verdict import Verdict
from muster.spec.cluster import NodeGroup
from muster.spec.legal import problems
from muster.spec.plan import Plan
from muster.spec.plan_name import format_plan_name
from muster.spec.runnable import not_yet
from muster.spec.schedules import SCHEDULES
from muster.spec.sizes import counted


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
    own = winner is not None and request.axes == axes_of(winner.plan)
    found = search(request, 1, limit_s, judge, seeds=[winner.plan] if winner and own else ())
    if found.best:
        best = found.best[0]
        if winner is not None and best.value < winner.value and best.plan != winner.plan:
            ahead = 1 - best.value / winner.value
            return Family(
                name, best, f"{best.name}, {ahead:.1%} better than the first, which was found sooner (--limit)"
            )
        if winner is None or best.value <= winner.value:
            fuller = not judge.room.head_room and request.memory_limit_bytes is None
            room = f", but leaves less than {HEAD_ROOM:.0%} of the memory free" if fuller else ""
            return Family(name, best, f"{best.name} is the best of all{room}")
        slower = best.value / winner.value - 1
        part, _ = largest_difference(winner.prediction, best.prediction, True)
        return Family(name, best, f"{best.name}, {slower:.1%} behind: more {part}")
    if not found.proven:
        return Family(name, None, f"not settled within {limit_s:g} s")
    if found.closest is not None:
        why = f"doesn't fit: {smallest(judge, judge.verdict(found.closest))}"
        return Family(name, None, why + _if_offloaded(request, limit_s))
    return Family(name, None, f"no legal plan: {why_illegal(request, axes)}")


OFTEN_BYTES_PER_S = 31.5e9
"""Of a link to the host that is unknown: PCI Express 4 with 16 lanes."""


def _if_offloaded(request: Request, limit_s: float) -> str:
    """Of a family without a plan that fits: the plan that would, by offload, and what stands against that."""
    groups: list[NodeGroup] = []
    against: list[str] = []
    for group in request.cluster.groups:
        device, changed = group.device, dict[str, object]()
        if device.kind == "gpu" and device.rates is None and device.host_bandwidth_bytes_per_s is None:
            speed = {"host_bandwidth_bytes_per_s": OFTEN_BYTES_PER_S}
            changed["device"] = device.model_copy(update=speed)
            against.append(f"if {device.name} reached its host with {OFTEN_BYTES_PER_S / 1e9:g} GB/s, which is unknown")
        if group.host_memory_bytes is not None:
            changed["host_memory_bytes"] = None
            against.append(f"if nodes had more memory than {_size(group.host_memory_bytes)}")
        groups.append(group.model_copy(update=changed))
    fixed = dict(request.fixed)
    if fixed.get("offload") == "none":
        del fixed["offload"]
        against = ["if that was allowed"]
    if not against:
        return ""
    cluster = request.cluster.model_copy(update={"groups": tuple(groups)})
    found = search(replace(request, fixed=fixed, cluster=cluster), 1, limit_s).best
    return f"; offload would make it fit {against[0]}: {found[0].name}" if found else ""


def smallest(judge: Judge, verdict: Verdict) -> str:
    """What the plan that is over by the least takes, with its largest terms."""
    fullest = max(verdict.prediction.memory, key=lambda rank: rank.total / (judge.room.limit_bytes(rank.rank) or 1))
    terms = sorted(((size, name) for name, size in fullest.terms.items() if size), reverse=True)[:2]
    shown = " and ".join(f"{_size(size)} of {name.replace('_', ' ')}" for size, name in terms)
    limit = judge.room.limit_bytes(fullest.rank)
    of = f" of {_size(limit)}" if limit else ""
    return f"the smallest, {verdict.name}, takes {_size(fullest.total)}{of} ({shown})"


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
    world, asked = request.cluster.num_devices, request.asked or "what is asked for"
    fields = {name: value for name, value in request.fixed.items() if name in Plan.model_fields}
    strategy = {name: value for name, value in request.fixed.items() if name not in fields}
    if stages := fields.get("stages"):
        fields = {"pp": max(1, len(stages) // fields.get("vpp", 1)), **fields}
    cut = prod(fields.get(axis, 1) for axis in ("tp", "pp", "cp", "dp_replicate"))
    if world % cut and cut < world:
        return f"with {asked}, {world} devices are not a multiple of {cut}"
    schedule = fields.get("schedule", "1f1b")
    if fields.get("pp") == 1 and schedule != "1f1b":
        return f"with {asked}, schedule {schedule} wants a pipeline of 2 ranks or more, which pp 1 is not"
    plan = request.base.model_copy(
        update={
            "dp_shard": max(1, world // cut),
            **({"pp": 2, "dp_shard": max(1, world // cut // 2)} if schedule != "1f1b" and "pp" not in fields else {}),
            "vpp": SCHEDULES[schedule].default_chunks,
            **fields,
            "default_strategy": request.base.default_strategy.model_copy(update=strategy),
        }
    )
    reasons = problems(plan, request.model, request.workload, world)
    reasons += not_yet(plan) if request.runnable else []
    if reasons:
        return f"with {asked}, {reasons[0].replace('processes', 'devices').replace('process', 'device')}"
    return f"{asked} is not among the plans that are searched ('muster predict' takes any plan)"


def no_plan(request: Request, found: Found, judge: Judge) -> str:
    """Why a search found nothing: which limit binds, and what would relax it."""
    world = request.cluster.num_devices
    if found.closest is not None:
        small = smallest(judge, judge.verdict(found.closest))
        if not found.proven:
            return (
                f"no plan that fits was found in {found.seconds:.0f} s, and not all were looked at: of those that were,"
                f" {small}; more seconds (--limit) may find one, or {relief(request)}"
            )
        return f"no plan fits: {small}; {relief(request)}"
    if found.seen["too_large"] and _has_plans(request):
        state, together = state_bytes(request), judge.room.usable_bytes
        if state > together:
            of = "all of it that may be used" if _holds_back(request) else "all memory together"
            least = -(-state * world // together) if together else None
            return (
                f"no plan fits: parameters, gradients and optimizer state of {request.model.name} take {_size(state)},"
                f" {of} is {_size(together)}; {relief(request, least)}"
            )
        return f"no plan fits: {_least(request, judge)}; {relief(request)}"
    devices = counted(world, "device")
    return f"no plan is legal for {devices}: {why_illegal(request, ())}{legal_instead(request)}"


def legal_instead(request: Request) -> str:
    """The least that would make a plan legal: another batch, or less that is asked for. Empty where neither does."""
    world, batch = request.cluster.num_devices, request.workload.global_batch_size
    parts = request.asked.split("-") if request.asked else []
    for left_out in parts:
        rest = "-".join(part for part in parts if part != left_out)
        if _has_plans(asking_for(request, rest)):
            return f"; there are plans without {left_out}"
    for more in sorted(
        {max(1, batch // world) * world, -(-batch // world) * world}, key=lambda size: abs(size - batch)
    ):
        other = request.workload.model_copy(update={"global_batch_size": more})
        if more != batch and _has_plans(replace(request, workload=other)):
            return f"; there are plans for {counted(more, 'sequence')} a step (--global-batch {more})"
    return ""


def _has_plans(request: Request) -> bool:
    """Whether any plan is legal, as far as the first few hundred orders show."""
    each = (order for shape in shapes(request) for order in orders(request, shape))
    return any(next(plans(request, order), None) is not None for order in islice(each, 300))


def _least(request: Request, judge: Judge) -> str:
    """What the plans take whose ranks hold least, even with one micro-batch under way and all of it recomputed."""
    held = [
        (judge.room.least_bytes(shape, split), make_plan(request, shape, split))
        for shape in shapes(request)
        for split in data_splits(request, shape)
    ]
    size, plan = min(held, key=lambda pair: (pair[0], format_plan_name(pair[1])))
    limit = max(judge.room.limits_bytes)
    return f"the smallest, {format_plan_name(plan)}, takes at least {_size(size)} of {_size(limit)} on a device"


def relief(request: Request, at_least: int | None = None) -> str:
    """What would make room; `at_least`: so many devices like these."""
    asked = [f"without {request.asked}"] if request.asked else []
    if request.memory_limit_bytes and _holds_back(request):
        asked.append(f"with more than {_size(request.memory_limit_bytes)} of each device")
    more = f"more devices, at least {at_least:,} such," if at_least else "more devices"
    return f"it takes {more} or larger ones" + (f", or a plan {' or '.join(asked)}" if asked else "")


def _holds_back(request: Request) -> bool:
    """Whether some device has more memory than may be used of it."""
    limit = request.memory_limit_bytes
    return limit is not None and any(limit < (group.device.memory_bytes or inf) for group in request.cluster.groups)


def state_bytes(request: Request) -> int:
    """Parameters, gradients and AdamW's moments, once."""
    held = own_stage(request.model, request.base, request.workload, 0, OTHER_KERNELS)
    return held.resident.parameters + held.resident.optimizer + held.gradients


def _size(size: float) -> str:
    """GiB with one decimal, or what else says it."""
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:,.3g} MiB"
