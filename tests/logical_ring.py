"""Ranks of context-parallel attention in logical time: threads that run a kind's own forward and backward, over links
that take the time that a test gives them.

Sends of a rank over one link go one after another, each when both ends have asked for it, as NCCL's do. Computation
takes a time for each score. All times follow from the order of the calls alone, whichever thread is first.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Condition, Thread, local
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from muster.layout.context_parallel import AttentionBlock, attention_blocks, kept_positions
from muster.model.block_attention import BlockGradients, MergedAttention, ScoreRule
from muster.parallel.axis import ContextAxis
from muster.parallel.cp_blocks import BlockAttention

BACKWARD_FACTOR = 2.5
"""Time of a block's backward over that of its forward: five matmuls for two."""


class Pass(NamedTuple):
    """Time of a forward or a backward on the slowest rank, and what it is made of there."""

    seconds: float
    compute_s: float
    link_s: float
    """Of the link that carries most."""
    sends: Counter[tuple[str, int]] = Counter()
    """Number of sends by link and elements."""

    @property
    def ratio(self) -> float:
        """Time over that of the longer of computation and communication alone."""
        return self.seconds / max(self.compute_s, self.link_s)


class _Clock(local):
    now_s = 0.0
    compute_s = 0.0


CLOCK = _Clock()
"""Each rank's own, as each is a thread."""


@dataclass
class _Send:
    target: int
    begun_s: float
    seconds: float
    data: Tensor
    end_s: float | None = None


@dataclass
class Links:
    """All links: what each carries, and when."""

    seconds_per_element: dict[str, float]
    """By link: one of a rank to the next of a ring, and one for the second ring."""
    changed: Condition = field(default_factory=Condition)
    sends: defaultdict[tuple[int, str], list[_Send]] = field(default_factory=lambda: defaultdict(list))
    receives: defaultdict[tuple[int, int, str], list[float]] = field(default_factory=lambda: defaultdict(list))

    def settle(self, source: int, link: str) -> None:
        """Find the ends of a link's sends as far as both ranks have asked for them."""
        free_s, seen = 0.0, defaultdict[int, int](int)
        for send in self.sends[source, link]:
            asked = self.receives[source, send.target, link]
            if seen[send.target] == len(asked):
                return
            send.end_s = free_s = max(send.begun_s, asked[seen[send.target]], free_s) + send.seconds
            seen[send.target] += 1
        self.changed.notify_all()

    def total_s(self, source: int) -> float:
        """Return the seconds of the link of a rank that carries most."""
        links = [link for rank, link in self.sends if rank == source]
        return max((sum(send.seconds for send in self.sends[source, link]) for link in links), default=0.0)

    def counted(self, source: int) -> Counter[tuple[str, int]]:
        """Return the number of a rank's sends by link and elements."""
        return Counter(
            (link, send.data.numel()) for (rank, link), sends in self.sends.items() if rank == source for send in sends
        )


@dataclass(frozen=True)
class _PendingShift:
    links: Links
    own: _Send
    source: int
    target: int
    link: str
    number: int

    def wait(self) -> Tensor:
        """Move the clock to the end of both transfers."""
        with self.links.changed:
            arriving: list[_Send] = []

            def have_ended() -> bool:
                mine = [send for send in self.links.sends[self.source, self.link] if send.target == self.target]
                arriving[:] = mine[self.number : self.number + 1]
                return self.own.end_s is not None and bool(arriving) and arriving[0].end_s is not None

            assert self.links.changed.wait_for(have_ended, timeout=60), "a deadlock"
        CLOCK.now_s = max(CLOCK.now_s, self.own.end_s or 0.0, arriving[0].end_s or 0.0)
        return arriving[0].data


