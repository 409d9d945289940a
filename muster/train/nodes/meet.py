"""How the launchers of all nodes find each other: node 0 listens, the others come. Free of torch."""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from muster.parallel.network import Reception, family_of, own_interface, place, resolve
from muster.spec.errors import MusterError
from muster.train.errors import STOPPED
from muster.train.nodes.line import Line, Message, read_line
from muster.train.nodes.reach import Doorstep
from muster.train.nodes.request import NodesRequest, data_interface, listening_address
from muster.train.nodes.team import Member, Over, Team, error_of

_HELLO_LIMIT_S = 10.0
_TRY_S, _CONNECT_LIMIT_S = 0.5, 5.0
_TELL_S = 30.0
"""Between lines that say who is still waited for."""


@contextmanager
def meet(request: NodesRequest, facts: dict[str, Any]) -> Iterator[Team]:
    """All launchers, once all are there. What ends this one early is told to the others.

    Raises MusterError where they don't come or can't be reached; ConfigError where two say that they are the same node.
    """
    team = _team_of(request, facts)
    try:
        with contextlib.ExitStack() as held:
            if team.is_hub:
                held.enter_context(_reception(team))
                _wait_for_all(team)
            else:
                _go_to_first(team)
            yield team
    except Over as over:
        if team.is_hub:
            team.tell("over", code=over.code, reason=over.reason)
        raise
    except (MusterError, SystemExit, KeyboardInterrupt) as end:
        code = end.exit_code if isinstance(end, MusterError) else STOPPED
        reason = str(end) if isinstance(end, MusterError) else f"{team.own} was asked to stop"
        if team.is_hub and not reason.startswith("node "):
            reason = f"{team.own}: {reason}"
        team.tell("over" if team.is_hub else "failed", code=code, reason=reason)
        raise
    finally:
        team.close()


def _team_of(request: NodesRequest, facts: dict[str, Any]) -> Team:
    if request.rank == 0:
        address = listening_address(request)
        asked = request.interface or os.environ.get("GLOO_SOCKET_IFNAME")
        interface = data_interface(request, address) if asked else own_interface(address)
        assert interface is not None
    else:
        address = _resolved_in_time(request)
        interface = data_interface(request, address)
    doorstep = Doorstep(request.rank, interface.address)
    own = Member(request.rank, socket.gethostname(), facts, interface.address, interface.name, doorstep.port)
    team = Team(request, own, interface, doorstep)
    team.address = address
    return team


def _resolved_in_time(request: NodesRequest) -> str:
    """Names of machines that start together may come late."""
    progress = _Progress(request.join_limit_s)
    while True:
        try:
            return resolve(request.host)
        except MusterError as error:
            progress.say(f"waiting for the address of {request.host}: {error}", str(error))
        time.sleep(_TRY_S)


@contextmanager
def _reception(team: Team) -> Iterator[None]:
    """Node 0 listens for as long as the job runs: who comes too late or twice is told so."""
    request, address = team.request, team.address
    listener = socket.socket(family_of(address))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((address, request.port))
        listener.listen(1024)
    except (OSError, OverflowError) as error:
        listener.close()
        raise MusterError(
            f"could not listen on {place(address, request.port)} ({getattr(error, 'strerror', None) or error}): another"
            " launcher may be node 0 here already, or give all nodes another port in --rendezvous"
        ) from None
    with contextlib.closing(Reception(listener, partial(_greet, team), "reception")):
        yield


_entering = threading.Lock()


def _greet(team: Team, connection: socket.socket) -> None:
    """Reads who comes, and lets in who may."""
    hello = read_line(connection, _HELLO_LIMIT_S)
    if hello is None or hello["kind"] != "hello":  # no launcher
        connection.close()
        return
    try:
        member, refusal = Member(**hello["member"]), ""
        line = Line(connection, int(member.node), team.inbox)
        with _entering:
            refusal = _refusal(team, hello)
            if refusal is None:
                # Before others may talk on this line: a launcher that comes wants to hear this first.
                line.say("welcome", member=vars(team.own) | {"facts": {}})
                team.members[line.who], team.lines[line.who] = member, line
    except (KeyError, TypeError, ValueError):  # nor is this
        connection.close()
        return
    if refusal is not None:
        line.say("over", code=2, reason=refusal)
        line.listen()
        line.close()
        return
    line.listen()
    team.inbox.put((line.who, {"kind": "came"}))


def _refusal(team: Team, hello: Message) -> str | None:
    node, said = hello["member"]["node"], f"node 0 on {team.own.host}"
    if hello["nodes"] != team.count:
        return f"--nodes is {hello['nodes']} here, but {team.count} on {said}: give all nodes the same"
    if not 0 < node < team.count:
        return f"--node-rank {node} is already that of {said}: number the nodes from 0 to {team.count - 1}"
    if node in team.lines:
        return (
            f"--node-rank {node} is already that of the launcher on {team.members[node].host}: give each node a number"
            f" of its own, from 0 to {team.count - 1}"
        )
    return None


def _wait_for_all(team: Team) -> None:
    progress = _Progress(team.request.join_limit_s)
    while missing := [node for node in range(1, team.count) if node not in team.lines]:
        nodes = f"node{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
        limit, where = f"{team.request.join_limit_s:.0f} s", place(team.address, team.request.port)
        progress.say(
            f"waiting for {len(missing)} of {team.count} nodes: {nodes}",
            f"{nodes} did not come to {where} within {limit}: start there the same command with its own --node-rank,"
            " or wait longer with --join-limit",
        )
        for node, message in team.receive(0.2):
            if message["kind"] == "gone":
                with _entering:
                    team.lines.pop(node, None)
                print(f"{team.members.pop(node)} has left again", flush=True)
            elif message["kind"] == "failed":
                team.raise_if_over(node, message)


class _Progress:
    """Says what is waited for when that changes, and now and then; and when it was too long."""

    def __init__(self, limit_s: float) -> None:
        self._limit = time.monotonic() + limit_s
        self._said, self._next = "", 0.0
        self._begun = time.monotonic()

    def say(self, words: str, too_long: str) -> None:
        now = time.monotonic()
        if now > self._limit:
            raise MusterError(too_long)
        if now - self._begun > _TRY_S and (words != self._said or now > self._next):
            print(words, flush=True)
            self._said, self._next = words, now + _TELL_S


def _go_to_first(team: Team) -> None:
    request, address = team.request, team.address
    where, progress = place(address, request.port), _Progress(request.join_limit_s)
    problem = ""
    while True:
        try:
            connection = socket.create_connection((address, request.port), _CONNECT_LIMIT_S)
            break
        except OSError as error:
            problem = error.strerror or str(error)
        progress.say(
            f"waiting for node 0 at {where} ({problem})",
            f"node 0 did not answer at {where} within {request.join_limit_s:.0f} s ({problem}): start it there with"
            " --node-rank 0, correct --rendezvous, open the port, or wait longer with --join-limit",
        )
        time.sleep(_TRY_S)
    line = Line(connection, 0, team.inbox)
    line.say("hello", nodes=request.count, member=vars(team.own))
    answer = read_line(connection, _HELLO_LIMIT_S)
    if answer is None or answer["kind"] not in ("welcome", "over"):
        raise MusterError(f"what listens at {where} is no launcher of Muster: give all nodes another --rendezvous")
    if answer["kind"] == "over":
        raise error_of(answer["code"], answer["reason"])
    connection.settimeout(None)
    team.lines[0], team.members[0] = line, Member(**answer["member"])
    line.listen()
