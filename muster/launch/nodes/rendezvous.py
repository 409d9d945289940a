"""Rendezvous of the launchers of all nodes: node 0 listens, the others connect. Free of torch."""

import contextlib
import os
import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from muster.launch.network import (
    ConnectionAcceptor,
    Interface,
    address_family,
    format_endpoint,
    local_interface,
    resolve,
)
from muster.launch.nodes.connection import LauncherConnection, Message, read_first_message
from muster.launch.nodes.connectivity import ProbeListener
from muster.launch.nodes.launcher_group import JobEnded, LauncherGroup, NodeInfo, error_for_code
from muster.launch.nodes.rendezvous_config import RendezvousConfig, data_interface, listening_address
from muster.launch.rank_errors import EXIT_STOPPED
from muster.spec.errors import ConfigError, MusterError

_HELLO_TIMEOUT_S = 10.0
_DEPARTURE_TIMEOUT_S = 5.0
"""Longest time until the end of a launcher is noticed here after another one has come with its number; less than
`_HELLO_TIMEOUT_S`, for which that one waits."""
_DEPARTURE_INTERVAL_S = 0.05
_RETRY_INTERVAL_S, _CONNECT_TIMEOUT_S = 0.5, 5.0
_REPORT_INTERVAL_S = 30.0
"""Time between lines that name the nodes still missing."""


@contextmanager
def rendezvous(config: RendezvousConfig, facts: dict[str, Any]) -> Iterator[LauncherGroup]:
    """Connect the launchers of all nodes, and yield their group once all are there.

    An error or a config to stop within this context is sent to the others. Raises MusterError where a launcher doesn't
    come in time or can't be reached; ConfigError where two claim the same node rank.
    """
    group = _make_group(config, facts)
    try:
        with contextlib.ExitStack() as stack:
            if group.is_coordinator:
                stack.enter_context(_listen(group))
                _wait_for_all_nodes(group)
            else:
                _connect_to_node_0(group)
            yield group
    except JobEnded as ended:
        if group.is_coordinator:
            group.send("over", code=ended.code, reason=ended.reason)
        raise
    except (MusterError, SystemExit, KeyboardInterrupt) as end:
        code = end.exit_code if isinstance(end, MusterError) else EXIT_STOPPED
        reason = str(end) if isinstance(end, MusterError) else f"{group.local_node} was asked to stop"
        if group.is_coordinator and not reason.startswith("node "):
            reason = f"{group.local_node}: {reason}"
        group.send("over" if group.is_coordinator else "failed", code=code, reason=reason)
        raise
    finally:
        group.close()


def _make_group(config: RendezvousConfig, facts: dict[str, Any]) -> LauncherGroup:
    if config.node_rank == 0:
        address = listening_address(config)
        asked = config.interface or os.environ.get("GLOO_SOCKET_IFNAME")
        interface = data_interface(config, address) if asked else local_interface(address)
        assert interface is not None
    else:
        address, interface = _find_node_0(config)
    probe_listener = ProbeListener(config.node_rank, interface.address)
    local_node = NodeInfo(
        config.node_rank, socket.gethostname(), facts, interface.address, interface.name, probe_listener.port
    )
    group = LauncherGroup(config, local_node, interface, probe_listener)
    group.address = address
    return group


def _find_node_0(config: RendezvousConfig) -> tuple[str, Interface]:
    """Return node 0's address and the interface of the route to it.

    Both may be known only some time after machines have started together, or after a network has come back.
    """
    progress = _WaitReporter(config.timeout_s)
    while True:
        try:
            address = resolve(config.host)
            return address, data_interface(config, address)
        except ConfigError:
            raise
        except MusterError as error:
            progress.report(f"waiting for a way to node 0: {error}", str(error))
        time.sleep(_RETRY_INTERVAL_S)


@contextmanager
def _listen(group: LauncherGroup) -> Iterator[None]:
    """Listen on node 0 for as long as the job runs: a launcher that comes too late or twice is refused with a
    reason."""
    config = group.config
    address = group.address
    listener = socket.socket(address_family(address))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((address, config.port))
        listener.listen(1024)
    except (OSError, OverflowError) as error:
        listener.close()
        raise MusterError(
            f"could not listen on {format_endpoint(address, config.port)}"
            f" ({getattr(error, 'strerror', None) or error}): another"
            " launcher may be node 0 here already, or give all nodes another port in --rendezvous"
        ) from None
    with contextlib.closing(ConnectionAcceptor(listener, partial(_admit, group), "reception")):
        yield


_admission_lock = threading.Lock()


