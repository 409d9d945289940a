"""The launchers of all nodes: node 0 listens, the others connect, and each notices when another is gone.

Node 0 is the hub: the others send messages to it alone. Free of torch, so that a wrong request is refused before torch
is loaded.
"""

import contextlib
import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from muster.launch.network import Interface, format_endpoint
from muster.launch.nodes.connection import LauncherConnection, Message, close_connections
from muster.launch.nodes.connectivity import ProbeListener, find_unreachable, nodes_to_reach
from muster.launch.nodes.rendezvous_config import RendezvousConfig
from muster.launch.rank_errors import EXIT_STOPPED
from muster.spec.errors import ConfigError, InfeasibleError, MusterError

SILENCE_TIMEOUT_S = 15.0
"""Silence after which a launcher is taken for gone: a machine that loses power or its network closes no connection."""
HEARTBEAT_INTERVAL_S = 1.0
SUSPENSION_S = 5.0
"""Pause of this launcher above which it can't tell how long the others were silent."""


@dataclass(frozen=True)
class NodeInfo:
    """One node as the others know it."""

    node: int
    host: str
    facts: dict[str, Any]
    """Facts that its launcher gives about itself; see `handshake.py`."""
    address: str
    """Address of the interface where its ranks meet the others'."""
    interface: str
    port: int
    """Port of its probe listener at that address."""

    def __str__(self) -> str:
        return f"node {self.node} on {self.host}"


