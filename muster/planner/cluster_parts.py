"""Parts of a cluster that may be faster alone: one of its sites, the nodes of one kind, or half of alike nodes.

What crosses a slow link can cost more than the devices behind it bring. The layouts that a search tries use all
devices, so that a part is asked about as a cluster of its own.
"""

from collections.abc import Iterator
from itertools import pairwise

from muster.planner.node_order import is_heterogeneous, nodes_of, with_nodes
from muster.planner.plan_costs import PlanCosts
from muster.planner.request import PlanRequest
from muster.planner.space import MeshShape, micro_batch_sizes
from muster.spec.cluster import ClusterSpec
from muster.spec.units import pluralize


def cluster_parts(cluster: ClusterSpec) -> list[ClusterSpec]:
    """Return the parts of a cluster, of alike ones the first."""
    found: list[ClusterSpec] = []
    for words, nodes in _parts(cluster):
        if 0 < len(nodes) < cluster.num_nodes:
            part = with_nodes(cluster, nodes)
            name = f"{words} of {cluster.name}"
            if all(part != other.model_copy(update={"name": part.name}) for other in found):
                found.append(part.model_copy(update={"name": name}))
    return found


def _parts(cluster: ClusterSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield parts in words, with their nodes."""
    count = cluster.num_nodes
    for tier in cluster.tiers:
        if tier.link is not None:
            for begin in range(0, count, tier.nodes):
                yield (
                    f"{pluralize(min(tier.nodes, count - begin), 'node')} of one block of '{tier.name}'",
                    tuple(range(begin, min(begin + tier.nodes, count))),
                )
    if not cluster.is_uniform:
        kinds = [node.device.name for node in nodes_of(cluster)]
        for kind in dict.fromkeys(kinds):
            yield f"the {kind}", tuple(index for index, name in enumerate(kinds) if name == kind)
    if cluster.node_bandwidth_bytes_per_s is not None:
        yield from ((pluralize(len(block), "node"), block) for block in fast_blocks(cluster))
    if not is_heterogeneous(cluster):
        yield "half", tuple(range(count // 2))


def fast_blocks(cluster: ClusterSpec) -> list[tuple[int, ...]]:
    """Return the blocks of nodes that are left when the slowest links are cut, for the widest gap between rates."""
    matrix = cluster.node_bandwidth_bytes_per_s
    assert matrix is not None
    count = len(matrix)
    rates = sorted({matrix[one][other] for one in range(count) for other in range(count) if one != other})
    if len(rates) < 2:
        return []
    _, cut = max(pairwise(rates), key=lambda pair: pair[1] / pair[0])
    blocks: list[set[int]] = []
    for node in range(count):
        joined = [block for block in blocks if any(min(matrix[node][one], matrix[one][node]) >= cut for one in block)]
        blocks = [block for block in blocks if block not in joined] + [{node}.union(*joined)]
    return [tuple(sorted(block)) for block in sorted(blocks, key=lambda block: (-len(block), min(block)))]


def least_step_s(request: PlanRequest) -> float:
    """Return the seconds that a step takes at least on a cluster of alike devices: its passes on all of them at once,
    with nothing to wait for; 0 where that is unknown."""
    cluster = request.cluster
    if not cluster.is_uniform or cluster.device.rates is not None or cluster.node_bandwidth_bytes_per_s is not None:
        return 0.0
    costs = PlanCosts(request)
    batch = request.workload.global_batch_size
    per_sequence_s = []
    for size in micro_batch_sizes(request, batch):
        times = costs.layer_times(MeshShape(1, 1, 1, 1, 1, size))
        per_sequence_s.append((times.whole_forward_s + times.whole_backward_s) / size)
    return min(per_sequence_s) * batch / cluster.num_devices
