"""Rendezvous of the launchers of all nodes: node 0 listens, the others connect. Free of torch."""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from muster.launch.network import ConnectionAcceptor, address_family, format_endpoint, local_interface, resolve
from muster.launch.nodes.connection import LauncherConnection, Message, read_first_message
from muster.launch.nodes.connectivity import ProbeListener
from muster.launch.nodes.launcher_group import JobEnded, LauncherGroup, NodeInfo, error_for_code
from muster.launch.nodes.rendezvous_config import RendezvousConfig, data_interface, listening_address
from muster.launch.rank_errors import EXIT_STOPPED
from muster.spec.errors import MusterError

_HELLO_TIMEOUT_S = 10.0
_RETRY_INTERVAL_S, _CONNECT_TIMEOUT_S = 0.5, 5.0
_REPORT_INTERVAL_S = 30.0
"""Time between lines that name the nodes still missing."""


@contextmanager
def rendezvous(config: RendezvousConfig, facts: dict[str, Any]) -> Iterator[LauncherGroup]:
    """Connect the launchers of all nodes, and yield their group once all are there.

    An error or a request to stop within this context is sent to the others. Raises MusterError where a launcher doesn't
    come in time or can't be reached; ConfigError where two claim the same node rank.
    """
    team = _make_group(config, facts)
    try:
        with contextlib.ExitStack() as held:
            if team.is_coordinator:
                held.enter_context(_listen(team))
                _wait_for_all_nodes(team)
            else:
                _connect_to_node_0(team)
            yield team
    except JobEnded as over:
        if team.is_coordinator:
            team.send("over", code=over.code, reason=over.reason)
        raise
    except (MusterError, SystemExit, KeyboardInterrupt) as end:
        code = end.exit_code if isinstance(end, MusterError) else EXIT_STOPPED
        reason = str(end) if isinstance(end, MusterError) else f"{team.local_node} was asked to stop"
        if team.is_coordinator and not reason.startswith("node "):
            reason = f"{team.local_node}: {reason}"
        team.send("over" if team.is_coordinator else "failed", code=code, reason=reason)
        raise
    finally:
        team.close()


def _make_group(request: RendezvousConfig, facts: dict[str, Any]) -> LauncherGroup:
    if request.node_rank == 0:
        address = listening_address(request)
        asked = request.interface or os.environ.get("GLOO_SOCKET_IFNAME")
        interface = data_interface(request, address) if asked else local_interface(address)
        assert interface is not None
    else:
        address = _resolve_with_retries(request)
        interface = data_interface(request, address)
    doorstep = ProbeListener(request.node_rank, interface.address)
    own = NodeInfo(request.node_rank, socket.gethostname(), facts, interface.address, interface.name, doorstep.port)
    team = LauncherGroup(request, own, interface, doorstep)
    team.address = address
    return team


def _resolve_with_retries(request: RendezvousConfig) -> str:
    """Resolve node 0's name, which may be known only some time after machines have started together."""
    progress = _WaitReporter(request.timeout_s)
    while True:
        try:
            return resolve(request.host)
        except MusterError as error:
            progress.report(f"waiting for the address of {request.host}: {error}", str(error))
        time.sleep(_RETRY_INTERVAL_S)


@contextmanager
def _listen(team: LauncherGroup) -> Iterator[None]:
    """Listen on node 0 for as long as the job runs: a launcher that comes too late or twice is refused with a
    reason."""
    request, address = team.config, team.address
    listener = socket.socket(address_family(address))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((address, request.port))
        listener.listen(1024)
    except (OSError, OverflowError) as error:
        listener.close()
        raise MusterError(
            f"could not listen on {format_endpoint(address, request.port)}"
            f" ({getattr(error, 'strerror', None) or error}): another"
            " launcher may be node 0 here already, or give all nodes another port in --rendezvous"
        ) from None
    with contextlib.closing(ConnectionAcceptor(listener, partial(_admit, team), "reception")):
        yield


_admission_lock = threading.Lock()


