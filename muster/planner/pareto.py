"""The plans between which only a wish can choose: those that no other beats in time, memory, cost and devices at once.

For each number of devices the fastest plan is searched for. From it, and from all that is found on the way, one change
after the other is tried (a degree, the micro-batch, sharding, recompute, the schedule), as long as that leads to a plan
that no other beats: the fastest are proven, those between are what few changes find.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from time import perf_counter

from muster.planner.explain import no_plan
from muster.planner.judge import Judge
from muster.planner.neighbours import changes
from muster.planner.request import Request
from muster.planner.search import search
from muster.planner.space import admitted
from muster.planner.verdict import Verdict
from muster.spec.cluster import ClusterSpec
from muster.spec.errors import InfeasibleError
from muster.spec.legal import problems
from muster.spec.plan import Plan


@dataclass(frozen=True)
class Point:
    """A plan of the front."""

    verdict: Verdict
    cluster: ClusterSpec
    """The devices that it takes of those that there are."""

    @property
    def devices(self) -> int:
        return self.verdict.plan.world_size

    @property
    def step_time_s(self) -> float:
        return self.verdict.prediction.step_time_s

    @property
    def usd_per_step(self) -> float | None:
        """None where a price is unknown."""
        return self.verdict.prediction.usd_per_step

    @property
    def values(self) -> tuple[float, float, float, int]:
        """What a plan is better in when it is smaller: step time, memory per device, cost, devices."""
        return self.step_time_s, float(self.verdict.peak_bytes), self.usd_per_step or 0.0, self.devices


@dataclass(frozen=True, slots=True)
class Front:
    """Plans that no other beats in all at once, by devices and time."""

    points: list[Point]
    looked_at: int
    """Plans that were simulated."""
    seconds: float
    proven: bool
    """Whether each search came to its end: no plan is faster with as many devices."""


def front(request: Request, limit_s: float) -> Front:
    """The front for a request, found within `limit_s`. Raises InfeasibleError, with what binds, where nothing fits."""
    begin_s, looked_at, proven = perf_counter(), 0, True
    points: list[Point] = []
    refusal: InfeasibleError | None = None
    for number, cluster in enumerate(parts_of(request.cluster)):
        own = replace(request, cluster=cluster, objective="time")
        end_s = begin_s + limit_s * (1 - 0.5 ** (number + 1))  # the more devices, the more plans there are
        judge = Judge(own)
        found = search(own, 1, max((end_s - perf_counter()) * 0.7, limit_s / 50), judge)
        looked_at += found.seen["simulated"]
        proven = proven and found.proven
        if found.best:
            points += _around(Point(found.best[0], cluster), judge, end_s)
        else:
            refusal = refusal or InfeasibleError(no_plan(own, found, judge))
    if refusal is not None and not points:
        raise refusal
    looked_at += len(points)
    best = sorted(unbeaten(points), key=lambda point: (-point.devices, point.step_time_s, point.verdict.name))
    return Front(best, looked_at, perf_counter() - begin_s, proven)


def _around(fastest: Point, judge: Judge, end_s: float) -> list[Point]:
    """All that was looked at from the fastest plan on: each plan that nothing so far beats is changed in its turn."""
    seen: set[Plan] = set()
    seen.add(fastest.verdict.plan)
    points, ahead = [fastest], [fastest]
    while ahead:
        point = ahead.pop(0)
        if any(_beats(other, point) for other in points):
            continue
        for plan in (change.plan for change in changes(point.verdict.plan, judge.request)):
            if perf_counter() > end_s:
                return points
            verdict = None if plan in seen else _judged(plan, judge)
            seen.add(plan)
            if verdict is not None:
                points.append(Point(verdict, point.cluster))
                ahead.append(points[-1])
    return points


def _judged(plan: Plan, judge: Judge) -> Verdict | None:
    """The plan simulated; None where it can't be, doesn't fit or isn't wanted."""
    request = judge.request
    if problems(plan, request.model, request.workload, request.cluster.num_devices) or not admitted(request, plan):
        return None
    try:
        return judge.verdict(plan) if judge.room.fits(plan) else None
    except InfeasibleError:
        return None


def unbeaten(points: Sequence[Point]) -> list[Point]:
    """Those that no other equals in everything and beats in something."""
    return [one for one in points if not any(_beats(other, one) for other in points)]


def sketched(points: Sequence[Point], alike: float = 0.03) -> list[Point]:
    """Of a front those that are worth a line: what is as good as one of them, but for that part, is left out."""
    kept: list[Point] = []
    for point in points:
        if not any(_serves(one, point, alike) for one in kept):
            kept.append(point)
    return kept


def _serves(one: Point, other: Point, part: float) -> bool:
    """Whether the one is as good as the other in all but for a part, and no smaller in devices."""
    pairs = zip(one.values, other.values, strict=True)
    return one.devices == other.devices and all(a <= b * (1 + part) for a, b in pairs)


def _beats(one: Point, other: Point) -> bool:
    pairs = list(zip(one.values, other.values, strict=True))
    return all(a <= b for a, b in pairs) and any(a < b for a, b in pairs)


def parts_of(cluster: ClusterSpec) -> Iterator[ClusterSpec]:
    """The cluster, and parts of it: where nodes are alike, half of the devices, a quarter, … down to one; else the
    nodes of each kind alone."""
    yield cluster
    if not cluster.is_uniform or cluster.node_bandwidth_bytes_per_s is not None:
        if cluster.node_bandwidth_bytes_per_s is None:
            for group in cluster.groups:
                yield cluster.model_copy(update={"groups": (group,), "name": f"its {group.device.name}"})
        return
    count = cluster.num_devices // 2
    while count:
        part = with_devices(cluster, count)
        if part is not None:
            yield part
        count //= 2


def with_devices(cluster: ClusterSpec, count: int) -> ClusterSpec | None:
    """So many devices of a cluster whose nodes are alike: full nodes, or a part of one; None where that can't be."""
    group = cluster.groups[0]
    nodes, rest = divmod(count, group.devices_per_node)
    if nodes and rest:
        return None
    changed = {"num_nodes": nodes} if nodes else {"num_nodes": 1, "devices_per_node": rest}
    name = f"{count} of {cluster.name}"
    return cluster.model_copy(update={"groups": (group.model_copy(update=changed),), "name": name})
