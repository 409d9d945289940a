"""Checks of `muster doctor` on several nodes: connections, equal software and clocks, and network bandwidth.

Every wait has a limit. This module needs no torch but for the ranks, which are separate processes.
"""

from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

from muster.launch.network import format_endpoint
from muster.launch.nodes.handshake import node_differences, software_versions
from muster.launch.nodes.launcher_group import JobEnded, LauncherGroup, NodeInfo
from muster.launch.nodes.rendezvous import rendezvous
from muster.launch.nodes.rendezvous_config import RendezvousConfig
from muster.probe.doctor import CHECKS, CLOCK_TOLERANCE_S, GIB, CheckResult, DoctorRequest, run_checks
from muster.probe.doctor_ranks import check_rank_probes
from muster.spec.errors import MusterError


def run_node_checks(request: DoctorRequest, nodes: RendezvousConfig) -> Iterator[CheckResult]:
    """Run this node's own checks, then those of all nodes together, whose results every node reports alike."""
    own: list[CheckResult] = []
    # The checks of ports and ranks are done between the nodes instead of within each.
    for finding in run_checks(request, [name for name in (*CHECKS, "plan") if name not in ("ports", "ranks")]):
        own.append(finding)
        yield finding
    facts = {"job": "doctor", **software_versions(), "findings": [asdict(one) for one in own if one.level == "problem"]}
    try:
        with rendezvous(replace(nodes, timeout_s=min(nodes.timeout_s, request.limit_s)), facts) as team:
            if not team.is_coordinator:
                team.check_connectivity(request.limit_s, all_pairs=True)
                yield from _check_ranks(team, request, able=False)
                told = team.wait_for("findings", request.limit_s)[0]
                rows = [row for node, row in told["of_nodes"] if node != team.node_rank]
                yield from (CheckResult(**row) for row in (*rows, *told["findings"]))
                return
            of_nodes = [(node, row) for node in sorted(team.nodes) for row in _problems_of(team.nodes[node])]
            together = [*_check_nodes(team, request)]
            reached = not any(finding.check == "reach" and finding.level == "problem" for finding in together)
            together += _check_ranks(team, request, reached)
            team.send("findings", of_nodes=of_nodes, findings=[asdict(finding) for finding in together])
            yield from (CheckResult(**row) for node, row in of_nodes if node != team.node_rank)
            yield from together
    except MusterError as error:
        yield CheckResult("nodes", "problem", str(error))
    except JobEnded as over:
        yield CheckResult("nodes", "problem", over.reason)


def _problems_of(member: NodeInfo) -> list[dict[str, Any]]:
    """Return the problems that a node has found by itself, as its others say them."""
    return [row | {"sentence": f"{member}: {row['sentence']}"} for row in member.facts["findings"]]


def _check_nodes(team: LauncherGroup, request: DoctorRequest) -> Iterator[CheckResult]:
    """Check nodes, versions, clocks and connections from node 0, before ranks are started."""
    members = [team.nodes[node] for node in sorted(team.nodes)]
    where = format_endpoint(team.address, team.config.port)
    yield CheckResult("nodes", "ok", f"{', '.join(map(str, members))} connected at {where}")
    for member in members[1:]:
        for sentence in node_differences(members[0], member):
            yield CheckResult("versions", "problem", sentence)
    team.measure_clocks()
    off = {node: seconds for node, seconds in team.clock_offset_s.items() if abs(seconds) > CLOCK_TOLERANCE_S}
    for node, seconds in off.items():
        sentence = (
            f"the clocks of {team.local_node} and {team.nodes[node]} differ by {seconds:+.1f} s: start NTP on both"
        )
        yield CheckResult("clocks", "problem", sentence)
    if not off:
        most = max(map(abs, team.clock_offset_s.values()))
        yield CheckResult("clocks", "ok", f"the nodes' clocks agree within {most:.3f} s")
    problems = team.check_connectivity(request.limit_s, all_pairs=True)
    for sentence in problems:
        yield CheckResult("reach", "problem", sentence)
    if not problems:
        through = ", ".join(dict.fromkeys(member.interface for member in members))
        yield CheckResult("reach", "ok", f"every node reaches every other through {through}")


def _check_ranks(team: LauncherGroup, request: DoctorRequest, able: bool) -> Iterator[CheckResult]:
    """Start ranks on all nodes if these can connect (`able`); only node 0 yields the results."""
    if team.is_coordinator:
        torch = all(member.facts["torch"] != "none" for member in team.nodes.values())
        if not torch:
            yield CheckResult("ranks", "note", "ranks can't be started without PyTorch on all nodes")
        able = able and torch
        team.send("greet", able=able)
    else:  # node 0 knows
        able = team.wait_for("greet", 2 * request.limit_s)[0]["able"]
    if not able:
        return
    from muster.probe.all_reduce_check import check_across_nodes

    outcome, found = check_across_nodes(team, request.ranks, request.limit_s)
    if not team.is_coordinator:
        return
    count = f"{request.ranks * team.num_nodes} ranks on {team.num_nodes} nodes"
    if outcome.code or not found:
        reason = "they were killed after the limit" if outcome.reason.startswith("killed") else outcome.reason
        yield CheckResult("ranks", "problem", f"{count} could not connect within {request.limit_s:g} s ({reason})")
        return
    yield CheckResult(
        "ranks", "ok", f"{count} connected and all-reduced in {found['seconds']:.1f} s on {found['device']}"
    )
    rate = found["bytes_per_s"]
    sentence = f"an all-reduce of 16 MiB over {count} runs at {rate / GIB:.3f} GiB/s ({rate * 8 / 1e9:.2f} Gbit/s)"
    yield CheckResult("bandwidth", "ok", sentence)
    places = [f" of {team.nodes[node]}" for node in sorted(team.nodes) for _ in range(request.ranks)]
    yield from check_rank_probes(found["ranks"], places, found["machines"], found["shares_cores"])