def _admit(team: LauncherGroup, connection: socket.socket) -> None:
    """Read the hello of a new connection, and admit the launcher or refuse it."""
    hello = read_first_message(connection, _HELLO_TIMEOUT_S)
    if hello is None or hello["kind"] != "hello":  # no launcher
        connection.close()
        return
    try:
        member, refusal = NodeInfo(**hello["member"]), ""
        line = LauncherConnection(connection, int(member.node), team.inbox)
        with _admission_lock:
            refusal = _refusal_reason(team, hello)
            if refusal is None:
                # Before others may talk on this line: a launcher that comes wants to hear this first.
                line.send("welcome", member=vars(team.local_node) | {"facts": {}})
                team.nodes[line.node], team.connections[line.node] = member, line
    except (KeyError, TypeError, ValueError):  # nor is this
        connection.close()
        return
    if refusal is not None:
        line.send("over", code=2, reason=refusal)
        line.start_reading()
        line.close()
        return
    line.start_reading()
    team.inbox.put((line.node, {"kind": "came"}))


def _refusal_reason(team: LauncherGroup, hello: Message) -> str | None:
    node, said = hello["member"]["node"], f"node 0 on {team.local_node.host}"
    if hello["nodes"] != team.num_nodes:
        return f"--nodes is {hello['nodes']} here, but {team.num_nodes} on {said}: give all nodes the same"
    if not 0 < node < team.num_nodes:
        return f"--node-rank {node} is already that of {said}: number the nodes from 0 to {team.num_nodes - 1}"
    if node in team.connections:
        return (
            f"--node-rank {node} is already that of the launcher on {team.nodes[node].host}: give each node a number"
            f" of its own, from 0 to {team.num_nodes - 1}"
        )
    return None


def _wait_for_all_nodes(team: LauncherGroup) -> None:
    progress = _WaitReporter(team.config.timeout_s)
    while missing := [node for node in range(1, team.num_nodes) if node not in team.connections]:
        nodes = f"node{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
        limit, where = f"{team.config.timeout_s:.0f} s", format_endpoint(team.address, team.config.port)
        progress.report(
            f"waiting for {len(missing)} of {team.num_nodes} nodes: {nodes}",
            f"{nodes} did not come to {where} within {limit}: start there the same command with its own --node-rank,"
            " or wait longer with --rendezvous-timeout",
        )
        for node, message in team.receive(0.2):
            if message["kind"] == "gone":
                with _admission_lock:
                    team.connections.pop(node, None)
                print(f"{team.nodes.pop(node)} has left again", flush=True)
            elif message["kind"] == "failed":
                team.raise_if_ended(node, message)


class _WaitReporter:
    """Prints what is waited for when that changes and at intervals; raises MusterError after the timeout."""

    def __init__(self, limit_s: float) -> None:
        self._limit = time.monotonic() + limit_s
        self._said, self._next = "", 0.0
        self._begun = time.monotonic()

    def report(self, words: str, too_long: str) -> None:
        now = time.monotonic()
        if now > self._limit:
            raise MusterError(too_long)
        if now - self._begun > _RETRY_INTERVAL_S and (words != self._said or now > self._next):
            print(words, flush=True)
            self._said, self._next = words, now + _REPORT_INTERVAL_S


def _connect_to_node_0(team: LauncherGroup) -> None:
    request, address = team.config, team.address
    where, progress = format_endpoint(address, request.port), _WaitReporter(request.timeout_s)
    problem = ""
    while True:
        try:
            connection = socket.create_connection((address, request.port), _CONNECT_TIMEOUT_S)
            break
        except OSError as error:
            problem = error.strerror or str(error)
        progress.report(
            f"waiting for node 0 at {where} ({problem})",
            f"node 0 did not answer at {where} within {request.timeout_s:.0f} s ({problem}): start it there with"
            " --node-rank 0, correct --rendezvous, open the port, or wait longer with --rendezvous-timeout",
        )
        time.sleep(_RETRY_INTERVAL_S)
    line = LauncherConnection(connection, 0, team.inbox)
    line.send("hello", nodes=request.num_nodes, member=vars(team.local_node))
    answer = read_first_message(connection, _HELLO_TIMEOUT_S)
    if answer is None or answer["kind"] not in ("welcome", "over"):
        raise MusterError(f"what listens at {where} is no launcher of Muster: give all nodes another --rendezvous")
    if answer["kind"] == "over":
        raise error_for_code(answer["code"], answer["reason"])
    connection.settimeout(None)
    team.connections[0], team.nodes[0] = line, NodeInfo(**answer["member"])
    line.start_reading()