class JobEnded(Exception):
    """End of the job before the ranks were started, as node 0 has declared it."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


class LauncherGroup:
    """One launcher's view of all launchers. Made by `rendezvous`."""

    def __init__(
        self, config: RendezvousConfig, local_node: NodeInfo, interface: Interface, probe_listener: ProbeListener
    ) -> None:
        self.config = config
        self.local_node = local_node
        self.interface = interface
        self.probe_listener = probe_listener
        self.node_rank = config.node_rank
        self.num_nodes = config.num_nodes
        self.nodes: dict[int, NodeInfo] = {local_node.node: local_node}
        self.connections: dict[int, LauncherConnection] = {}
        self.inbox: queue.SimpleQueue[tuple[int, Message]] = queue.SimpleQueue()
        self.address = ""
        """Node 0's address, at which its store listens."""
        self.clock_offset_s: dict[int, float] = {}
        """Offset of each other node's clock from this one's, positive when ahead; known to node 0 alone."""
        self._early: list[tuple[int, Message]] = []
        self._last_check = time.monotonic()
        self._closed = threading.Event()
        threading.Thread(target=self._send_heartbeats, daemon=True).start()

    @property
    def is_coordinator(self) -> bool:
        return self.node_rank == 0

    def send(self, kind: str, **content: Any) -> None:
        """Send a message: node 0 to all others, another node to node 0."""
        for connection in list(self.connections.values()):
            connection.send(kind, **content)

    def send_to(self, node: int, kind: str, **content: Any) -> None:
        """Send a message to one node; it is dropped where that is gone. Only node 0 calls it."""
        if connection := self.connections.get(node):
            connection.send(kind, **content)

    def receive(self, timeout_s: float = 0.0) -> list[tuple[int, Message]]:
        """Return the messages received since the last call, as (node, message); waits for the first one if `timeout_s`
        is given.

        The kind `gone` means that a node's launcher has closed its connection or is silent.
        """
        messages, self._early = self._early, []
        with contextlib.suppress(queue.Empty):
            if timeout_s and not messages:
                messages.append(self.inbox.get(timeout=timeout_s))
            while True:
                messages.append(self.inbox.get_nowait())
        return messages + [(node, {"kind": "gone", "silent_s": SILENCE_TIMEOUT_S}) for node in self._silent_nodes()]

    def put_back(self, messages: Sequence[tuple[int, Message]]) -> None:
        """Return these messages first from the next `receive`."""
        self._early += messages

    def wait_for(self, kind: str, timeout_s: float, nodes: Sequence[int] | None = None) -> dict[int, Message]:
        """Wait for a message of a kind from each of these nodes (None: from all that send to this one).

        Raises JobEnded when node 0 declares it, MusterError when a node is gone, has failed or is silent for too long.
        """
        found: dict[int, Message] = {}
        later: list[tuple[int, Message]] = []
        wanted = set(self.connections if nodes is None else nodes)
        deadline = time.monotonic() + timeout_s
        while wanted - set(found):
            if time.monotonic() > deadline:
                late = self.nodes[min(wanted - set(found))]
                raise MusterError(f"{late} did not get ready within {timeout_s:.0f} s")
            for node, message in self.receive(0.2):
                if message["kind"] == kind:
                    found[node] = message
                elif wanted - set(found):
                    self.raise_if_ended(node, message)
                    later.append((node, message))
                else:  # comes after the last awaited message, and may even say that its sender is gone
                    later.append((node, message))
        self.put_back(later)
        return found

    def measure_clocks(self, timeout_s: float = 10.0) -> None:
        """Measure `clock_offset_s` from a few messages to each node and back."""
        offsets: dict[int, list[tuple[float, float]]] = {node: [] for node in self.connections}
        for _ in range(5):
            self.send("clock", sent=time.time())
            for node, answer in self.wait_for("clock is", timeout_s).items():
                taken = answer["received"] - answer["sent"]
                offsets[node].append((taken, answer["time"] - answer["sent"] - taken / 2))
        self.clock_offset_s = {node: min(pairs)[1] for node, pairs in offsets.items()}

    def check_connectivity(self, timeout_s: float = 30.0, all_pairs: bool = False) -> list[str]:
        """Return a sentence for each pair of nodes that can't reach each other where their ranks will meet.

        All nodes call it, with the same `all_pairs`; node 0 gets the sentences of all. Without `all_pairs` a node tries
        `nodes_to_reach`, and learns of these alone.
        """
        if self.is_coordinator:
            for node in list(self.connections):
                self.send_to(node, "members", members=self.member_rows(node, all_pairs))
            rows = self.member_rows(self.node_rank, all_pairs)
        else:
            rows = self.wait_for("members", timeout_s)[0]["members"]
            self.nodes |= {row["node"]: NodeInfo(**row) for row in rows}
        others = {f"{self.nodes[row['node']]}": (row["node"], row["address"], row["port"]) for row in rows}
        problems = []
        for name, problem in find_unreachable(others, self.interface.address).items():
            problems.append(
                f"{self.local_node} (through {self.interface}) does not reach {name} at"
                f" {next(format_endpoint(*row[1:]) for key, row in others.items() if key == name)} ({problem}):"
                f" choose the"
                f" interface that joins them by --interface on both, and open the ports between them"
            )
        if not self.is_coordinator:
            self.send("reached", problems=problems)
            return problems
        return problems + [
            text for answer in self.wait_for("reached", timeout_s).values() for text in answer["problems"]
        ]

    def member_rows(self, node: int, all_pairs: bool = False) -> list[dict[str, Any]]:
        """Return what a node has to know of the others that it tries to reach, or of all others, on node 0."""
        there = {self.node_rank, node, *self.connections}
        wanted = sorted(there - {node}) if all_pairs else nodes_to_reach(node, there)
        return [vars(self.nodes[other]) | {"facts": {}} for other in wanted]

    def close(self) -> None:
        """Close the listener and all connections."""
        self._closed.set()
        self.probe_listener.close()
        close_connections(self.connections.values())

    def raise_if_ended(self, node: int, message: Message) -> None:
        """Raise when a message ends the job: JobEnded when node 0 declares it, MusterError when another node fails."""
        if message["kind"] == "over":
            raise JobEnded(message["code"], message["reason"])
        if message["kind"] == "failed":
            reason = message["reason"]
            if not reason.startswith("node "):
                reason = f"{self.nodes[node]}: {reason}"
            raise error_for_code(message["code"], reason)
        if message["kind"] == "gone":
            raise MusterError(f"{self.nodes[node]} is gone: {describe_disconnect(message)}")

    def _silent_nodes(self) -> list[int]:
        now = time.monotonic()
        paused = now - self._last_check
        self._last_check = now
        if paused > SUSPENSION_S:
            for connection in list(self.connections.values()):
                connection.last_received = min(now, connection.last_received + paused)
        return [
            node
            for node, connection in list(self.connections.items())
            if now - connection.last_received > SILENCE_TIMEOUT_S
        ]

    def _send_heartbeats(self) -> None:
        while not self._closed.wait(HEARTBEAT_INTERVAL_S):
            self.send("beat")


def describe_disconnect(message: Message) -> str:
    """Describe why a node is gone, from the message about it."""
    if silent_s := message.get("silent_s"):
        return f"its launcher has been silent for {silent_s:.0f} s, so its machine or the network between is down"
    return "the connection to its launcher closed without a word"


def error_for_code(code: int, sentence: str) -> MusterError:
    """Return the error that ends a process with an exit code."""
    return {2: ConfigError, 3: InfeasibleError, EXIT_STOPPED: _StoppedError}.get(code, MusterError)(sentence)


class _StoppedError(MusterError):
    """One of the launchers was asked to stop."""

    exit_code = EXIT_STOPPED
