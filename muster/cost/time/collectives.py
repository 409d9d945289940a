"""Times of collectives and p2p transfers, by size, by the location of the ranks, and by algorithm."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, inf, log2

from muster.spec.cluster import ClusterSpec, NodeGroup
from muster.spec.device import LinkSpec

SIMPLE_PROTOCOL_LATENCY_FACTOR = 4.0
"""Latency of a step of NCCL's protocol for large messages (Simple), relative to the one for small messages (LL), which
waits for flags instead of fences: besides the time of their bytes, all-reduces of 8 H100 take 62 µs with the first,
20 µs with the second (github:NVIDIA/dgxc-benchmarking nccl/README.md)."""
LL_BANDWIDTH_SHARE = 0.5
"""Share of the bandwidth that the protocol for small messages reaches: half of the bytes that it sends are flags."""
NVLS_STEPS = 7
"""Steps of latency of an all-reduce in the switches (NVLS), for any number of ranks (same source)."""
COLLECTIVE_START_S = 6e-6
"""Seconds to start a collective's kernel and to find the peers' buffers."""
LONGEST_MESSAGE_S = 20e-6
"""Longest time of a message besides its bytes that a link's latency stands for: that of a system call or two. What a
latency has beyond is distance, which messages on their way share."""


@dataclass(frozen=True, slots=True, eq=False)
class CommGroup:
    """Ranks of a collective as the network sees them. Groups are compared by identity, see `CostTables.intern`."""

    size: int
    num_domains: int
    """Number of fabrics (nodes, or racks of NVL72) that hold the ranks."""
    max_ranks_per_domain: int
    """Largest number of ranks in one fabric."""
    intra_link: LinkSpec
    network_link: LinkSpec | None
    network_bytes_per_s: float = 0.0
    """Rate of one rank: its share of its node's network cards, after efficiency and tiers."""
    network_latency_s: float = 0.0
    network_message_s: float = 0.0
    """Time of a message over the network besides its bytes."""
    reduces_by_gloo: bool = False
    """True for CPUs: PyTorch's reduce-scatter over gloo is an all-reduce, of which each rank keeps its part."""

    @property
    def fabric_message_s(self) -> float:
        """Time of a message within the fabric besides its bytes."""
        return _message_s(self.intra_link, self.intra_link.latency_s)

    @property
    def ring_bytes_per_s(self) -> float:
        """Rate at any point of the rings together: the fabric's, or that of the group's network cards in a node, if
        that is lower."""
        fabric = self.intra_link.bandwidth_bytes_per_s * self.intra_link.efficiency
        return fabric if self.num_domains == 1 else min(fabric, self.max_ranks_per_domain * self.network_bytes_per_s)


def _message_s(link: LinkSpec | None, latency_s: float) -> float:
    own = None if link is None else link.message_s
    return min(latency_s, LONGEST_MESSAGE_S) if own is None else own


def make_comm_group(cluster: ClusterSpec, ranks: Sequence[int]) -> CommGroup:
    """Return the group of `ranks` of a cluster.

    All ranks of a node are assumed to communicate at the same time, in groups like this one.
    """
    places = [cluster.locate(rank) for rank in ranks]
    groups = [cluster.groups[index] for index in sorted({index for index, _ in places})]
    counts: dict[int, int] = {}
    for index, node in places:
        domain = node // cluster.groups[index].domain_nodes
        counts[domain] = counts.get(domain, 0) + 1
    slowest = min((group.intra for group in groups), key=lambda link: link.bandwidth_bytes_per_s * link.efficiency)
    nodes = sorted({node for _, node in places})
    by_gloo = any(group.device.kind == "cpu" for group in groups)
    if len(counts) == 1:
        link = _measured_link(cluster, nodes, _bridge_limited_link(cluster, ranks, groups[0], slowest))
        return CommGroup(len(ranks), 1, len(ranks), link, None, reduces_by_gloo=by_gloo)
    rates = [(_network_bytes_per_s(group), group) for group in groups]
    rate, group = min(rates, key=lambda pair: pair[0])
    network = group.nics.link if group.nics else None
    latency_s = network.latency_s if network else slowest.latency_s
    shared = inf
    for tier in cluster.tiers:
        if nodes[0] // tier.nodes != nodes[-1] // tier.nodes:
            rate, shared = rate * tier.bandwidth_share, shared * tier.bandwidth_share
            latency_s += tier.latency_s
            if tier.link is not None:
                sharing = tier.nodes * group.devices_per_node
                shared = min(shared, tier.link.bandwidth_bytes_per_s * tier.link.efficiency / sharing)
                latency_s = max(latency_s, tier.link.latency_s)
    if cluster.node_bandwidth_bytes_per_s is not None:
        matrix = cluster.node_bandwidth_bytes_per_s
        rate = min(matrix[a][b] for a in nodes for b in nodes if a != b) / group.devices_per_node
    rate = min(rate, shared)  # pairs were measured alone
    if (latencies := cluster.node_latency_s) is not None:
        latency_s = max(latencies[a][b] for a in nodes for b in nodes if a != b)
    link = network or slowest
    message_s = _message_s(link, link.latency_s)
    most = max(counts.values())
    return CommGroup(len(ranks), len(counts), most, slowest, network, rate, latency_s, message_s, by_gloo)


