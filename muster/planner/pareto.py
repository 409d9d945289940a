"""The Pareto front: plans that no other beats in step time, memory, cost and number of devices at once.

The fastest plan is searched for each number of devices. From it, and from each plan found on the way, single changes
are tried (a degree, the micro-batch, sharding, recompute, the schedule) as long as they lead to plans that no other
beats. So the fastest plans are proven, and those between are what few changes find.
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
from muster.planner.search_budget import SearchBudget, simulation_work
from muster.planner.space import is_admitted
from muster.spec.cluster import ClusterSpec
from muster.spec.errors import InfeasibleError
from muster.spec.legality import plan_violations
from muster.spec.plan import Plan

SEARCH_SHARE = 0.7
"""Share of the budget for the fastest plan; what is around it has the rest."""


@dataclass(frozen=True)
class ParetoPoint:
    """A plan of the front."""

    evaluated: EvaluatedPlan
    cluster: ClusterSpec
    """Devices that the plan uses, of those that the request has."""

    @property
    def devices(self) -> int:
        return self.evaluated.plan.world_size

    @property
    def step_time_s(self) -> float:
        return self.evaluated.prediction.step_time_s

    @property
    def usd_per_step(self) -> float | None:
        """Dollars of a step; None where a price is unknown."""
        return self.evaluated.prediction.usd_per_step

    @property
    def objectives(self) -> tuple[float, float, float, int]:
        """Objectives that are all minimized: step time, memory per device, cost, devices."""
        return self.step_time_s, float(self.evaluated.peak_bytes), self.usd_per_step or 0.0, self.devices


@dataclass(frozen=True, slots=True)
class ParetoFront:
    """Non-dominated plans, by devices and step time."""

    points: list[ParetoPoint]
    num_simulated: int
    """Number of simulated plans."""
    seconds: float
    proven: bool
    """True if each search came to its end: no plan with as many devices is faster."""


def pareto_front(request: PlanRequest, budget: SearchBudget) -> ParetoFront:
    """Return the front of a request. The search for each number of devices has the work of the whole budget.

    Raises InfeasibleError, with the limit that binds, where nothing fits.
    """
    begin_s = perf_counter()
    looked_at = 0
    proven = True
    points: list[ParetoPoint] = []
    refusal: InfeasibleError | None = None
    for cluster in sub_clusters(request.cluster):
        sub_request = replace(request, cluster=cluster, objective="time")
        own = budget.renew(time_part=0.5)  # the more devices, the more plans there are
        found = search(sub_request, 1, own.share(SEARCH_SHARE))
        looked_at += found.counts["simulated"]
        proven = proven and found.proven
        if found.best:
            points += _explore(ParetoPoint(found.best[0], cluster), found.evaluator, own)
        else:
            refusal = refusal or InfeasibleError(explain_no_plan(found))
    if refusal is not None and not points:
        raise refusal
    looked_at += len(points)
    best = sorted(non_dominated(points), key=lambda point: (-point.devices, point.step_time_s, point.evaluated.name))
    return ParetoFront(best, looked_at, perf_counter() - begin_s, proven)


def _explore(fastest: ParetoPoint, evaluator: PlanEvaluator, budget: SearchBudget) -> list[ParetoPoint]:
    """Return all plans that were simulated around the fastest one: each non-dominated plan is changed in its turn."""
    seen: set[Plan] = set()
    seen.add(fastest.evaluated.plan)
    points = [fastest]
    queue = [fastest]
    while queue:
        point = queue.pop(0)
        if any(_dominates(other, point) for other in points):
            continue
        for plan in (change.plan for change in single_changes(point.evaluated.plan, evaluator.request)):
            if budget.is_spent:
                return points
            budget.spend(simulation_work(plan, evaluator.request.workload))
            evaluated = None if plan in seen else _evaluate(plan, evaluator)
            seen.add(plan)
            if evaluated is not None:
                points.append(ParetoPoint(evaluated, point.cluster))
                queue.append(points[-1])
    return points


def _evaluate(plan: Plan, evaluator: PlanEvaluator) -> EvaluatedPlan | None:
    """Return the simulated plan; None where it is illegal, doesn't fit or isn't admitted."""
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
    """Return the points that no other dominates (equals in everything and beats in something)."""
    return [point for point in points if not any(_dominates(other, point) for other in points)]


def thin_front(points: Sequence[ParetoPoint], tolerance: float = 0.03) -> list[ParetoPoint]:
    """Return the points of a front worth a line: without those that another covers within a tolerance."""
    kept: list[ParetoPoint] = []
    for point in points:
        if not any(_covers(one, point, tolerance) for one in kept):
            kept.append(point)
    return kept


def _covers(one: ParetoPoint, other: ParetoPoint, tolerance: float) -> bool:
    """Return True if one point is as good as the other within a tolerance, with as many devices."""
    pairs = zip(one.objectives, other.objectives, strict=True)
    return one.devices == other.devices and all(a <= b * (1 + tolerance) for a, b in pairs)


def _dominates(one: ParetoPoint, other: ParetoPoint) -> bool:
    pairs = list(zip(one.objectives, other.objectives, strict=True))
    return all(a <= b for a, b in pairs) and any(a < b for a, b in pairs)


def sub_clusters(cluster: ClusterSpec) -> Iterator[ClusterSpec]:
    """Yield the cluster and parts of it: half of alike devices, a quarter, … down to one; else the nodes of each
    kind."""
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
    """Return a cluster of `count` alike devices, in full nodes or a part of one; None where that can't be."""
    group = cluster.groups[0]
    nodes, rest = divmod(count, group.devices_per_node)
    if nodes and rest:
        return None
    changed = {"num_nodes": nodes} if nodes else {"num_nodes": 1, "devices_per_node": rest}
    name = f"{count} of {cluster.name}"
    return cluster.model_copy(update={"groups": (group.model_copy(update=changed),), "name": name})
