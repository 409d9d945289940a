"""The trainer's side of a swarm: it sends micro-batches through one peer of each stage, lets the peers of a stage sum
their gradients, and decides when all of them update."""

import random
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Protocol

from muster.launch.peers.channel import Message
from muster.launch.peers.client import Stopped
from muster.launch.swarm.connections import Peer, PeerConnections
from muster.launch.swarm.settings import SwarmSettings
from muster.schedule.swarm.step_passes import Pass, StepPasses
from muster.schedule.swarm.wiring import StageWiring, choose_move, stage_for
from muster.spec.errors import MusterError

MAX_LINK_FAILURES = 2
"""Failures of a link in a step after which the peer at its end is taken for lost."""
_CHECKS_IN_TIMEOUT = 4


class StateSource(Protocol):
    """The trainer's own copy of all stages, for peers of a stage that no peer has the state of."""

    @property
    def step(self) -> int:
        """Step after which it is the state."""
        ...

    def snapshot(self, stage: int) -> bytes:
        """Return the state of a stage."""
        ...


class StepData(Protocol):
    """Data of a step."""

    def inputs(self, stage: int, micro_batch: int) -> bytes:
        """Return what a pass needs beside hidden states: tokens, labels, bounds of documents."""
        ...


@dataclass
class RingSum:
    """Sum of one stage's gradients over its peers, under way."""

    generation: int
    members: tuple[str, ...]
    prepared: dict[str, tuple[str, float]] = field(default_factory=dict)
    """Hash of the sum and its sum of squares, by peer that has it."""


@dataclass(frozen=True)
class PassTime:
    """One pass on a peer, with its times in seconds of the trainer's clock."""

    peer: int
    done: Pass
    start_s: float
    end_s: float


@dataclass(frozen=True)
class StepSums:
    """Result of a step's passes over all stages, before the update."""

    losses: list[float]
    squared_norm: float
    times: list[PassTime]


