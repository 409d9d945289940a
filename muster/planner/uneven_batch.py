"""Uneven batches: numbers of micro-batches for each data-parallel rank, so that none waits long for others.

Pipelines on devices of one kind each are as fast as these devices. Metis (USENIX ATC 2024) gives data-parallel groups
data in proportion to their speed; here the numbers are those for which the last rank is done soonest, exactly.
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
from muster.spec.plan import Plan, split_evenly
from muster.spec.shares import normalize_shares

INITIAL_SHARE = 0.8
"""Part of its proportional share that each rank gets before micro-batches are assigned one by one."""


def fastest_split(times_s: Sequence[Callable[[int], float]], total: int) -> list[int]:
    """Return the numbers of micro-batches, at least one each and `total` together, for which the last rank is done
    soonest.

    `times_s`: for each rank, the seconds of so many micro-batches; they never fall. One by one micro-batches go to the
    rank that is done first with one more, the earlier of equals. Each takes the least time that is left, so that no
    other numbers have a lower maximum.
    """
    if total < len(times_s):
        raise ValueError(f"expected at least a micro-batch for each of {len(times_s)} ranks, got {total}")
    mean = -(-total // len(times_s))
    rates = [1 / max(time_s(mean + 1) - time_s(mean), 1e-12) for time_s in times_s]
    initial = [max(1, int(INITIAL_SHARE * total * rate / sum(rates))) for rate in rates]
    if sum(initial) <= total:
        counts, last_s = _assign_greedily(times_s, initial, total)
        # A rank that started with more than greedy assignment gives it would be done after the last assignment.
        if max(time_s(count) for time_s, count in zip(times_s, initial, strict=True)) <= last_s:
            return counts
    return _assign_greedily(times_s, [1] * len(times_s), total)[0]


def _assign_greedily(
    times_s: Sequence[Callable[[int], float]], initial: Sequence[int], total: int
) -> tuple[list[int], float]:
    """Return the numbers, and the time of the rank that got the last micro-batch."""
    counts = list(initial)
    last_s = 0.0
    heap = [(times_s[rank](count + 1), rank) for rank, count in enumerate(counts)]
    heapify(heap)
    for _ in range(total - sum(counts)):
        last_s, rank = heap[0]
        counts[rank] += 1
        heapreplace(heap, (times_s[rank](counts[rank] + 1), rank))
    return counts, last_s


class BatchSplitter:
    """Splits the batch of one request's plans over unlike devices, and bounds their steps."""

    def __init__(self, request: PlanRequest, whole_model_s: Callable[[PlanRequest, MeshShape], float]) -> None:
        """`whole_model_s`: seconds of the whole model for a micro-batch of a shape on devices that are alike."""
        self.request = request
        self._whole_model_s = whole_model_s
        self._whole_model_times_s: dict[tuple, float] = {}
        self._groups: dict[tuple, list[list[int]]] = {}
        self._node_kinds = _node_kinds(request.cluster)

    def with_best_split(self, plan: Plan) -> Plan | None:
        """Return the plan with the split that suits its pipelines best, or the required one; None where it is even, or
        illegal."""
        request = self.request
        required = request.fixed.get("uneven_micro_batches")
        if required is not None:
            split = plan.model_copy(update={"uneven_micro_batches": required})
            illegal = plan_violations(split, request.model, request.workload, request.cluster.num_devices)
            return split if not illegal and is_admitted(request, split) else None
        groups = self._pass_times(plan, links=False)
        if len(groups) < 2:
            return None
        step_s: dict[tuple[int, int], float] = {}

        def time_of(group: int, times: PassTimes) -> Callable[[int], float]:
            def time_s(count: int) -> float:
                if (group, count) not in step_s:
                    step_s[group, count] = step_bound_s(plan, times, split_evenly(count, plan.pipeline_replicas))
                return step_s[group, count]

            return time_s

        ranks = plan.mesh(0).dp_size
        times_s = [time_of(0, groups[0][0])] * ranks
        for group, (times, members) in enumerate(groups):
            for data_rank in members:
                times_s[data_rank] = time_of(group, times)
        shares = normalize_shares(fastest_split(times_s, ranks * plan.num_micro_batches(request.workload)))
        split = plan.model_copy(update={"uneven_micro_batches": shares})
        return split if shares and is_admitted(request, split) else None

    def bound_s(self, plan: Plan) -> float:
        """Return the seconds that a step of a plan with an uneven batch takes at least."""
        workload = self.request.workload
        least_s = 0.0
        for times, members in self._pass_times(plan, links=True):
            most = max(plan.num_micro_batches(workload, data) for data in members)
            least_s = max(least_s, step_bound_s(plan, times, split_evenly(most, plan.pipeline_replicas)))
        return least_s

    def _pass_times(self, plan: Plan, links: bool) -> list[tuple[PassTimes, list[int]]]:
        """Return groups of data-parallel ranks on alike devices, and with `links` over alike links: the times of the
        first rank's pipeline, and the ranks."""
        request = self.request
        own = request.model, plan, request.workload, request.cluster, request.framework
        placed = place_plan(*own, cache=request.cost_cache, optim=request.optim)
        groups = self._groups_of(placed, links)
        if len(groups) == 1:
            return [(pass_times_of_placed(placed), ranks) for ranks in groups]
        return [(pass_times_of_placed(replace(placed, data_rank=ranks[0])), ranks) for ranks in groups]

    def _groups_of(self, placed: PlacedPlan, links: bool) -> list[list[int]]:
        """Return the groups of data-parallel ranks, which plans share whose ranks lie alike."""
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

    def shape_bound_s(self, shape: MeshShape) -> float:
        """Return the seconds that a step of any plan of a shape takes at least, with any split of the batch and any
        layers on any stages.

        Within T a rank whose devices take X for the whole model and one micro-batch has done at most T / X of the
        batch. There are as many such ranks as the devices of its kind allow, and together they do all of it.
        """
        cluster = self.request.cluster
        micro_batches_per_s = 0.0
        for number, like in enumerate(self._node_kinds):
            key = number, shape.tp, shape.cp, shape.ep, shape.micro_batch_size, shape.copies
            if key not in self._whole_model_times_s:
                self._whole_model_times_s[key] = self._whole_model_s(
                    replace(self.request, cluster=_cluster_of_kind(cluster, like)), shape
                )
            micro_batches_per_s += (
                like.num_devices / self.request.base.islands / (shape.tp * shape.cp) / self._whole_model_times_s[key]
            )
        return self.request.island_sequences / shape.micro_batch_size / micro_batches_per_s


def _node_kinds(cluster: ClusterSpec) -> list[NodeGroup]:
    """Return the nodes of each kind as one group."""
    found: list[NodeGroup] = []
    for group in cluster.groups:
        numbers = [number for number, kind in enumerate(found) if kind == _with_num_nodes(group, kind.num_nodes)]
        if numbers:
            found[numbers[0]] = _with_num_nodes(group, group.num_nodes + found[numbers[0]].num_nodes)
        else:
            found.append(group)
    return found


def _with_num_nodes(group: NodeGroup, nodes: int) -> NodeGroup:
    return group.model_copy(update={"num_nodes": nodes})


def _cluster_of_kind(cluster: ClusterSpec, like: NodeGroup) -> ClusterSpec:
    """Return a cluster of as many devices, all in nodes of one kind and joined by the fastest links."""
    nodes = -(-cluster.num_devices // like.devices_per_node)
    matrix = cluster.node_bandwidth_bytes_per_s
    if matrix is not None:
        fastest = max(max(row) for row in matrix)
        matrix = ((fastest,) * nodes,) * nodes
    return ClusterSpec(name=like.device.name, groups=(_with_num_nodes(like, nodes),), node_bandwidth_bytes_per_s=matrix)
