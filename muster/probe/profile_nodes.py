"""`muster profile` on several nodes: the bandwidth and latency of every link between them. Free of torch."""

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations

from muster.config.local_machine import detect_machine, nvidia_gpu_names, usable_cores
from muster.config.yaml_writer import yaml_text
from muster.launch.nodes.handshake import require_same, software_versions
from muster.launch.nodes.launcher_group import JobEnded, LauncherGroup, error_for_code
from muster.launch.nodes.rendezvous import rendezvous
from muster.launch.nodes.rendezvous_config import RendezvousConfig
from muster.layout.ring_order import ring_order, ring_value
from muster.probe.node_links import TIMEOUT_S, LinkListener, LinkRate, measure_link
from muster.spec.cluster import ClusterSpec, NodeGroup
from muster.spec.device import LinkSpec, Nics
from muster.spec.errors import ConfigError, MusterError

READY_TIMEOUT_S = 60.0
"""Longest wait for a node to try the others' addresses."""
ALIKE = 0.1
"""Relative difference within which measured values count as one, their mean: plans treat links that differ as
unlike."""

Table = tuple[tuple[float, ...], ...]
"""A value for each pair of nodes, from the row's to the column's."""


@dataclass(frozen=True)
class LinkProfileRequest:
    """Settings of the measurement of links."""

    cluster: ClusterSpec | None
    """Cluster whose nodes these are, in this order; None: as the nodes' operating systems report themselves."""
    connections: int = 1
    """TCP connections that each link is measured with at once."""
    seconds: float = 1.0
    """Seconds of sending over each link."""


def profile_nodes(nodes: RendezvousConfig, request: LinkProfileRequest) -> ClusterSpec | None:
    """Measure all links between the nodes, one at a time; return the cluster with them on node 0, None on others.

    Raises MusterError, with the nodes, where one doesn't come, doesn't reach another, or goes away.
    """
    if request.cluster is not None and request.cluster.num_nodes != nodes.num_nodes:
        raise ConfigError(
            f"--cluster {request.cluster.name} has {request.cluster.num_nodes} nodes, but --nodes is {nodes.num_nodes}:"
            " expected the same number"
        )
    facts = {"job": "profile", **software_versions(), "group": _own_group().model_dump(mode="json")}
    try:
        with rendezvous(nodes, facts) as team:
            if not team.is_coordinator:
                _measure_when_told(team, request)
                return None
            require_same(team)
            return _measure_all(team, request)
    except JobEnded as ended:
        raise error_for_code(ended.code, ended.reason) from None


def _own_group() -> NodeGroup:
    """Return this node, as its operating system reports it: its GPUs, or its cores."""
    return detect_machine(len(nvidia_gpu_names()) or usable_cores()).groups[0]


def _measure_all(team: LauncherGroup, request: LinkProfileRequest) -> ClusterSpec:
    """Let every node measure its links to all others, one after another, so that none disturbs another."""
    problems = team.check_connectivity(READY_TIMEOUT_S)
    if problems:
        raise MusterError("; ".join(problems))
    token = secrets.token_hex(16)
    team.send("token", token=token)
    listener = LinkListener(team.interface.address, token)
    try:
        ports = {0: listener.port}
        ports |= {node: message["port"] for node, message in team.wait_for("listens", READY_TIMEOUT_S).items()}
        rates: dict[tuple[int, int], LinkRate] = {}
        for source, target in permutations(range(team.num_nodes), 2):
            where = team.nodes[target].address, ports[target]
            if source == 0:
                rates[source, target] = _measure(team, where, token, request)
            else:
                team.connections[source].send("measure", where=where)
                found = team.wait_for("measured", 3 * TIMEOUT_S + request.seconds, [source])[source]
                rates[source, target] = LinkRate(found["bytes_per_s"], found["latency_s"])
        team.send("measure", where=None)
    finally:
        listener.close()
    own = [NodeGroup.model_validate(team.nodes[node].facts["group"]) for node in range(team.num_nodes)]
    cluster = request.cluster or cluster_of_nodes(own, rates)
    return with_measured_links(cluster, rates)


def _measure_when_told(team: LauncherGroup, request: LinkProfileRequest) -> None:
    """Measure this node's links when node 0 says so, and receive what others send meanwhile."""
    team.check_connectivity(READY_TIMEOUT_S)
    token = team.wait_for("token", READY_TIMEOUT_S)[0]["token"]
    listener = LinkListener(team.interface.address, token)
    try:
        team.send("listens", port=listener.port)
        longest_s = team.num_nodes**2 * (3 * TIMEOUT_S + request.seconds)
        while (where := team.wait_for("measure", longest_s)[0]["where"]) is not None:
            team.send("measured", **_measure(team, tuple(where), token, request)._asdict())
    finally:
        listener.close()