class SwarmDriver:
    """Server of the peers of one run. All methods are for one thread; those that wait raise Stopped where `is_stopping`
    says so while a stage has no peer, and MusterError where the state of a stage is lost."""

    def __init__(
        self,
        listener: socket.socket,
        secret: bytes,
        settings: SwarmSettings,
        welcome: Message,
        source: StateSource,
        log: Callable[[str], None] = print,
        is_stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        """`welcome`: what a peer has to know of the run."""
        self.settings, self.source = settings, source
        self.step = source.step
        """Step after which all peers that are ready have the state."""
        self.peers: dict[str, Peer] = {}
        self.wirings = {
            stage: StageWiring(settings.wiring, random.Random(settings.seed + stage))
            for stage in range(settings.num_stages)
        }
        self.rows: list[Message] = []
        """Rows of what each peer did, one a step, since they were last read."""
        self._log, self._is_stopping = log, is_stopping
        self._passes: StepPasses | None = None
        self._data: StepData | None = None
        self._rings: dict[int, RingSum] = {}
        self._sums: dict[int, RingSum] = {}
        """Sums that all peers of a stage have."""
        self._link_failures: Counter[str] = Counter()
        self._generation = int(time.time() * 1000)
        self._digests: dict[int, str | None] = {}
        """Hash of each stage's state after the present step; None while a peer computes it."""
        self._answers: dict[str, tuple[Message, list[bytes]]] = {}
        self._times: list[PassTime] = []
        self._queue_s: dict[int, float] = dict.fromkeys(self.wirings, 0.0)
        """Passes that wait or run on each stage, times seconds, in this step."""
        self._last_s = time.monotonic()
        self._next_check_s = 0.0
        own = listener, secret, welcome, settings.beat_s, settings.silence_s, log
        self._connections = PeerConnections(*own)
        self._tell = self._connections.tell

    def close(self, is_over: bool) -> None:
        """Leave the peers; `is_over`: they are to end, and otherwise look for a trainer again."""
        self._connections.stop_accepting()
        for peer in self.peers.values() if is_over else ():
            self._tell(peer, {"do": "finish"})
        deadline = time.monotonic() + self.settings.silence_s
        while is_over and self.peers and time.monotonic() < deadline:
            self._take_events()
        self._connections.close()

    # ------------------------------------------------------------------------------------------------------------------
    # A step

    def join(self) -> None:
        """Wait until each stage has a peer with its state."""
        while not all(self._ready(stage) for stage in self.wirings):
            self._admit()
            self._take_events()

    def run_step(self, order: Mapping[Pass, int], data: StepData) -> StepSums:
        """Run the passes of a step and sum its gradients; all peers of a stage then have the same sum."""
        count = self.settings.in_flight or 4 * max(1, len(self.peers))
        self._passes, self._data, self._times = StepPasses(order, count), data, []
        self._queue_s = dict.fromkeys(self.wirings, 0.0)
        self._last_s = time.monotonic()
        for wiring in self.wirings.values():
            wiring.begin_step()
        for peer in self.peers.values():
            peer.sent, peer.accepted, peer.done = {}, [], Counter()
        while len(self._sums) < self.settings.num_stages:
            self._admit()
            self._dispatch()
            self._start_rings()
            if len(self._sums) < self.settings.num_stages:
                self._take_events()
        squares = sum(next(iter(ring.prepared.values()))[1] for ring in self._sums.values())
        return StepSums(self._passes.total_losses, squares, self._times)

    def commit(self, update: Message) -> None:
        """Let all peers update from the sums, and begin the next step; `update` says how."""
        passes = self._passes
        assert passes is not None
        self.step += 1
        members = set()
        for ring in self._sums.values():
            for name in ring.members:
                if (peer := self.peers.get(name)) is not None:
                    members.add(name)
                    self._tell(peer, update | {"do": "commit", "generation": ring.generation, "step": self.step})
        self.rows.append(
            {
                "step": self.step,
                "retried": passes.retried,
                "peers": [
                    {"name": peer.name, "stage": peer.stage, "forwards": peer.done["F"], "backwards": peer.done["B"]}
                    | {"counted": len(passes.ledger.micro_batches(peer.name, peer.stage or 0))}
                    for peer in self.peers.values()
                    if peer.done
                ],
            }
        )
        for name, peer in self.peers.items():
            if name not in members:
                self._set_new(peer)
        self._passes, self._data = None, None
        self._rings, self._sums, self._digests = {}, {}, {}
        self._link_failures.clear()
        if self.settings.rebalance_every and self.step % self.settings.rebalance_every == 0:
            self._rebalance()

    def _rebalance(self) -> None:
        """Let a peer of the stage with the shortest queue serve the one with the longest, where that pays."""

        def is_movable(name: str) -> bool:
            since = self.step - self.peers[name].moved_step
            return self.peers[name].moved_step < 0 or since > self.settings.rebalance_every

        move = choose_move(self.wirings, self._queue_s, is_movable)
        if move is None or any(peer.phase != "ready" for peer in self.peers.values()):
            return
        name, stage = move
        peer = self.peers[name]
        self._log(f"after step {self.step}, {name} moves from stage {peer.stage} to {stage}, whose queue is longest")
        self._set_new(peer)
        peer.moved_step, peer.stage = self.step, None
        self._give_stage(peer, stage)

    def _set_new(self, peer: Peer) -> None:
        """Take note that a peer has no state of the present step."""
        if peer.stage is not None:
            self.wirings[peer.stage].remove(peer.name)
        peer.phase = "new"

    # ------------------------------------------------------------------------------------------------------------------
    # Peers of a stage

    def _of_stage(self, stage: int) -> list[Peer]:
        return [peer for peer in self.peers.values() if peer.stage == stage]

    def _ready(self, stage: int) -> list[Peer]:
        return [peer for peer in self._of_stage(stage) if peer.phase == "ready"]

    def _admit(self) -> None:
        """Give peers without a stage one, and those without the present state a source of it."""
        for peer in self.peers.values():
            if peer.stage is None:
                counts = {stage: len(self._of_stage(stage)) for stage in self.wirings}
                self._give_stage(peer, stage_for(counts, {n: wiring.rate for n, wiring in self.wirings.items()}))
        for stage in self.wirings:
            self._require_state(stage)
            for peer in self._of_stage(stage):
                # After the sum of its stage has begun, a peer would miss the step's update.
                if peer.phase == "new" and stage not in self._rings and stage not in self._sums:
                    self._load(peer, stage)

    def _give_stage(self, peer: Peer, stage: int) -> None:
        peer.stage = stage
        self._tell(peer, {"do": "serve", "stage": stage})

    def _require_state(self, stage: int) -> None:
        if any(peer.phase != "new" for peer in self._of_stage(stage)):
            return
        if self.source.step == self.step:
            if self._is_stopping():
                raise Stopped
            return
        raise MusterError(
            f"stage {stage} has lost all of its peers after step {self.step}, and with them its state: the same command"
            f" goes on from the checkpoint of step {self.source.step} (train.save_every, train.restarts)"
        )

    def _load(self, peer: Peer, stage: int) -> None:
        """Tell a peer where the state of its stage is; what another peer has to hash first is asked for."""
        sources = self._ready(stage)
        if not sources:
            if self.source.step == self.step:  # otherwise another peer is loading, from which this one can
                self._order_load(peer, {}, [self.source.snapshot(stage)])
        elif stage not in self._digests:
            self._digests[stage] = None
            self._tell(random.choice(sources), {"do": "digest"})
        elif (digest := self._digests[stage]) is not None:
            self._order_load(peer, {"digest": digest, "address": random.choice(sources).address})

    def _order_load(self, peer: Peer, place: Message, contents: Sequence[bytes] = ()) -> None:
        peer.num_loads += 1
        self._tell(peer, place | {"do": "load", "number": peer.num_loads}, contents)
        peer.phase = "loading"

    # ------------------------------------------------------------------------------------------------------------------
    # Passes

    def _dispatch(self) -> None:
        """Send what is ready to peers of its stage."""
        assert self._passes is not None
        for stage, wiring in self.wirings.items():
            names = [peer.name for peer in self._ready(stage)]
            for one in self._passes.ready(stage) if names else ():
                keeper = self._passes.kept.get(one.unit) if one.kind == "B" else None
                usable = [name for name in names if name not in self._passes.avoided[one.unit]] or names
                has_kept = keeper in usable
                name = keeper if keeper is not None and has_kept else wiring.choose(usable)
                self._send_pass(self.peers[name], one, has_kept)

    def _send_pass(self, peer: Peer, one: Pass, has_kept: bool) -> None:
        passes, data = self._passes, self._data
        assert passes is not None
        assert data is not None
        contents = []
        if not has_kept:
            contents = [data.inputs(one.stage, one.micro_batch), passes.hidden.get(one.unit, b"")]
        if one.kind == "B":
            contents.append(passes.gradients.get(one.unit, b""))
        fields = {"do": one.kind, "stage": one.stage, "micro_batch": one.micro_batch, "order": passes.order[one]}
        fields |= {"step": self.step, "has_kept": has_kept, "accepted": peer.accepted}
        peer.accepted = []
        peer.sent[one] = time.monotonic()
        self._tell(peer, fields, contents)

    def _answer(self, peer: Peer, message: Message, contents: list[bytes], now_s: float) -> None:
        """Take the answer to a pass."""
        passes = self._passes
        one = Pass(message["done"], int(message["stage"]), int(message["micro_batch"]))
        if passes is None or message["step"] != self.step or peer.stage != one.stage:
            return
        sent_s = peer.sent.pop(one, None)
        if sent_s is not None:
            start_s = max(sent_s, peer.last_answer_s)
            self._times.append(PassTime(peer.number, one, start_s, now_s))
            if one.stage in self.wirings and peer.name in self.wirings[one.stage].times:
                self.wirings[one.stage].times[peer.name].measure(one.kind, now_s - start_s)
        peer.last_answer_s = now_s
        peer.done[one.kind] += 1
        if one.kind == "F":
            passes.answer_forward(one, peer.name, contents[0])
        elif passes.answer_backward(one, peer.name, contents[0], message["losses"]):
            peer.accepted.append(one.micro_batch)

    def _repeat_late(self) -> None:
        """Send passes to other peers whose answers haven't come in time."""
        passes, now_s = self._passes, time.monotonic()
        if passes is None or now_s < self._next_check_s:
            return
        self._next_check_s = now_s + self.settings.timeout_s / _CHECKS_IN_TIMEOUT
        for peer in list(self.peers.values()):
            for one, sent_s in list(peer.sent.items()):
                if now_s - max(sent_s, peer.last_answer_s) > self.settings.timeout_s:
                    del peer.sent[one]
                    passes.avoided[one.unit].add(peer.name)
                    if passes.kept.get(one.unit) == peer.name:
                        del passes.kept[one.unit]
                    if one.unit not in passes.ledger.holders:
                        self._log(f"{peer.name} has not answered {one.kind} of micro-batch {one.micro_batch} in time")
                        passes.repeat(one)

    # ------------------------------------------------------------------------------------------------------------------
    # Sums

    def _start_rings(self) -> None:
        """Let the peers of each stage sum their gradients once all micro-batches of the stage count."""
        assert self._passes is not None
        for stage in self.wirings:
            members = self._ready(stage)
            is_begun = stage in self._rings or stage in self._sums
            if (
                is_begun
                or not self._passes.ledger.is_complete(stage)
                or len(members) < len([peer for peer in self._of_stage(stage) if peer.phase != "new"])
            ):
                continue
            self._generation += 1
            names = tuple(sorted(peer.name for peer in members))
            self._rings[stage] = RingSum(self._generation, names)
            order = {"do": "reduce", "step": self.step, "generation": self._generation, "ring": names}
            order["addresses"] = {peer.name: peer.address for peer in members}
            for peer in members:
                peer.accepted = []
                own = self._passes.ledger.micro_batches(peer.name, stage)
                self._tell(peer, order | {"micro_batches": own})

    def _abort(self, stage: int) -> None:
        if (ring := self._rings.pop(stage, None)) is None:
            return
        for name in ring.members:
            if (peer := self.peers.get(name)) is not None:
                self._tell(peer, {"do": "abort", "generation": ring.generation})

    def _take_sum(self, peer: Peer, message: Message) -> None:
        """Take what a peer says of a sum."""
        ring = self._rings.get(peer.stage) if peer.stage is not None else None
        if ring is None or message["generation"] != ring.generation or self._passes is None:
            return
        stage = peer.stage
        assert stage is not None
        if message["sum"] == "prepared":
            ring.prepared[peer.name] = message["digest"], float(message["squares"])
            if len(ring.prepared) == len(ring.members):
                del self._rings[stage]
                if len({digest for digest, _ in ring.prepared.values()}) == 1:
                    self._sums[stage] = ring
                else:
                    self._log(f"the sums of stage {stage} differ between its peers: they are computed again")
            return
        self._abort(stage)
        if message["sum"] == "missing":
            self._passes.forget((stage, micro_batch) for micro_batch in message["micro_batches"])
        elif (suspect := message["suspect"]) in self.peers:
            self._link_failures[suspect] += 1
            if self._link_failures[suspect] > MAX_LINK_FAILURES:
                self._log(f"no other peer of stage {stage} reaches {suspect}: it is left out")
                self.peers[suspect].packets.close()

    # ------------------------------------------------------------------------------------------------------------------
    # Events

    def _take_events(self, wait_s: float = 0.1) -> None:
        """Wait for something to happen, and take note of all that has."""
        events = self._connections.events(wait_s)
        self._add_queues()
        for what, peer, message, contents, at_s in events:
            if what == "joined":
                if (former := self.peers.get(peer.name)) is not None:
                    self._lose(former)
                self.peers[peer.name] = peer
                self._log(f"{peer.name} has joined the swarm ({len(self.peers)} in all)")
            elif self.peers.get(peer.name) is not peer:
                continue
            elif what == "lost":
                self._lose(peer)
            else:
                self._hear(peer, message, contents, at_s)
        self._repeat_late()

    def _add_queues(self) -> None:
        now_s = time.monotonic()
        passes = self._passes
        for stage in self.wirings:
            if passes is None:
                break
            waiting = sum(len(peer.sent) for peer in self._of_stage(stage)) + passes.num_ready(stage)
            self._queue_s[stage] += waiting * (now_s - self._last_s)
        self._last_s = now_s

    def _lose(self, peer: Peer) -> None:
        """Do without a peer that is gone."""
        del self.peers[peer.name]
        self._log(f"{peer.name} is gone ({len(self.peers)} in all)")
        self._set_new(peer)
        stage = peer.stage
        if stage is None:
            return
        self._digests.pop(stage, None)
        if self._passes is not None:
            ring = self._rings.get(stage)
            if ring is not None and peer.name in ring.members:
                self._abort(stage)
            ring = self._sums.get(stage)
            self._passes.lose(peer.name, peer.sent, is_summed=ring is not None)
            if ring is not None and not any(name in self.peers for name in ring.members):
                del self._sums[stage]  # nobody has it any more
                self._passes.forget((stage, one) for one in range(self._passes.num_micro_batches))

    def _hear(self, peer: Peer, message: Message, contents: list[bytes], now_s: float) -> None:
        if "done" in message:
            self._answer(peer, message, contents, now_s)
        elif "sum" in message:
            self._take_sum(peer, message)
        elif "loaded" in message:
            if peer.phase == "loading" and message["number"] == peer.num_loads:
                peer.phase = "ready" if message["loaded"] == self.step else "new"
                if peer.phase == "ready" and peer.stage is not None:
                    self.wirings[peer.stage].add(peer.name)
                    self._log(f"{peer.name} serves stage {peer.stage} from step {self.step + 1} on")
        elif "digest" in message:
            if message["step"] == self.step and peer.stage is not None:
                self._digests[peer.stage] = message["digest"]
            self._answers[peer.name] = message, contents
        elif "state" in message:
            self._answers[peer.name] = message, contents
        elif "problem" in message:
            self._log(f"{peer.name}: {message['problem']}")

    # ------------------------------------------------------------------------------------------------------------------
    # State

    def pull(self) -> dict[int, bytes]:
        """Return the state of each stage, between steps. Peers whose state differs from that of most take over
        theirs."""
        found = {}
        for stage in self.wirings:
            while not (digests := self._ask(stage, "digest")):
                self._require_state(stage)
            counts = Counter(message["digest"] for message, _ in digests.values())
            (usual, _), *others = counts.most_common()
            if others:
                self._log(f"states of stage {stage} differ after step {self.step}: the fewest take over the others'")
            for name, (message, _) in digests.items():
                if message["digest"] != usual and name in self.peers:
                    self._set_new(self.peers[name])
            self._digests[stage] = usual
            while stage not in found:
                self._require_state(stage)
                answers = self._ask(stage, "state", one=True)
                content = next((contents[0] for _, contents in answers.values()), b"")
                if sha256(content).hexdigest() == usual:
                    found[stage] = content
        return found

    def _ask(self, stage: int, what: str, one: bool = False) -> dict[str, tuple[Message, list[bytes]]]:
        """Return what the peers of a stage, or `one`, answer; those that are lost meanwhile are left out."""
        self._answers = {}
        asked = self._ready(stage)[: 1 if one else None]
        for peer in asked:
            self._tell(peer, {"do": what})
        while any(self.peers.get(peer.name) is peer and peer.name not in self._answers for peer in asked):
            self._take_events()
        return self._answers
