"""Simulated step of a swarm: the passes of its Program on peers, wired as the trainer wires them."""

import heapq
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from random import Random

from muster.schedule.swarm.step_passes import Pass, StepPasses
from muster.schedule.swarm.wiring import Method, StageWiring

MEASURING_STEPS = 3
"""Steps after which the wiring knows its peers."""
ANSWER_BYTES = 200
"""Bytes of a message beside what it carries: its fields as JSON, and checksums."""


@dataclass(frozen=True)
class SimulatedPeer:
    """A peer: what a pass of its stage takes, and its line to the trainer."""

    name: str
    stage: int
    forward_s: float
    backward_s: float
    bytes_per_s: float = inf
    """Rate of its line, each way."""
    latency_s: float = 0.0
    uses_trainer_line: bool = False
    """True where its messages leave the trainer's machine."""

    def pass_s(self, kind: str) -> float:
        """Return the seconds of a forward or a backward."""
        return self.forward_s if kind == "F" else self.backward_s

    @property
    def micro_batch_s(self) -> float:
        """Seconds of a micro-batch, forward and backward, without its way."""
        return self.forward_s + self.backward_s


@dataclass
class SwarmPasses:
    """Result of the passes of a step."""

    stage_s: dict[int, float] = field(default_factory=dict)
    """Time at which the gradients of all micro-batches of a stage count."""
    done: dict[str, Counter[str]] = field(default_factory=dict)
    """Passes of each peer by kind."""
    most_kept: Counter[str] = field(default_factory=Counter)
    """Most micro-batches of whose forward a peer kept activations at once."""
    peer_bytes: Counter[str] = field(default_factory=Counter)
    """Bytes that passed a peer's line to the trainer, both ways together."""
    trainer_bytes: Counter[str] = field(default_factory=Counter)
    """Bytes that passed the trainer's line: out, in."""


def stage_rate(peers: Sequence[SimulatedPeer]) -> float:
    """Return the micro-batches a second that the peers of a stage do together without ever waiting: Σ 1 / (forward +
    backward). The slowest stage bounds a step."""
    return sum(1 / max(peer.micro_batch_s, 1e-12) for peer in peers)