def _admit(group: LauncherGroup, connection: socket.socket) -> None:
    """Read the hello of a new connection, and admit the launcher or refuse it."""
    hello = read_first_message(connection, _HELLO_TIMEOUT_S)
    if hello is None or hello["kind"] != "hello":  # not a launcher
        connection.close()
        return
    try:
        node = NodeInfo(**hello["member"])
        launcher = LauncherConnection(connection, int(node.node), group.inbox)
        _wait_for_departure(group, launcher.node)
        with _admission_lock:
            refusal = _refusal_reason(group, hello)
            if refusal is None:
                # Sent before the launcher is in the group: it expects this message first.
                launcher.send("welcome", member=vars(group.local_node) | {"facts": {}})
                group.nodes[launcher.node] = node
                group.connections[launcher.node] = launcher
    except (KeyError, TypeError, ValueError):  # not a launcher either
        connection.close()
        return
    if refusal is not None:
        launcher.send("over", code=2, reason=refusal)
        launcher.start_reading()
        launcher.close()
        return
    group.inbox.put((launcher.node, {"kind": "came"}))  # before it may be said to be gone
    launcher.start_reading()


def _wait_for_departure(group: LauncherGroup, node: int) -> None:
    """Wait until nobody has a number, for as long as its former launcher may have ended unnoticed: where this one stood
    still meanwhile, the next one is here before it knows."""
    limit = time.monotonic() + _DEPARTURE_TIMEOUT_S
    while node in group.connections and time.monotonic() < limit:
        time.sleep(_DEPARTURE_INTERVAL_S)


def _refusal_reason(group: LauncherGroup, hello: Message) -> str | None:
    node = hello["member"]["node"]
    node_0 = f"node 0 on {group.local_node.host}"
    if hello["nodes"] != group.num_nodes:
        return f"--nodes is {hello['nodes']} here, but {group.num_nodes} on {node_0}: give all nodes the same"
    if not 0 < node < group.num_nodes:
        return f"--node-rank {node} is already that of {node_0}: number the nodes from 0 to {group.num_nodes - 1}"
    if node in group.connections:
        return (
            f"--node-rank {node} is already that of the launcher on {group.nodes[node].host}: give each node a number"
            f" of its own, from 0 to {group.num_nodes - 1}"
        )
    return None


def _wait_for_all_nodes(group: LauncherGroup) -> None:
    progress = _WaitReporter(group.config.timeout_s)
    while missing := [node for node in range(1, group.num_nodes) if node not in group.connections]:
        nodes = f"node{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
        timeout = f"{group.config.timeout_s:.0f} s"
        where = format_endpoint(group.address, group.config.port)
        progress.report(
            f"waiting for {len(missing)} of {group.num_nodes} nodes: {nodes}",
            f"{nodes} did not come to {where} within {timeout}: start there the same command with its own --node-rank,"
            " or wait longer with --rendezvous-timeout",
        )
        for node, message in group.receive(0.2):
            if message["kind"] == "gone":
                with _admission_lock:
                    group.connections.pop(node, None)
                print(f"{group.nodes.pop(node)} has left again", flush=True)
            elif message["kind"] == "failed":
                group.raise_if_ended(node, message)


class _WaitReporter:
    """Prints what is waited for when that changes and at intervals; raises MusterError after the timeout."""

    def __init__(self, timeout_s: float) -> None:
        self._start = time.monotonic()
        self._deadline = self._start + timeout_s
        self._last_line = ""
        self._next_report = 0.0

    def report(self, line: str, timeout_error: str) -> None:
        now = time.monotonic()
        if now > self._deadline:
            raise MusterError(timeout_error)
        if now - self._start > _RETRY_INTERVAL_S and (line != self._last_line or now > self._next_report):
            print(line, flush=True)
            self._last_line = line
            self._next_report = now + _REPORT_INTERVAL_S


def _connect_to_node_0(group: LauncherGroup) -> None:
    config = group.config
    address = group.address
    where = format_endpoint(address, config.port)
    progress = _WaitReporter(config.timeout_s)
    while True:
        try:
            connection = socket.create_connection((address, config.port), _CONNECT_TIMEOUT_S)
            node_0 = LauncherConnection(connection, 0, group.inbox)
            node_0.send("hello", nodes=config.num_nodes, member=vars(group.local_node))
            if _is_answered(connection):
                break
            node_0.close(timeout_s=0)
            problem = "no answer"
        except OSError as error:
            problem = error.strerror or str(error)
        progress.report(
            f"waiting for node 0 at {where} ({problem})",
            f"node 0 did not answer at {where} within {config.timeout_s:.0f} s ({problem}): start it there with"
            " --node-rank 0, correct --rendezvous, open the port, or wait longer with --rendezvous-timeout",
        )
        time.sleep(_RETRY_INTERVAL_S)
    answer = read_first_message(connection, _HELLO_TIMEOUT_S)
    if answer is None or answer["kind"] not in ("welcome", "over"):
        raise MusterError(f"what listens at {where} is no launcher of Muster: give all nodes another --rendezvous")
    if answer["kind"] == "over":
        raise error_for_code(answer["code"], answer["reason"])
    connection.settimeout(None)
    group.connections[0] = node_0
    group.nodes[0] = NodeInfo(**answer["member"])
    node_0.start_reading()


def _is_answered(connection: socket.socket) -> bool:
    """Wait until node 0 says something; False where it ends first, or stands still."""
    if not select.select([connection], [], [], _HELLO_TIMEOUT_S)[0]:
        return False
    with contextlib.suppress(OSError):
        return bool(connection.recv(1, socket.MSG_PEEK))
    return False