@dataclass(frozen=True)
class LogicalAxis(ContextAxis):
    """Ranks of a ring in logical time. Its groups are the names of links."""

    links: Links | None = None

    def ring_shift(self, x: Tensor, hops: int = 1) -> Any:
        """Start to send to the rank some hops on, and to receive from the one as far before."""
        assert self.links is not None
        link = str(self.group)
        me, target, source = (self.first + (self.index + by) % self.size * self.stride for by in (0, hops, -hops))
        own = _Send(target, CLOCK.now_s, x.nbytes * self.links.seconds_per_element[link], x.clone())
        with self.links.changed:
            asked = self.links.receives[source, me, link]
            asked.append(CLOCK.now_s)
            self.links.sends[me, link].append(own)
            self.links.settle(me, link)
            self.links.settle(source, link)
        return _PendingShift(self.links, own, source, me, link, len(asked) - 1)


def _scores(blocks: Sequence[AttentionBlock]) -> int:
    return sum(
        len(one.queries) * (len(one.queries) + 1) // 2 if one.mask == "causal" else len(one.queries) * len(one.keys)
        for one in blocks
    )


@contextmanager
def timed_scores(seconds_per_score: float) -> Iterator[None]:
    """Let the blocks of attention move the clock of the rank that computes them."""

    def take(seconds: float) -> None:
        CLOCK.now_s += seconds
        CLOCK.compute_s += seconds

    def forward(self: MergedAttention, *arguments: Any) -> None:
        add(self, *arguments)
        take(_scores(arguments[3]) * seconds_per_score)

    def backward(self: BlockGradients, *arguments: Any) -> None:
        add_gradients(self, *arguments)
        take(BACKWARD_FACTOR * _scores(arguments[2]) * seconds_per_score)

    add, add_gradients = MergedAttention.add, BlockGradients.add
    with patch.object(MergedAttention, "add", forward), patch.object(BlockGradients, "add", backward):
        yield


def run_kind(kind: type[BlockAttention], cp: int, window: int, seconds: dict[str, float]) -> tuple[Pass, Pass]:
    """Return forward and backward of a kind with `cp` ranks, where one step's scores take a second, in a forward, and
    the keys and values of a rank need `seconds` of each link."""
    length, heads, width = 16 * cp, 2, 8
    positions = length // cp
    one_kv_bytes = 2 * positions * heads * width * torch.float32.itemsize
    found: dict[int, tuple[Pass, Pass]] = {}
    links = [Links({link: time_s / one_kv_bytes for link, time_s in seconds.items()}) for _ in range(2)]

    def rank(index: int) -> None:
        generator = torch.Generator().manual_seed(index)
        q, k, v, grad = torch.randn(4, 1, heads, positions, width, generator=generator)
        passes = []
        ctx = SimpleNamespace(save_for_backward=lambda *tensors: setattr(ctx, "saved_tensors", tensors))
        for of_pass in links:
            CLOCK.now_s = CLOCK.compute_s = 0.0
            axis = LogicalAxis("ring", cp, index, window=window, second_group="second", links=of_pass)  # type: ignore[arg-type]
            if of_pass is links[0]:
                blocks = kind.blocks(kind.__new__(kind), axis, SimpleNamespace(window=None), q, None)  # type: ignore[arg-type]
                kind.function.forward(ctx, axis, q, k, v, *blocks, ScoreRule(width**-0.5, None, None), None)
            else:
                ctx.axis = axis
                kind.function.backward(ctx, grad)
            passes.append((CLOCK.now_s, CLOCK.compute_s))
        found[index] = tuple(
            Pass(*one, of_pass.total_s(index), of_pass.counted(index))
            for one, of_pass in zip(passes, links, strict=True)
        )

    kept = [kept_positions(length, cp, index) for index in range(cp)]
    mean = sum(_scores(attention_blocks(length, one, other, None, None)) for one in kept for other in kept) / cp**2
    with timed_scores(1 / mean):
        threads = [Thread(target=rank, args=(index,)) for index in range(cp)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return max((one[0] for one in found.values()), key=_seconds), max((one[1] for one in found.values()), key=_seconds)


def _seconds(one: Pass) -> float:
    return one.seconds