def _measure(team: LauncherGroup, where: tuple[str, int], token: str, request: LinkProfileRequest) -> LinkRate:
    return measure_link(*where, token, team.interface.address, request.connections, request.seconds)


# ----------------------------------------------------------------------------------------------------------------------
# The cluster


def cluster_of_nodes(nodes: Sequence[NodeGroup], rates: dict[tuple[int, int], LinkRate]) -> ClusterSpec:
    """Return the nodes as a cluster; neighbours that are alike are one group. Their network cards are as fast as the
    fastest link."""
    link = LinkSpec(
        name="measured",
        kind="ethernet",
        bandwidth_bytes_per_s=max(rate.bytes_per_s for rate in rates.values()),
        latency_s=min(rate.latency_s for rate in rates.values()),
        efficiency=1.0,
    )
    groups: list[NodeGroup] = []
    for node in nodes:
        one = node.model_copy(update={"num_nodes": 1, "nics": Nics(link=link), "domain_nodes": 1})
        if groups and groups[-1].model_copy(update={"num_nodes": 1}) == one:
            groups[-1] = one.model_copy(update={"num_nodes": groups[-1].num_nodes + 1})
        else:
            groups.append(one)
    return ClusterSpec(name=f"{len(nodes)} measured nodes", groups=tuple(groups))


def with_measured_links(cluster: ClusterSpec, rates: dict[tuple[int, int], LinkRate]) -> ClusterSpec:
    """Return the cluster with the measured links; a node's own values are those of the link between its devices."""
    own = [group for group in cluster.groups for _ in range(group.num_nodes)]
    rate = {pair: one.bytes_per_s for pair, one in rates.items()}
    latency = {pair: one.latency_s for pair, one in rates.items()}
    within = [group.intra.bandwidth_bytes_per_s * group.intra.efficiency for group in own]
    return ClusterSpec.model_validate(
        {
            **dict(cluster),
            "node_bandwidth_bytes_per_s": _table(alike(rate), within),
            "node_latency_s": _table(alike(latency), [group.intra.latency_s for group in own]),
        }
    )


def alike(values: dict[tuple[int, int], float]) -> dict[tuple[int, int], float]:
    """Return values of which those within a tenth of the least of them are replaced by their mean, to 3 digits."""
    found: dict[tuple[int, int], float] = {}
    for block in _blocks(sorted(values, key=lambda pair: (values[pair], pair)), values):
        mean = float(f"{sum(values[pair] for pair in block) / len(block):.3g}")
        found |= dict.fromkeys(block, mean)
    return found


def _blocks(
    ordered: Sequence[tuple[int, int]], values: dict[tuple[int, int], float]
) -> Iterator[list[tuple[int, int]]]:
    block: list[tuple[int, int]] = []
    for pair in ordered:
        if block and values[pair] > (1 + ALIKE) * values[block[0]]:
            yield block
            block = []
        block.append(pair)
    if block:
        yield block


def _table(values: dict[tuple[int, int], float], own: Sequence[float]) -> Table:
    count = range(len(own))
    return tuple(tuple(own[one] if one == other else values[one, other] for other in count) for one in count)


def nodes_text(cluster: ClusterSpec, request: LinkProfileRequest) -> str:
    """Return the text of a cluster file, which `load_cluster` reads."""
    how = f"{request.connections} TCP connection{'s' if request.connections > 1 else ''} a link"
    tree = cluster.model_dump(mode="json", exclude_defaults=True)
    return f"# Links measured by muster profile --nodes, with {how}.\n{yaml_text(tree)}"


def links_summary(cluster: ClusterSpec) -> str:
    """Return the links as lines: rates, latencies, and the ring whose slowest link is fastest."""
    rates, latencies = cluster.node_bandwidth_bytes_per_s, cluster.node_latency_s
    assert rates is not None
    assert latencies is not None
    order = ring_order(rates)
    ring = " ".join(map(str, order))
    return "\n".join(
        [
            "Gbit/s from the row's node to the column's:",
            *_rows(rates, 8e-9, 3),
            "ms of a message's way:",
            *_rows(latencies, 1e3, 3),
            f"ring {ring}: its slowest link has {8e-9 * ring_value(rates, order)[0]:.3f} Gbit/s",
        ]
    )


def _rows(table: Table, unit: float, digits: int) -> list[str]:
    width = 10
    head = " " * 6 + "".join(f"{number:>{width}}" for number in range(len(table)))
    rows = [
        f"{number:<6}"
        + "".join(f"{'–' if one == number else f'{unit * value:.{digits}f}':>{width}}" for one, value in enumerate(row))
        for number, row in enumerate(table)
    ]
    return [head, *rows]
