"""The plans between which only a wish can choose: those that no other beats in time, memory, cost and devices at once.

For each number of devices the fastest plan is searched for. From it, and from all that is found on the way, one change
after the other is tried (a degree, the micro-batch, sharding, recompute, the schedule), as long as that leads to a plan
that no other beats: the fastest are proven, those between are what few changes find.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from time import perf_counter

from muster.planner.evaluated_plan import EvaluatedPlan
from muster.planner.explain import explain_no_plan
from muster.planner.neighbours import single_changes
from muster.planner.plan_evaluator import PlanEvaluator
from muster.planner.request import PlanRequest
from muster.planner.search import search
from muster.planner.space import is_admitted
from muster.spec.cluster import ClusterSpec
from muster.spec.errors import InfeasibleError
from muster.spec.legality import plan_violations
from muster.spec.plan import Plan


@dataclass(frozen=True)
class ParetoPoint:
    """A plan of the front."""

    evaluated: EvaluatedPlan
    cluster: ClusterSpec
    """The devices that it takes of those that there are."""

    @property
    def devices(self) -> int:
        return self.evaluated.plan.world_size

    @property
    def step_time_s(self) -> float:
        return self.evaluated.prediction.step_time_s

    @property
    def usd_per_step(self) -> float | None:
        """None where a price is unknown."""
        return self.evaluated.prediction.usd_per_step

    @property
    def objectives(self) -> tuple[float, float, float, int]:
        """What a plan is better in when it is smaller: step time, memory per device, cost, devices."""
        return self.step_time_s, float(self.evaluated.peak_bytes), self.usd_per_step or 0.0, self.devices


@dataclass(frozen=True, slots=True)
class ParetoFront:
    """Plans that no other beats in all at once, by devices and time."""

    points: list[ParetoPoint]
    num_simulated: int
    """Plans that were simulated."""
    seconds: float
    proven: bool
    """Whether each search came to its end: no plan is faster with as many devices."""


def pareto_front(request: PlanRequest, limit_s: float) -> ParetoFront:
    """The front for a request, found within `limit_s`. Raises InfeasibleError, with what binds, where nothing fits."""
    begin_s, looked_at, proven = perf_counter(), 0, True
    points: list[ParetoPoint] = []
    refusal: InfeasibleError | None = None
    for number, cluster in enumerate(sub_clusters(request.cluster)):
        own = replace(request, cluster=cluster, objective="time")
        end_s = begin_s + limit_s * (1 - 0.5 ** (number + 1))  # the more devices, the more plans there are
        found = search(own, 1, max((end_s - perf_counter()) * 0.7, limit_s / 50))
        looked_at += found.counts["simulated"]
        proven = proven and found.proven
        if found.best:
            points += _explore(ParetoPoint(found.best[0], cluster), found.evaluator, end_s)
        else:
            refusal = refusal or InfeasibleError(explain_no_plan(found))
    if refusal is not None and not points:
        raise refusal
    looked_at += len(points)
    best = sorted(non_dominated(points), key=lambda point: (-point.devices, point.step_time_s, point.evaluated.name))
    return ParetoFront(best, looked_at, perf_counter() - begin_s, proven)


def _explore(fastest: ParetoPoint, evaluator: PlanEvaluator, end_s: float) -> list[ParetoPoint]:
    """All that was looked at from the fastest plan on: each plan that nothing so far beats is changed in its turn."""
    seen: set[Plan] = set()
    seen.add(fastest.evaluated.plan)
    points, ahead = [fastest], [fastest]
    while ahead:
        point = ahead.pop(0)
        if any(_dominates(other, point) for other in points):
            continue
        for plan in (change.plan for change in single_changes(point.evaluated.plan, evaluator.request)):
            if perf_counter() > end_s:
                return points
            verdict = None if plan in seen else _evaluate(plan, evaluator)
            seen.add(plan)
            if verdict is not None:
                points.append(ParetoPoint(verdict, point.cluster))
                ahead.append(points[-1])
    return points


def _evaluate(plan: Plan, evaluator: PlanEvaluator) -> EvaluatedPlan | None:
    """The plan simulated; None where it can't be, doesn't fit or isn't wanted."""
    request = evaluator.request
    if plan_violations(plan, request.model, request.workload, request.cluster.num_devices) or not is_admitted(
        request, plan
    ):
        return None
    try:
        return evaluator.evaluate(plan) if evaluator.memory_budget.fits(plan) else None
    except InfeasibleError:
        return None


def non_dominated(points: Sequence[ParetoPoint]) -> list[ParetoPoint]:
    """Those that no other equals in everything and beats in something."""
    return [one for one in points if not any(_dominates(other, one) for other in points)]


def thin_front(points: Sequence[ParetoPoint], tolerance: float = 0.03) -> list[ParetoPoint]:
    """Of a front those that are worth a line: what is as good as one of them, but for that part, is left out."""
    kept: list[ParetoPoint] = []
    for point in points:
        if not any(_covers(one, point, tolerance) for one in kept):
            kept.append(point)
    return kept


def _covers(one: ParetoPoint, other: ParetoPoint, tolerance: float) -> bool:
    """Whether the one is as good as the other in all but for a part, and no smaller in devices."""
    pairs = zip(one.objectives, other.objectives, strict=True)
    return one.devices == other.devices and all(a <= b * (1 + tolerance) for a, b in pairs)


def _dominates(one: ParetoPoint, other: ParetoPoint) -> bool:
    pairs = list(zip(one.objectives, other.objectives, strict=True))
    return all(a <= b for a, b in pairs) and any(a < b for a, b in pairs)


def sub_clusters(cluster: ClusterSpec) -> Iterator[ClusterSpec]:
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
