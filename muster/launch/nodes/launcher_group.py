"""The launchers of all nodes: node 0 listens, the others come, and from then on each hears when another is gone.

Node 0 is the hub: the others talk to it alone. Free of torch, so that a wrong request is told before that is loaded.
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
from muster.launch.nodes.connectivity import ProbeListener, find_unreachable
from muster.launch.nodes.rendezvous_config import RendezvousConfig
from muster.launch.rank_errors import EXIT_STOPPED
from muster.spec.errors import ConfigError, InfeasibleError, MusterError

SILENCE_TIMEOUT_S = 15.0
"""Who says nothing for so long is taken for gone: machines that lose power or the network say no goodbye."""
HEARTBEAT_INTERVAL_S = 1.0
SUSPENSION_S = 5.0
"""A launcher that was kept from running for longer can't tell how long the others were silent."""


@dataclass(frozen=True)
class NodeInfo:
    """A node as the others know it."""

    node: int
    host: str
    facts: dict[str, Any]
    """What its launcher says of itself; see `agree.py`."""
    address: str
    """Of the interface through which its ranks meet the others'."""
    interface: str
    port: int
    """At that address, where its doorstep is."""

    def __str__(self) -> str:
        return f"node {self.node} on {self.host}"


class JobEnded(Exception):
    """Node 0 says that the job is over, before the ranks were started."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code, self.reason = code, reason


class LauncherGroup:
    """One launcher's view of all. Made by `meet`."""

    def __init__(
        self, config: RendezvousConfig, local_node: NodeInfo, interface: Interface, probe_listener: ProbeListener
    ) -> None:
        self.config, self.local_node, self.interface, self.probe_listener = (
            config,
            local_node,
            interface,
            probe_listener,
        )
        self.node_rank, self.num_nodes = config.node_rank, config.num_nodes
        self.nodes: dict[int, NodeInfo] = {local_node.node: local_node}
        self.connections: dict[int, LauncherConnection] = {}
        self.inbox: queue.SimpleQueue[tuple[int, Message]] = queue.SimpleQueue()
        self.address = ""
        """Node 0's, at which its store listens."""
        self.clock_offset_s: dict[int, float] = {}
        """How far each other node's clock is ahead of this one's; known to node 0 alone."""
        self._early: list[tuple[int, Message]] = []
        self._looked = time.monotonic()
        self._closed = threading.Event()
        threading.Thread(target=self._send_heartbeats, daemon=True).start()

    @property
    def is_coordinator(self) -> bool:
        return self.node_rank == 0

    def send(self, kind: str, **content: Any) -> None:
        """Node 0 tells all others, each other node 0."""
        for line in list(self.connections.values()):
            line.send(kind, **content)

    def receive(self, timeout_s: float = 0.0) -> list[tuple[int, Message]]:
        """What has come since, as (node, message); waits so long for the first. `gone`: that node is."""
        found, self._early = self._early, []
        with contextlib.suppress(queue.Empty):
            if timeout_s and not found:
                found.append(self.inbox.get(timeout=timeout_s))
            while True:
                found.append(self.inbox.get_nowait())
        return found + [(node, {"kind": "gone", "silent_s": SILENCE_TIMEOUT_S}) for node in self._silent_nodes()]

    def put_back(self, messages: Sequence[tuple[int, Message]]) -> None:
        """Lets the next `receive` begin with these."""
        self._early += messages

    def wait_for(self, kind: str, timeout_s: float, nodes: Sequence[int] | None = None) -> dict[int, Message]:
        """Waits for a message of this kind from each of these nodes (None: from all that this one hears).

        Raises Over when node 0 says so, MusterError when one is gone, has failed or says nothing in time.
        """
        found: dict[int, Message] = {}
        later: list[tuple[int, Message]] = []
        wanted, limit = set(self.connections if nodes is None else nodes), time.monotonic() + timeout_s
        while wanted - set(found):
            if time.monotonic() > limit:
                late = self.nodes[min(wanted - set(found))]
                raise MusterError(f"{late} did not get ready within {timeout_s:.0f} s")
            for node, message in self.receive(0.2):
                if message["kind"] == kind:
                    found[node] = message
                elif wanted - set(found):
                    self.raise_if_ended(node, message)
                    later.append((node, message))
                else:  # what comes after the last that was waited for, even that its sender is gone
                    later.append((node, message))
        self.put_back(later)
        return found

    def measure_clocks(self, timeout_s: float = 10.0) -> None:
        """Finds `clock_off_s`, from a few messages to each and back."""
        offsets: dict[int, list[tuple[float, float]]] = {node: [] for node in self.connections}
        for _ in range(5):
            self.send("clock", sent=time.time())
            for node, answer in self.wait_for("clock is", timeout_s).items():
                taken = answer["received"] - answer["sent"]
                offsets[node].append((taken, answer["time"] - answer["sent"] - taken / 2))
        self.clock_offset_s = {node: min(pairs)[1] for node, pairs in offsets.items()}

    def check_connectivity(self, timeout_s: float = 30.0) -> list[str]:
        """Which nodes don't reach which, where their ranks will meet; all nodes call it, node 0 is told of all."""
        if self.is_coordinator:
            rows = [vars(member) | {"facts": {}} for member in self.nodes.values()]
            self.send("members", members=rows)
        else:
            rows = self.wait_for("members", timeout_s)[0]["members"]
            self.nodes |= {row["node"]: NodeInfo(**row) for row in rows if row["node"] != self.node_rank}
        others = {
            f"{one}": (one.node, one.address, one.port) for one in self.nodes.values() if one is not self.local_node
        }
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

    def close(self) -> None:
        """Ends what was begun."""
        self._closed.set()
        self.probe_listener.close()
        close_connections(self.connections.values())

    def raise_if_ended(self, node: int, message: Message) -> None:
        """Raises where a message says that the job can't go on: Over by node 0's word, MusterError by another's."""
        if message["kind"] == "over":
            raise JobEnded(message["code"], message["reason"])
        if message["kind"] == "failed":
            said = message["reason"]
            raise error_for_code(message["code"], said if said.startswith("node ") else f"{self.nodes[node]}: {said}")
        if message["kind"] == "gone":
            raise MusterError(f"{self.nodes[node]} is gone: {describe_disconnect(message)}")

    def _silent_nodes(self) -> list[int]:
        now = time.monotonic()
        paused = now - self._looked
        self._looked = now
        if paused > SUSPENSION_S:
            for line in self.connections.values():
                line.last_received = min(now, line.last_received + paused)
        return [node for node, line in self.connections.items() if now - line.last_received > SILENCE_TIMEOUT_S]

    def _send_heartbeats(self) -> None:
        while not self._closed.wait(HEARTBEAT_INTERVAL_S):
            self.send("beat")


def describe_disconnect(message: Message) -> str:
    """What is known of why a node is gone, from the message that it is."""
    if silent_s := message.get("silent_s"):
        return f"its launcher has said nothing for {silent_s:.0f} s, so its machine or the network between is down"
    return "the connection to its launcher closed without a word"


def error_for_code(code: int, sentence: str) -> MusterError:
    """The error that ends a process with this code."""
    return {2: ConfigError, 3: InfeasibleError, EXIT_STOPPED: _StoppedError}.get(code, MusterError)(sentence)


class _StoppedError(MusterError):
    """Somebody asked one of the launchers to stop."""

    exit_code = EXIT_STOPPED
