"""`muster doctor` on several nodes: whether they find each other, have the same software and time, and how fast they
are joined. Every wait has a limit; free of torch but for the ranks, which are processes of their own.
"""

from collections.abc import Iterator
from dataclasses import asdict, replace

from muster.parallel.network import place
from muster.probe.doctor import CHECKS, CLOCK_TOLERANCE_S, GIB, Finding, Request, examine
from muster.spec.errors import MusterError
from muster.train.nodes.agree import differences, software
from muster.train.nodes.meet import meet
from muster.train.nodes.request import NodesRequest
from muster.train.nodes.team import Over, Team


def examine_nodes(request: Request, nodes: NodesRequest) -> Iterator[Finding]:
    """This node's own checks, and then those of all together, which every node tells alike."""
    own: list[Finding] = []
    # What these two try within a machine is tried between all of them.
    for finding in examine(request, [name for name in CHECKS if name not in ("ports", "ranks")]):
        own.append(finding)
        yield finding
    facts = {"job": "doctor", **software(), "findings": [asdict(one) for one in own if one.level == "problem"]}
    try:
        with meet(replace(nodes, join_limit_s=min(nodes.join_limit_s, request.limit_s)), facts) as team:
            if not team.is_hub:
                team.unreached(request.limit_s)
                yield from _greet(team, request, able=False)
                rows = team.expect("findings", request.limit_s)[0]["findings"]
                yield from (Finding(**row) for row in rows)
                return
            together = [*_look(team, request)]
            reached = not any(finding.check == "reach" and finding.level == "problem" for finding in together)
            together += _greet(team, request, reached)
            team.tell("findings", findings=[asdict(finding) for finding in together])
            yield from together
    except MusterError as error:
        yield Finding("nodes", "problem", str(error))
    except Over as over:
        yield Finding("nodes", "problem", over.reason)


def _look(team: Team, request: Request) -> Iterator[Finding]:
    """What node 0 sees before ranks are started."""
    members = [team.members[node] for node in sorted(team.members)]
    where = place(team.address, team.request.port)
    yield Finding("nodes", "ok", f"{', '.join(map(str, members))} have met at {where}")
    for member in members[1:]:
        for row in member.facts["findings"]:
            yield Finding(row["check"], "problem", f"{member}: {row['sentence']}")
        for sentence in differences(members[0], member):
            yield Finding("versions", "problem", sentence)
    team.measure_clocks()
    off = {node: seconds for node, seconds in team.clock_off_s.items() if abs(seconds) > CLOCK_TOLERANCE_S}
    for node, seconds in off.items():
        said = f"the clock of {team.members[node]} is {seconds:+.1f} s off that of {team.own}: start NTP on both"
        yield Finding("clocks", "problem", said)
    if not off:
        most = max(map(abs, team.clock_off_s.values()))
        yield Finding("clocks", "ok", f"the nodes' clocks agree within {most:.3f} s")
    problems = team.unreached(request.limit_s)
    for sentence in problems:
        yield Finding("reach", "problem", sentence)
    if not problems:
        through = ", ".join(dict.fromkeys(member.interface for member in members))
        yield Finding("reach", "ok", f"every node reaches every other through {through}")


def _greet(team: Team, request: Request, able: bool) -> Iterator[Finding]:
    """Starts ranks on all nodes, if they are `able` to meet; only node 0 tells of it."""
    if team.is_hub:
        torch = all(member.facts["torch"] != "none" for member in team.members.values())
        if not torch:
            yield Finding("ranks", "note", "without PyTorch on all nodes no ranks can be started")
        able = able and torch
        team.tell("greet", able=able)
    else:  # node 0 knows
        able = team.expect("greet", 2 * request.limit_s)[0]["able"]
    if not able:
        return
    from muster.probe.greeting import meet_others

    outcome, found = meet_others(team, request.ranks, request.limit_s)
    if not team.is_hub:
        return
    count = f"{request.ranks * team.count} ranks on {team.count} nodes"
    if outcome.code or not found:
        slow = "they were killed after the limit" if outcome.reason.startswith("killed") else outcome.reason
        yield Finding("ranks", "problem", f"{count} could not meet within {request.limit_s:g} s ({slow})")
        return
    yield Finding("ranks", "ok", f"{count} met and added up in {found['seconds']:.1f} s on {found['device']}")
    rate = found["bytes_per_s"]
    said = f"an all-reduce of 16 MiB over {count} goes at {rate / GIB:.3f} GiB/s ({rate * 8 / 1e9:.2f} Gbit/s)"
    yield Finding("bandwidth", "ok", said)