def _bridge_limited_link(cluster: ClusterSpec, ranks: Sequence[int], group: NodeGroup, link: LinkSpec) -> LinkSpec:
    """Return the link of a group on both sides of a host bridge, whose bandwidth all such groups of the node share.

    Rings of 8, 4 and 2 of 8 A100 on PCIe reach 13, 7.3 and 4 GB/s (github:MooreThreads/SimuMax
    configs/system/a100_pcie.json).
    """
    if link.bridge_devices is None or link.bridge_bytes_per_s is None:
        return link
    places = {rank % group.devices_per_node // link.bridge_devices for rank in ranks}
    if len(places) == 1:
        return link
    rings = max(1, min(group.devices_per_node, cluster.num_devices) // len(ranks))
    share = min(1.0, link.bridge_bytes_per_s / rings / (link.bandwidth_bytes_per_s * link.efficiency))
    return link.model_copy(update={"efficiency": link.efficiency * share})


def _network_bytes_per_s(group: NodeGroup) -> float:
    """Return a device's share of its node's network cards, in bytes per second."""
    if group.nics is None:
        return group.intra.bandwidth_bytes_per_s * group.intra.efficiency
    link = group.nics.link
    return link.bandwidth_bytes_per_s * link.efficiency * group.nics.count / group.devices_per_node


def _measured_link(cluster: ClusterSpec, nodes: Sequence[int], link: LinkSpec) -> LinkSpec:
    """Return the fabric's link, at the rate of the cluster's measured matrix where it has one."""
    matrix = cluster.node_bandwidth_bytes_per_s
    if matrix is None:
        return link
    rate = min(matrix[a][b] for a in nodes for b in nodes)
    return link.model_copy(update={"bandwidth_bytes_per_s": rate, "efficiency": 1.0})


# ----------------------------------------------------------------------------------------------------------------------
# Collectives: seconds; `size` is the bytes of the whole tensor


def all_gather_s(group: CommGroup, size: float) -> float:
    """Return the seconds of an all-gather: every rank gets a tensor of `size` bytes, of which each has one part.

    In a ring every rank sends (n − 1) / n of the bytes in n − 1 steps (Thakur, Rabenseifner, Gropp, "Optimization of
    Collective Communication Operations in MPICH", 2005, §4.1), over as many rings as there are network cards.
    """
    if group.size == 1 or size <= 0:
        return 0.0
    return _measured_s(group, "all_gather", size) or _ring_s(group, size, 1)


def sequential_broadcasts_s(group: CommGroup, size: float) -> float:
    """Return the seconds of an all-gather that is a broadcast from each rank in turn.

    It moves the bytes of `all_gather_s`, but each part first travels along the whole chain of ranks.
    """
    if group.size == 1 or size <= 0:
        return 0.0
    chain_s = (group.max_ranks_per_domain - 1) * group.intra_link.latency_s + (
        group.num_domains - 1
    ) * group.network_latency_s
    return size / group.ring_bytes_per_s + group.size * (COLLECTIVE_START_S + SIMPLE_PROTOCOL_LATENCY_FACTOR * chain_s)


def reduce_scatter_s(group: CommGroup, size: float) -> float:
    """Return the seconds of a reduce-scatter of tensors of `size` bytes: those of `all_gather_s`, which it reverses,
    and over gloo those of an all-reduce around the ring."""
    if group.size == 1 or size <= 0:
        return 0.0
    return _measured_s(group, "reduce_scatter", size) or _ring_s(group, size, 2 if group.reduces_by_gloo else 1)


def all_reduce_s(group: CommGroup, size: float) -> float:
    """Return the seconds of an all-reduce of tensors of `size` bytes, by the fastest of three algorithms.

    A ring passes the bytes twice; a tree over the nodes has a number of steps that grows with the logarithm (Sanders,
    Speck, Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan", 2009); and switches sum within
    a fabric that has them (NVLS).
    """
    if group.size == 1 or size <= 0:
        return 0.0
    if (measured := _measured_s(group, "all_reduce", size)) is not None:
        return measured
    times_s = [_ring_s(group, size, 2)]
    if group.num_domains == 1 and group.intra_link.in_network and group.size > 2:
        rate = group.intra_link.bandwidth_bytes_per_s * group.intra_link.in_network
        times_s.append(
            _fastest_protocol_s(2 * _ring_share(group) * size, rate, NVLS_STEPS * group.intra_link.latency_s)
        )
    if group.num_domains > 2:
        steps_s = 2 * (
            ceil(log2(group.num_domains)) * group.network_latency_s
            + (group.max_ranks_per_domain - 1) * group.intra_link.latency_s
        )
        times_s.append(_fastest_protocol_s(2 * size, group.ring_bytes_per_s, steps_s))
    return min(times_s)


def all_to_all_s(group: CommGroup, size: float, network_share: float = 1.0) -> float:
    """Return the seconds of an all-to-all in which every rank sends `size` bytes, an equal part to each rank.

    Messages within the fabric use it, the others the rank's share of the network cards, both at the same time; each
    message takes time besides its bytes, as in LogGP (Alexandrov et al., SPAA 1995): 64 H800 on 8 nodes exchange 8 MiB
    each in 338 µs; with cards of 400 Gbit/s 155 are the bytes, 26 the start, and 2.8 each of 56 messages
    (github:NVIDIA/nccl issue 1531). `network_share` is the share of the other bytes that crosses the network: bytes for
    several ranks of one node cross once, in a message to each node, and are then distributed over the fabric there.
    """
    if group.size == 1 or size <= 0:
        return 0.0
    if (measured := _measured_s(group, "all_to_all", size)) is not None:
        return measured
    near = group.max_ranks_per_domain - 1
    far = group.num_domains - 1 if network_share < 1 else group.size - group.max_ranks_per_domain
    inside = size * near / group.size
    outside = size * (group.size - group.max_ranks_per_domain) / group.size
    handed_on = outside if network_share < 1 else 0.0
    fabric_s = (inside + handed_on) / (group.intra_link.bandwidth_bytes_per_s * group.intra_link.efficiency)
    network_s = network_share * outside / group.network_bytes_per_s if outside and group.network_bytes_per_s else 0.0
    start_s = COLLECTIVE_START_S + SIMPLE_PROTOCOL_LATENCY_FACTOR * (
        group.intra_link.latency_s + (group.network_latency_s if outside else 0.0)
    )
    return start_s + max(fabric_s + near * group.fabric_message_s, network_s + far * group.network_message_s)


def p2p_s(group: CommGroup, size: float) -> float:
    """Return the seconds in which a rank of a pair sends `size` bytes to the other, while neighbours do the same."""
    if group.size == 1 or size <= 0:
        return 0.0
    if (measured := _measured_s(group, "send", size)) is not None:
        return measured
    latency_s = group.intra_link.latency_s if group.num_domains == 1 else group.network_latency_s
    rate = (
        group.intra_link.bandwidth_bytes_per_s * group.intra_link.efficiency
        if group.num_domains == 1
        else min(group.network_bytes_per_s, group.intra_link.bandwidth_bytes_per_s)
    )
    return COLLECTIVE_START_S + SIMPLE_PROTOCOL_LATENCY_FACTOR * latency_s + size / rate


def _ring_share(group: CommGroup) -> float:
    return (group.size - 1) / group.size


def _ring_s(group: CommGroup, size: float, rounds: int) -> float:
    """Return the seconds of `rounds` passes around the ring: each link carries (n − 1) / n of the bytes in each."""
    steps_s = (group.max_ranks_per_domain - 1) * group.intra_link.latency_s
    if group.num_domains > 1:
        steps_s += (group.num_domains - 1) * group.network_latency_s
    return _fastest_protocol_s(rounds * _ring_share(group) * size, group.ring_bytes_per_s, rounds * steps_s)


def _fastest_protocol_s(sent: float, bytes_per_s: float, steps_s: float) -> float:
    """Return the time of the faster of NCCL's protocols, for `sent` bytes over each link and `steps_s` of latency."""
    small_s = steps_s + sent / (LL_BANDWIDTH_SHARE * bytes_per_s)
    return COLLECTIVE_START_S + min(small_s, SIMPLE_PROTOCOL_LATENCY_FACTOR * steps_s + sent / bytes_per_s)


def _measured_s(group: CommGroup, kind: str, size: float) -> float | None:
    """Return the measured seconds of a collective within one fabric, or None where none was measured.

    Interpolates between sizes, for the measured number of ranks that is nearest to the group's.
    """
    points = group.intra_link.curves.get(kind) if group.num_domains == 1 else None
    if not points:
        return None
    ranks = min({n for n, _, _ in points}, key=lambda n: (abs(n - group.size), n))
    own = sorted((bytes_, seconds) for n, bytes_, seconds in points if n == ranks)
    for (size0, time0), (size1, time1) in zip(own, own[1:], strict=False):
        if size <= size1:
            share = max(0.0, (size - size0) / (size1 - size0))
            return time0 + share * (time1 - time0)
    return own[-1][1] * size / own[-1][0]
