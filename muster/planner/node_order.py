"""Orders of the nodes of a heterogeneous cluster, in which a plan's ranks are laid on them.

Ranks that communicate much should share fast links, and ranks of one stage should be alike. So nodes with fast links
are put next to each other (Holmes, arXiv:2312.03549: no data-parallel group mixes network cards, and pipelines cross
the slow links), and single nodes are then swapped as long as that helps (Pipette, arXiv:2405.18093: simulated annealing
over measured links).
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import permutations
from math import exp
from random import Random
from typing import Any

from muster.layout.ring_order import ring_order, ring_value
from muster.spec.cluster import ClusterSpec, NodeGroup

MAX_PERMUTED_BLOCKS = 4
"""Blocks of nodes whose orders are all tried; of more blocks, only the order by size."""


def nodes_of(cluster: ClusterSpec) -> list[NodeGroup]:
    """Return each node as a group of its own."""
    return [group.model_copy(update={"num_nodes": 1}) for group in cluster.groups for _ in range(group.num_nodes)]


def reorder_nodes(cluster: ClusterSpec, order: Sequence[int]) -> ClusterSpec:
    """Return the cluster with its nodes in another order; neighbours that are alike become one group."""
    nodes = nodes_of(cluster)
    groups: list[NodeGroup] = []
    for index in order:
        if groups and groups[-1].model_copy(update={"num_nodes": 1}) == nodes[index]:
            groups[-1] = groups[-1].model_copy(update={"num_nodes": groups[-1].num_nodes + 1})
        else:
            groups.append(nodes[index])
    update: dict[str, Any] = {"groups": tuple(groups)}
    for name in ("node_bandwidth_bytes_per_s", "node_latency_s"):
        if (matrix := getattr(cluster, name)) is not None:
            update[name] = tuple(tuple(matrix[one][other] for other in order) for one in order)
    return cluster.model_copy(update=update)


def with_ring_links(cluster: ClusterSpec) -> ClusterSpec:
    """Return the cluster as peers see it that exchange in a ring of its nodes: every link between two nodes is as fast
    as the slowest of the ring that the coordinator of peers takes by measured links."""
    matrix = cluster.node_bandwidth_bytes_per_s
    if matrix is None:
        return cluster
    slowest = ring_value(matrix, ring_order(matrix))[0]
    rows = enumerate(matrix)
    rates = tuple(tuple(rate if one == other else slowest for other, rate in enumerate(row)) for one, row in rows)
    return cluster.model_copy(update={"node_bandwidth_bytes_per_s": rates})


def with_nodes(cluster: ClusterSpec, nodes: tuple[int, ...]) -> ClusterSpec:
    """Return the cluster with these of its nodes alone, and the network tiers that still join some of them."""
    part = reorder_nodes(cluster, nodes)
    tiers = tuple(tier for tier in part.tiers if tier.nodes < part.num_nodes)
    return part.model_copy(update={"tiers": tiers})


def part_of_island(cluster: ClusterSpec, islands: int) -> ClusterSpec:
    """Return the nodes of the first of so many islands, where those of the others are like them; else all nodes."""
    nodes, rest = divmod(cluster.num_nodes, islands)
    if islands == 1 or rest:
        return cluster
    parts = [with_nodes(cluster, tuple(range(first, first + nodes))) for first in range(0, cluster.num_nodes, nodes)]
    return parts[0] if all(part == parts[0] for part in parts) else cluster


def is_heterogeneous(cluster: ClusterSpec) -> bool:
    """Return True if the order of nodes matters, or a link between sites slows what crosses it."""
    if cluster.num_nodes == 1:
        return False
    matrix = cluster.node_bandwidth_bytes_per_s
    rates = {rate for index, row in enumerate(matrix or ()) for other, rate in enumerate(row) if index != other}
    return not cluster.is_uniform or len(rates) > 1 or any(tier.link is not None for tier in cluster.tiers)


def block_orders(cluster: ClusterSpec) -> Iterator[tuple[int, ...]]:
    """Yield orders of the nodes in which blocks of alike nodes with fast links stand together; the listed order
    first."""
    count = cluster.num_nodes
    seen = {tuple(range(count))}
    yield tuple(range(count))
    for blocks in _partitions(cluster):
        orders = permutations(blocks) if len(blocks) <= MAX_PERMUTED_BLOCKS else [sorted(blocks, key=len, reverse=True)]
        for chosen in orders:
            order = tuple(node for block in chosen for node in block)
            if order not in seen:
                seen.add(order)
                yield order


def _partitions(cluster: ClusterSpec) -> Iterator[list[tuple[int, ...]]]:
    """Yield partitions of the nodes into blocks: by kind, and for each rate that occurs by links of at least that
    rate."""
    nodes = nodes_of(cluster)
    matrix = cluster.node_bandwidth_bytes_per_s
    count = len(nodes)
    yield _blocks(count, lambda one, other: nodes[one] == nodes[other])
    if matrix is None:
        return
    for rate in sorted({matrix[one][other] for one in range(count) for other in range(count) if one != other}):
        yield _blocks(count, lambda one, other, rate=rate: nodes[one] == nodes[other] and matrix[one][other] >= rate)


def _blocks(count: int, alike: Callable[[int, int], bool]) -> list[tuple[int, ...]]:
    """Return blocks of nodes that are all alike in pairs, built greedily in the order of the nodes."""
    blocks: list[list[int]] = []
    for node in range(count):
        home = next((block for block in blocks if all(alike(node, other) for other in block)), None)
        if home is None:
            blocks.append([node])
        else:
            home.append(node)
    return [tuple(block) for block in blocks]


def anneal(
    order: Sequence[int], cost: Callable[[Sequence[int]], float], tries: int, seed: int = 0
) -> tuple[tuple[int, ...], float]:
    """Return a better order and its cost, by simulated annealing over swaps, moves and reversals of nodes.

    The temperature falls linearly from the mean change of cost to 0 within `tries`. Deterministic for a seed.
    """
    random = Random(seed)
    count = len(order)
    current = best = tuple(order)
    cost_now = cost_best = cost(current)
    if count < 2:
        return best, cost_best
    trials = [abs(cost(_mutate(current, random, count)) - cost_now) for _ in range(max(1, tries // 20))]
    hottest = sum(trials) / len(trials)
    for step in range(tries):
        candidate = _mutate(current, random, count)
        cost_new = cost(candidate)
        heat = hottest * (1 - step / tries)
        if cost_new <= cost_now or (heat > 0 and random.random() < exp((cost_now - cost_new) / heat)):
            current, cost_now = candidate, cost_new
            if cost_now < cost_best:
                best, cost_best = current, cost_now
    return best, cost_best


def _mutate(order: tuple[int, ...], random: Random, count: int) -> tuple[int, ...]:
    one, other = sorted(random.sample(range(count), 2))
    nodes = list(order)
    kind = random.randrange(3)
    if kind == 0:
        nodes[one], nodes[other] = nodes[other], nodes[one]
    elif kind == 1:
        nodes.insert(one, nodes.pop(other))
    else:
        nodes[one : other + 1] = reversed(nodes[one : other + 1])
    return tuple(nodes)
