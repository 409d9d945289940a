"""The Pareto front: plans that no other that was found beats in step time, memory, cost and number of devices at once.

For each number of devices, the fastest plan is asked for as `muster plan` does; then the fastest within three quarters
of that plan's memory, of that one's, and so on until none fits (the ε-constraint method of Haimes, Lasdon and Wismer,
1971). So each point is the answer to a question that `muster plan --memory-limit` can be asked, and as proven as
that.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from time import perf_counter

from muster.planner.cluster_parts import cluster_parts
from muster.planner.evaluated_plan import EvaluatedPlan
from muster.planner.explain import explain_no_plan
from muster.planner.heterogeneous import PlanSearch, find_best_plans
from muster.planner.memory.budget import MemoryBudget
from muster.planner.node_order import is_heterogeneous
from muster.planner.plan_costs import PlanCosts
from muster.planner.plan_evaluator import PlanEvaluator
from muster.planner.request import PlanRequest
from muster.planner.search_budget import SearchBudget, simulation_work
from muster.planner.simple_first import SimplestPlan, find_simplest
from muster.planner.simplicity import PREDICTION_ERROR, Simplicity, simplicity
from muster.planner.space import data_shardings, is_admitted, make_plan, mesh_shapes
from muster.spec.cluster import ClusterSpec
from muster.spec.errors import InfeasibleError
from muster.spec.layer_strategy import Recompute
from muster.spec.legality import plan_violations

MEMORY_STEP = 0.75
"""Largest part of a plan's memory that the next plan may take."""

MAX_MEMORY_STEPS = 8
"""Memory limits that are asked about for each number of devices."""

SEARCH_SHARE = 0.7
"""Share of a point's budget for its fastest plan; the rest is for a simpler one about as fast."""

POINT_SHARE = 0.5
"""Share of what is left of the budget of a number of devices for each point."""


@dataclass(frozen=True)
class ParetoPoint:
    """A plan of the front."""

    evaluated: EvaluatedPlan
    cluster: ClusterSpec
    """Devices that the plan uses, of those that the request has."""
    gap: float = 0.0
    """Largest part of its step that another plan with as many devices and no more memory may save."""
    memory_limit_bytes: int | None = None
    """Memory of each device that it was asked to keep within; None: what the request allows."""

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

    @property
    def simplicity(self) -> Simplicity:
        """Place of the plan in the order of simplicity."""
        return simplicity(self.evaluated.plan)


@dataclass(frozen=True, slots=True)
class ParetoFront:
    """Non-dominated plans, by devices and step time."""

    points: list[ParetoPoint]
    num_simulated: int
    """Number of simulated plans."""
    seconds: float

    @property
    def proven(self) -> bool:
        """True if each search came to its end: no plan with as many devices and no more memory is faster."""
        return not any(point.gap for point in self.points)


def pareto_front(request: PlanRequest, budget: SearchBudget) -> ParetoFront:
    """Return the front of a request; each number of devices has the work of the whole budget.

    Raises InfeasibleError, with the limit that binds, where nothing fits.
    """
    begin_s = perf_counter()
    clusters = list(sub_clusters(request.cluster))
    looked_at = 0
    points: list[ParetoPoint] = []
    refusal: InfeasibleError | None = None
    for number, cluster in enumerate(clusters):
        own = budget.renew(time_part=1 / (len(clusters) - number))
        for search, simplest, limit in _trade_memory(replace(request, cluster=cluster, objective="time"), own):
            looked_at += search.result.counts["simulated"]
            if simplest is None:
                refusal = refusal or InfeasibleError(explain_no_plan(search.result, own))
            else:
                bound = min(search.result.open_bound, search.result.best[0].value)
                gap = 0.0 if search.result.proven else max(0.0, 1 - bound / simplest.evaluated.value)
                points.append(ParetoPoint(simplest.evaluated, search.request.cluster, gap, limit))
    if refusal is not None and not points:
        raise refusal
    best = sorted(non_dominated(points), key=lambda point: (-point.devices, point.step_time_s, point.evaluated.name))
    return ParetoFront(best, looked_at, perf_counter() - begin_s)


def _trade_memory(
    request: PlanRequest, budget: SearchBudget
) -> Iterator[tuple[PlanSearch, SimplestPlan | None, int | None]]:
    """Yield the search for the fastest plan within less and less memory, with the plan that it leads to and the limit;
    None for the plan where none fits, unless others did."""
    limit = request.memory_limit_bytes
    known = {one.plan: one for one in _simple_plans(request, budget)}
    for number in range(MAX_MEMORY_STEPS):
        own = budget.share(POINT_SHARE)
        asked = replace(request, memory_limit_bytes=limit)
        memory = MemoryBudget(asked, PlanCosts(asked))
        fitting = [one for one in known.values() if memory.fits(one.plan)]
        search = find_best_plans(asked, 2, own.share(SEARCH_SHARE), fitting)
        if not search.result.best:
            if not number:
                yield search, None, limit
            return
        best = search.result.best
        simplest = find_simplest(best[0], [*best, *fitting], search.evaluator, own.share(1.0))
        known |= {one.plan: one for one in (*best, simplest.evaluated)}
        yield search, simplest, limit
        limit = int(MEMORY_STEP * min(one.peak_bytes for one in (best[0], simplest.evaluated)))


def _simple_plans(request: PlanRequest, budget: SearchBudget) -> Iterator[EvaluatedPlan]:
    """Yield the plans of data parallelism alone that people would try first: each micro-batch size and ZeRO level, with
    and without full recompute. They are no worse for less memory, so that one simulation serves all limits."""
    if is_heterogeneous(request.cluster):
        return
    evaluator = PlanEvaluator(request)
    recompute: Recompute
    for shape in mesh_shapes(replace(request, axes=frozenset())):
        for sharding in data_shardings(request, shape):
            for recompute in ("none", "full"):
                plan = make_plan(request, shape, sharding, recompute=recompute)
                work = simulation_work(plan, request.workload)
                is_wanted = sharding[0] == 1 and is_admitted(request, plan) and budget.has_time_for(work)
                if is_wanted and not plan_violations(
                    plan, request.model, request.workload, request.cluster.num_devices
                ):
                    budget.spend(work)
                    yield evaluator.evaluate(plan)


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
    """Return True if a point equals the other in everything or beats it, and beats it in something; a plan that is less
    simple has to be faster by more than the prediction's error."""
    pairs = list(zip(one.objectives, other.objectives, strict=True))
    if not all(a <= b for a, b in pairs) or not any(a < b for a, b in pairs):
        return False
    ahead = one.step_time_s * (1 + PREDICTION_ERROR) < other.step_time_s
    return ahead or one.simplicity <= other.simplicity


def sub_clusters(cluster: ClusterSpec) -> Iterator[ClusterSpec]:
    """Yield the cluster and parts of it: half of alike devices, a quarter, … down to one; else each site, the nodes of
    each kind, or those with fast links."""
    yield cluster
    if not cluster.is_uniform or cluster.tiers or cluster.node_bandwidth_bytes_per_s is not None:
        yield from cluster_parts(cluster)
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