class SwarmSimulator:
    """Steps in logical time: a pass goes to the peer that the trainer's wiring chooses, waits there for those before it
    in the Program's order, and its answer opens others and is measured (`StepPasses`, `StageWiring`: those of the
    trainer)."""

    def __init__(
        self,
        order: Mapping[Pass, int],
        peers: Sequence[SimulatedPeer],
        carried: Mapping[tuple[str, int], tuple[int, int]],
        in_flight: int | None = None,
        method: Method = "throughput",
        seed: int = 0,
    ) -> None:
        """`carried`: bytes to a peer and back of a pass, by kind and stage. `in_flight`: micro-batches under way at
        once; None: four times the peers."""
        self.peers = {peer.name: peer for peer in peers}
        self.carried = carried
        self._order, self._in_flight = order, in_flight or 4 * len(peers)
        self.wirings = {n: StageWiring(method, Random(seed + n)) for n in {peer.stage for peer in peers}}
        for peer in peers:
            self.wirings[peer.stage].add(peer.name)
        self._line_rate = max((peer.bytes_per_s for peer in peers if peer.uses_trainer_line), default=inf)
        self._free_s: dict[tuple[str, str], float] = {}
        """Time from which a line, of a peer or of the trainer (""), is free, by direction."""
        self._events: list[tuple[float, int, str, str, Pass]] = []
        self._numbers = itertools.count()

    def run(self) -> SwarmPasses:
        """Return what becomes of a step's passes, of which the wiring knows what was measured in the steps before."""
        self.passes = StepPasses(self._order, self._in_flight)
        self.found = SwarmPasses(done={name: Counter() for name in self.peers})
        self._free_s.clear()
        self._waiting: dict[str, list[tuple[int, Pass]]] = {name: [] for name in self.peers}
        self._busy: set[str] = set()
        self._kept: Counter[str] = Counter()
        self._sent_s: dict[Pass, float] = {}
        self._answered_s = dict.fromkeys(self.peers, 0.0)
        for wiring in self.wirings.values():
            wiring.begin_step()
        self._dispatch(0.0)
        while self._events:
            now_s, _, what, name, one = heapq.heappop(self._events)
            if what == "arrived":
                heapq.heappush(self._waiting[name], (self.passes.order[one], one))
                self._begin(now_s, name)
            elif what == "computed":
                self._answer(now_s, name, one)
            elif what == "sent":
                self._busy.discard(name)
                self._begin(now_s, name)
            else:
                self._take(now_s, name, one)
        return self.found

    def _push(self, at_s: float, what: str, name: str, one: Pass) -> None:
        heapq.heappush(self._events, (at_s, next(self._numbers), what, name, one))

    def _dispatch(self, now_s: float) -> None:
        for stage, wiring in self.wirings.items():
            names = [name for name, peer in self.peers.items() if peer.stage == stage]
            for one in self.passes.ready(stage):
                keeper = self.passes.kept.get(one.unit) if one.kind == "B" else None
                name = wiring.choose(names) if keeper is None else keeper
                self._sent_s[one] = now_s
                _, arrives_s = self._carry(now_s, name, self.carried[one.kind, stage][0], "out")
                self._push(arrives_s, "arrived", name, one)

    def _carry(self, now_s: float, name: str, num_bytes: int, way: str) -> tuple[float, float]:
        """Return when a message has left its sender, and when it arrives."""
        peer, num_bytes = self.peers[name], num_bytes + ANSWER_BYTES
        self.found.peer_bytes[name] += num_bytes
        sent_s = max(now_s, self._free_s.get((name, way), 0.0)) + num_bytes / peer.bytes_per_s
        if peer.uses_trainer_line:
            self.found.trainer_bytes[way] += num_bytes
            shared_s = max(now_s, self._free_s.get(("", way), 0.0)) + num_bytes / self._line_rate
            self._free_s["", way] = shared_s
            sent_s = max(sent_s, shared_s)
        self._free_s[name, way] = sent_s
        return sent_s, sent_s + peer.latency_s

    def _begin(self, now_s: float, name: str) -> None:
        if name in self._busy or not self._waiting[name]:
            return
        _, one = heapq.heappop(self._waiting[name])
        self._busy.add(name)
        self._push(now_s + self.peers[name].pass_s(one.kind), "computed", name, one)

    def _answer(self, now_s: float, name: str, one: Pass) -> None:
        self.found.done[name][one.kind] += 1
        self._kept[name] += 1 if one.kind == "F" else -1
        self.found.most_kept[name] = max(self.found.most_kept[name], self._kept[name])
        sent_s, arrives_s = self._carry(now_s, name, self.carried[one.kind, one.stage][1], "in")
        self._push(sent_s, "sent", name, one)
        self._push(arrives_s, "answered", name, one)

    def _take(self, now_s: float, name: str, one: Pass) -> None:
        start_s = max(self._sent_s[one], self._answered_s[name])
        self.wirings[one.stage].times[name].measure(one.kind, now_s - start_s)
        self._answered_s[name] = now_s
        if one.kind == "F":
            self.passes.answer_forward(one, name, b"")
        else:
            self.passes.answer_backward(one, name, b"", [])
            if one.stage not in self.found.stage_s and self.passes.ledger.is_complete(one.stage):
                self.found.stage_s[one.stage] = now_s
        self._dispatch(now_s)


def settled_step(simulator: SwarmSimulator) -> SwarmPasses:
    """Return what becomes of the passes of a step once the wiring has measured its peers."""
    for _ in range(MEASURING_STEPS):
        simulator.run()
    return simulator.run()
