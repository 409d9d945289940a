"""Passes of one step on their way through the stages: what may run, what was answered, what has to run again."""

import heapq
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from muster.schedule.action import Kind
from muster.schedule.program import Program
from muster.schedule.swarm.ledger import Ledger, Unit

PassKind = Literal["F", "B"]


class Pass(NamedTuple):
    """Forward or backward of one micro-batch on one stage."""

    kind: PassKind
    stage: int
    micro_batch: int

    @property
    def unit(self) -> Unit:
        """Its stage and micro-batch."""
        return self.stage, self.micro_batch


def pass_order(program: Program) -> dict[Pass, int]:
    """Return the passes of a Program with their places: those of a stage in its order, and those of all stages by it.
    Its sends and receives are what the trainer carries; sums and updates follow all passes."""
    found = {}
    for lanes in program.ranks:
        for place, item in enumerate(lanes["compute"]):
            kind, stage, micro_batch = item.action[:3]
            if kind in (Kind.F, Kind.B):
                found[Pass("F" if kind == Kind.F else "B", stage, micro_batch)] = place
    return found


@dataclass
class StepPasses:
    """The passes of a step's Program, as they become ready. What enters a stage and the gradients of what leaves it are
    kept to the end of the step, so that any peer can compute a lost gradient anew, from them alone.

    `order` has the place of each pass in the Program, by which ready ones are sent.
    """

    order: Mapping[Pass, int]
    in_flight: int
    """Micro-batches that may be under way at once."""
    num_stages: int = field(init=False)
    num_micro_batches: int = field(init=False)
    ledger: Ledger = field(init=False)
    hidden: dict[Unit, bytes] = field(default_factory=dict)
    """Hidden states that enter a stage, but the first."""
    gradients: dict[Unit, bytes] = field(default_factory=dict)
    """Gradients of what leaves a stage, but the last."""
    kept: dict[Unit, str] = field(default_factory=dict)
    """Peer that has run the forward and keeps what the backward needs."""
    losses: dict[int, list[float]] = field(default_factory=dict)
    """Losses of each micro-batch whose gradient on the last stage counts."""
    avoided: dict[Unit, set[str]] = field(default_factory=lambda: defaultdict(set))
    """Peers from which no answer came in time."""
    retried: int = 0
    """Passes that were sent again."""
    _ready: dict[int, list[tuple[int, Pass]]] = field(default_factory=lambda: defaultdict(list))
    _opened: set[Pass] = field(default_factory=set)
    _finished: set[int] = field(default_factory=set)
    _started: int = 0

    def __post_init__(self) -> None:
        self.num_stages = 1 + max(one.stage for one in self.order)
        self.num_micro_batches = 1 + max(one.micro_batch for one in self.order)
        self.ledger = Ledger(self.num_stages, self.num_micro_batches)
        self._start_more()

    # ------------------------------------------------------------------------------------------------------------------
    # What runs

    def ready(self, stage: int) -> Iterator[Pass]:
        """Yield the passes of a stage that may run, in the Program's order; those that are yielded are under way."""
        while self._ready[stage]:
            yield heapq.heappop(self._ready[stage])[1]

    def num_ready(self, stage: int) -> int:
        """Return the number of passes of a stage that may run and are not under way."""
        return len(self._ready[stage])

    def repeat(self, one: Pass) -> None:
        """Let a pass run that was under way, since its answer is lost."""
        self.retried += 1
        self._push(one)

    def _push(self, one: Pass) -> None:
        heapq.heappush(self._ready[one.stage], (self.order[one], one))

    def _open(self, one: Pass) -> None:
        if one not in self._opened:
            self._opened.add(one)
            self._push(one)

    def _start_more(self) -> None:
        while self._started < self.num_micro_batches and self._started - len(self._finished) < self.in_flight:
            self._open(Pass("F", 0, self._started))
            self._started += 1

    # ------------------------------------------------------------------------------------------------------------------
    # What was answered

    def answer_forward(self, one: Pass, peer: str, output: bytes) -> None:
        """Take the hidden states that a peer has computed; those of a second answer are left out."""
        following = one.stage + 1, one.micro_batch
        is_last = following[0] == self.num_stages
        if one.unit in self.kept or (not is_last and following in self.hidden):
            return
        self.kept[one.unit] = peer
        if is_last:
            self._open(Pass("B", *one.unit))
        else:
            self.hidden[following] = output
            self._open(Pass("F", *following))

    def answer_backward(self, one: Pass, peer: str, gradient: bytes, losses: list[float]) -> bool:
        """Take the answer to a backward; returns whether the gradient that the peer holds counts: a second one of the
        same unit never does."""
        if not self.ledger.accept(one.unit, peer):
            return False
        self.kept.pop(one.unit, None)
        if one.stage == self.num_stages - 1:
            self.losses[one.micro_batch] = losses
        if one.stage > 0:
            before = one.stage - 1, one.micro_batch
            self.gradients.setdefault(before, gradient)
            self._open(Pass("B", *before))
        else:
            self._finished.add(one.micro_batch)
            self._start_more()
        return True

    def lose(self, peer: str, under_way: Iterable[Pass], is_summed: bool) -> None:
        """Let run again what a lost peer was sent, and what it had done unless the sum of its stage is complete."""
        for unit in [unit for unit, keeper in self.kept.items() if keeper == peer]:
            del self.kept[unit]  # another peer runs the forward again with the backward
        for one in under_way:
            if one.unit not in self.ledger.holders:
                self.repeat(one)
        for unit in () if is_summed else self.ledger.lose(peer):
            self.repeat(Pass("B", *unit))

    def forget(self, units: Iterable[Unit]) -> None:
        """Let backwards run again whose gradients the peers that answered don't have."""
        for unit in units:
            if self.ledger.holders.pop(unit, None) is not None:
                self.repeat(Pass("B", *unit))

    @property
    def total_losses(self) -> list[float]:
        """Losses of all micro-batches, each summed in their order."""
        return [sum(column) for column in zip(*(self.losses[n] for n in sorted(self.losses)), strict=True)]
