"""Unequal shares of the data: how many micro-batches each data-parallel rank runs, so that none waits long for others.

Pipelines that lie on devices of one kind each are as fast as these. Metis (USENIX ATC 2024) gives its data-parallel
groups data in proportion; here the numbers are those for which the last rank is done soonest, and exactly so.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from heapq import heapify, heapreplace

from muster.cost.time.plan_times import data_ranks_by_kind, place_plan
from muster.cost.time.rank_placement import PlacedPlan
from muster.planner.bounds.pass_times import PassTimes, pass_times_of_placed
from muster.planner.bounds.step_bound import step_bound_s
from muster.planner.request import PlanRequest
from muster.planner.space import MeshShape, is_admitted
from muster.spec.cluster import ClusterSpec, NodeGroup
from muster.spec.legality import plan_violations
from muster.spec.plan import Plan, normalize_shares, split_evenly

INITIAL_SHARE = 0.8
"""The part of its proportional share that each rank has before micro-batches are given one by one."""


def fastest_split(times_s: Sequence[Callable[[int], float]], total: int) -> list[int]:
    """How many of `total` micro-batches each rank should run, at least one each, so that the last is done soonest.

    `times_s`: of each rank, what so many take; it never falls. One by one they go to the rank that is done first with
    one more, the earlier of equals: what is given is always the least time that is left, so that no other numbers have
    a lower maximum.
    """
    if total < len(times_s):
        raise ValueError(f"expected at least a micro-batch for each of {len(times_s)} ranks, got {total}")
    mean = -(-total // len(times_s))
    rates = [1 / max(time_s(mean + 1) - time_s(mean), 1e-12) for time_s in times_s]
    begun = [max(1, int(INITIAL_SHARE * total * rate / sum(rates))) for rate in rates]
    if sum(begun) <= total:
        counts, last_s = _assign_greedily(times_s, begun, total)
        # Had a rank begun with more than it gets one by one, that would take longer than the last that is given.
        if max(time_s(count) for time_s, count in zip(times_s, begun, strict=True)) <= last_s:
            return counts
    return _assign_greedily(times_s, [1] * len(times_s), total)[0]


def _assign_greedily(
    times_s: Sequence[Callable[[int], float]], initial: Sequence[int], total: int
) -> tuple[list[int], float]:
    """The numbers, and the time of the last that was given."""
    counts, last_s = list(initial), 0.0
    heap = [(times_s[rank](count + 1), rank) for rank, count in enumerate(counts)]
    heapify(heap)
    for _ in range(total - sum(counts)):
        last_s, rank = heap[0]
        counts[rank] += 1
        heapreplace(heap, (times_s[rank](counts[rank] + 1), rank))
    return counts, last_s


class BatchSplitter:
    """Gives the plans of one request their shares, and bounds what they take."""

    def __init__(self, request: PlanRequest, whole_model_s: Callable[[PlanRequest, MeshShape], float]) -> None:
        """`whole_s`: seconds that the whole model takes for a micro-batch of a shape on devices that are alike."""
        self.request, self._whole_model_s = request, whole_model_s
        self._whole_model_times_s: dict[tuple[int, ...], float] = {}
        self._groups: dict[tuple, list[list[int]]] = {}
        self._node_kinds = _node_kinds(request.cluster)

    def with_best_split(self, plan: Plan) -> Plan | None:
        """The plan with the shares that suit its pipelines best, or with those that are asked for; None where they are
        equal anyway, or can't be."""
        request, asked = self.request, self.request.fixed.get("uneven_micro_batches")
        if asked is not None:
            shared = plan.model_copy(update={"uneven_micro_batches": asked})
            illegal = plan_violations(shared, request.model, request.workload, request.cluster.num_devices)
            return shared if not illegal and is_admitted(request, shared) else None
        kinds = self._pass_times(plan, links=False)
        if len(kinds) < 2:
            return None
        known: dict[tuple[int, int], float] = {}

        def time_of(kind: int, seconds: PassTimes) -> Callable[[int], float]:
            def time_s(count: int) -> float:
                if (kind, count) not in known:
                    known[kind, count] = step_bound_s(plan, seconds, split_evenly(count, plan.pipeline_replicas))
                return known[kind, count]

            return time_s

        ranks = plan.mesh(0).dp_size
        times_s = [time_of(0, kinds[0][0])] * ranks
        for kind, (seconds, members) in enumerate(kinds):
            for data in members:
                times_s[data] = time_of(kind, seconds)
        shares = normalize_shares(fastest_split(times_s, ranks * plan.num_micro_batches(request.workload)))
        shared = plan.model_copy(update={"uneven_micro_batches": shares})
        return shared if shares and is_admitted(request, shared) else None

    def bound_s(self, plan: Plan) -> float:
        """What a step of a plan with shares takes at least."""
        workload, least_s = self.request.workload, 0.0
        for seconds, members in self._pass_times(plan, links=True):
            most = max(plan.num_micro_batches(workload, data) for data in members)
            least_s = max(least_s, step_bound_s(plan, seconds, split_evenly(most, plan.pipeline_replicas)))
        return least_s

    def _pass_times(self, plan: Plan, links: bool) -> list[tuple[PassTimes, list[int]]]:
        """Of data-parallel ranks on devices alike (`links`: and over links alike) the times of the first one's
        pipeline, and the ranks."""
        request = self.request
        setting = place_plan(request.model, plan, request.workload, request.cluster, cache=request.cost_cache)
        kinds = self._groups_of(setting, links)
        if len(kinds) == 1:
            return [(pass_times_of_placed(setting), ranks) for ranks in kinds]
        return [(pass_times_of_placed(replace(setting, data_rank=ranks[0])), ranks) for ranks in kinds]

    def _groups_of(self, placed: PlacedPlan, links: bool) -> list[list[int]]:
        """Plans whose ranks lie alike are alike in this."""
        plan = placed.plan
        key = (
            plan.mesh(0),
            plan.axis_order,
            plan.precision,
            placed.placement,
            plan.stages_per_replica,
            plan.is_uniform,
            links,
        )
        if key not in self._groups:
            self._groups[key] = list(data_ranks_by_kind(placed, links).values())
        return self._groups[key]

    def order_bound_s(self, shape: MeshShape) -> float:
        """What a step of any plan of a shape takes at least, with any shares and any layers on any stages.

        If all is done after T, a rank of the pipelines on devices with which the whole model takes X for a micro-batch
        has done at most T / X of the step's: there are as many ranks as the devices of its kind allow, and together
        they have done all.
        """
        slots, cluster = 0.0, self.request.cluster
        for number, like in enumerate(self._node_kinds):
            key = number, shape.tp, shape.cp, shape.ep, shape.micro_batch_size
            if key not in self._whole_model_times_s:
                self._whole_model_times_s[key] = self._whole_model_s(
                    replace(self.request, cluster=_cluster_of_kind(cluster, like)), shape
                )
            slots += like.num_devices / (shape.tp * shape.cp) / self._whole_model_times_s[key]
        return self.request.workload.global_batch_size / shape.micro_batch_size / slots


def _node_kinds(cluster: ClusterSpec) -> list[NodeGroup]:
    """All nodes of each kind as one group."""
    found: list[NodeGroup] = []
    for group in cluster.groups:
        numbers = [number for number, own in enumerate(found) if own == _with_num_nodes(group, own.num_nodes)]
        if numbers:
            found[numbers[0]] = _with_num_nodes(group, group.num_nodes + found[numbers[0]].num_nodes)
        else:
            found.append(group)
    return found


def _with_num_nodes(group: NodeGroup, nodes: int) -> NodeGroup:
    return group.model_copy(update={"num_nodes": nodes})


def _cluster_of_kind(cluster: ClusterSpec, like: NodeGroup) -> ClusterSpec:
    """As many devices as a cluster has, all in nodes of one kind and joined by its fastest links."""
    nodes = -(-cluster.num_devices // like.devices_per_node)
    matrix = cluster.node_bandwidth_bytes_per_s
    if matrix is not None:
        fastest = max(max(row) for row in matrix)
        matrix = ((fastest,) * nodes,) * nodes
    return ClusterSpec(name=like.device.name, groups=(_with_num_nodes(like, nodes),), node_bandwidth_bytes_per_s=matrix)
