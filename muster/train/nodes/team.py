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

from muster.parallel.network import Interface, place
from muster.spec.errors import ConfigError, InfeasibleError, MusterError
from muster.train.errors import STOPPED
from muster.train.nodes.line import Line, Message, close_all
from muster.train.nodes.reach import Doorstep, reach
from muster.train.nodes.request import NodesRequest

LOST_S = 15.0
"""Who says nothing for so long is taken for gone: machines that lose power or the network say no goodbye."""
BEAT_S = 1.0
PAUSE_S = 5.0
"""A launcher that was kept from running for longer can't tell how long the others were silent."""


@dataclass(frozen=True)
class Member:
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


class Over(Exception):
    """Node 0 says that the job is over, before the ranks were started."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code, self.reason = code, reason


class Team:
    """One launcher's view of all. Made by `meet`."""

    def __init__(self, request: NodesRequest, own: Member, interface: Interface, doorstep: Doorstep) -> None:
        self.request, self.own, self.interface, self.doorstep = request, own, interface, doorstep
        self.node, self.count = request.rank, request.count
        self.members: dict[int, Member] = {own.node: own}
        self.lines: dict[int, Line] = {}
        self.inbox: queue.SimpleQueue[tuple[int, Message]] = queue.SimpleQueue()
        self.address = ""
        """Node 0's, at which its store listens."""
        self.clock_off_s: dict[int, float] = {}
        """How far each other node's clock is ahead of this one's; known to node 0 alone."""
        self._early: list[tuple[int, Message]] = []
        self._looked = time.monotonic()
        self._closed = threading.Event()
        threading.Thread(target=self._beat, daemon=True).start()

    @property
    def is_hub(self) -> bool:
        return self.node == 0

    def tell(self, kind: str, **content: Any) -> None:
        """Node 0 tells all others, each other node 0."""
        for line in list(self.lines.values()):
            line.say(kind, **content)

    def receive(self, wait_s: float = 0.0) -> list[tuple[int, Message]]:
        """What has come since, as (node, message); waits so long for the first. `gone`: that node is."""
        found, self._early = self._early, []
        with contextlib.suppress(queue.Empty):
            if wait_s and not found:
                found.append(self.inbox.get(timeout=wait_s))
            while True:
                found.append(self.inbox.get_nowait())
        return found + [(node, {"kind": "gone", "silent_s": LOST_S}) for node in self._silent()]

    def keep(self, messages: Sequence[tuple[int, Message]]) -> None:
        """Lets the next `receive` begin with these."""
        self._early += messages

    def expect(self, kind: str, limit_s: float, nodes: Sequence[int] | None = None) -> dict[int, Message]:
        """Waits for a message of this kind from each of these nodes (None: from all that this one hears).

        Raises Over when node 0 says so, MusterError when one is gone, has failed or says nothing in time.
        """
        found: dict[int, Message] = {}
        later: list[tuple[int, Message]] = []
        wanted, limit = set(self.lines if nodes is None else nodes), time.monotonic() + limit_s
        while wanted - set(found):
            if time.monotonic() > limit:
                late = self.members[min(wanted - set(found))]
                raise MusterError(f"{late} did not get ready within {limit_s:.0f} s")
            for node, message in self.receive(0.2):
                if message["kind"] == kind:
                    found[node] = message
                elif wanted - set(found):
                    self.raise_if_over(node, message)
                    later.append((node, message))
                else:  # what comes after the last that was waited for, even that its sender is gone
                    later.append((node, message))
        self.keep(later)
        return found

    def measure_clocks(self, limit_s: float = 10.0) -> None:
        """Finds `clock_off_s`, from a few messages to each and back."""
        offsets: dict[int, list[tuple[float, float]]] = {node: [] for node in self.lines}
        for _ in range(5):
            self.tell("clock", sent=time.time())
            for node, answer in self.expect("clock is", limit_s).items():
                taken = answer["received"] - answer["sent"]
                offsets[node].append((taken, answer["time"] - answer["sent"] - taken / 2))
        self.clock_off_s = {node: min(pairs)[1] for node, pairs in offsets.items()}

    def unreached(self, limit_s: float = 30.0) -> list[str]:
        """Which nodes don't reach which, where their ranks will meet; all nodes call it, node 0 is told of all."""
        if self.is_hub:
            rows = [vars(member) | {"facts": {}} for member in self.members.values()]
            self.tell("members", members=rows)
        else:
            rows = self.expect("members", limit_s)[0]["members"]
            self.members |= {row["node"]: Member(**row) for row in rows if row["node"] != self.node}
        others = {f"{one}": (one.node, one.address, one.port) for one in self.members.values() if one is not self.own}
        problems = []
        for name, problem in reach(others, self.interface.address).items():
            problems.append(
                f"{self.own} (through {self.interface}) does not reach {name} at"
                f" {next(place(*row[1:]) for key, row in others.items() if key == name)} ({problem}): choose the"
                f" interface that joins them by --interface on both, and open the ports between them"
            )
        if not self.is_hub:
            self.tell("reached", problems=problems)
            return problems
        return problems + [text for answer in self.expect("reached", limit_s).values() for text in answer["problems"]]

    def close(self) -> None:
        """Ends what was begun."""
        self._closed.set()
        self.doorstep.close()
        close_all(self.lines.values())

    def raise_if_over(self, node: int, message: Message) -> None:
        """Raises where a message says that the job can't go on: Over by node 0's word, MusterError by another's."""
        if message["kind"] == "over":
            raise Over(message["code"], message["reason"])
        if message["kind"] == "failed":
            said = message["reason"]
            raise error_of(message["code"], said if said.startswith("node ") else f"{self.members[node]}: {said}")
        if message["kind"] == "gone":
            raise MusterError(f"{self.members[node]} is gone: {why_gone(message)}")

    def _silent(self) -> list[int]:
        now = time.monotonic()
        paused = now - self._looked
        self._looked = now
        if paused > PAUSE_S:
            for line in self.lines.values():
                line.heard = min(now, line.heard + paused)
        return [node for node, line in self.lines.items() if now - line.heard > LOST_S]

    def _beat(self) -> None:
        while not self._closed.wait(BEAT_S):
            self.tell("beat")


def why_gone(message: Message) -> str:
    """What is known of why a node is gone, from the message that it is."""
    if silent_s := message.get("silent_s"):
        return f"its launcher has said nothing for {silent_s:.0f} s, so its machine or the network between is down"
    return "the connection to its launcher closed without a word"


def error_of(code: int, sentence: str) -> MusterError:
    """The error that ends a process with this code."""
    return {2: ConfigError, 3: InfeasibleError, STOPPED: _Stopped}.get(code, MusterError)(sentence)


class _Stopped(MusterError):
    """Somebody asked one of the launchers to stop."""

    exit_code = STOPPED
