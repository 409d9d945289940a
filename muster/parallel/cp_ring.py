"""Context parallelism in a ring (`cp4`): blocks of keys and values travel, each rank's queries stay.

While a rank attends to one block, the next one arrives (arXiv:2310.01889; the zigzag order and the merge of partial
results are those of zhuzilin/ring-flash-attention). A block travels in two parts, its early and its late chunk, and a
rank sends a part on when half of the work on the one before is done: so links that are slower than the scores are
hardly ever idle, and what comes after the last transfer is the work on one part. In the backward keys and values travel
again, and each part's gradient follows it from the second rank on, one term added on every rank; the last hop brings it
home, where the term of the rank itself has stayed. A part of a rank's work on its own block hides the first hop, the
rest the last.

A double ring (`cp8w2`; LoongTrain, arXiv:2406.18485 §4.2) has inner rings of neighbours and an outer ring that joins
them. Parts go around the inner ring while those of the inner ring before arrive over the outer, whose links may be
slower by the number of steps; in the last hop chunks come in smaller parts (`last_hop_parts`). Gradients go around an
inner ring, home within it, and their sum goes on over the outer. A single ring is an outer one whose inner rings have
one rank each.

Suffixes of tensors: B sequences, H query heads, K key/value heads, s positions of one rank, p of one part, d head
width; 2 stands for keys and values.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from muster.layout.context_parallel import AttentionBlock, blocks_of_keys, last_hop_parts, ring_parts
from muster.model.attention_sinks import sink_gradients
from muster.model.block_attention import BlockGradients, MergedAttention, ScoreRule
from muster.parallel.axis import ContextAxis, PendingTensor
from muster.parallel.cp_blocks import BlockAttention, BlocksByRank


class _Arrived(NamedTuple):
    """A part of another rank's keys and values."""

    turn: int
    """Turn of the outer ring."""
    part: range
    """Its positions among those of the other rank."""
    step: int
    """Step of the inner ring."""
    source: int
    """The other rank."""
    kv_2BKpd: Tensor


class _Travel:
    """Parts of all ranks' keys and values on their way around the rings, from this rank's own ones on."""

    def __init__(self, axis: ContextAxis, k_BKsd: Tensor, v_BKsd: Tensor, is_backward: bool) -> None:
        """Start the first hops."""
        self._inner, self._outer = axis.rings()
        self._is_backward = is_backward
        last_parts = last_hop_parts(self._inner.size, is_backward)
        self._parts = ring_parts(k_BKsd.shape[2], self._outer.size, last_parts)
        self._over_outer: dict[range, PendingTensor] = {}
        self._around_inner: dict[range, PendingTensor] = {}
        for part in self._parts[0]:
            self._send_on(0, part, 0, torch.stack([x[:, :, part.start : part.stop] for x in (k_BKsd, v_BKsd)]))

    def __iter__(self) -> Iterator[tuple[_Arrived, int]]:
        """Yield each part twice, for each half of the work on it, in the order in which they arrive. The next part goes
        on between these, so that its link needn't wait for all of the work."""
        inner, outer = self._inner, self._outer
        begun: _Arrived | None = None
        for turn, part, step in self._places():
            goes_on = step + 1 < inner.size or (step == 0 and turn + 1 < outer.size)
            if begun is not None and not goes_on:
                yield begun, 1
                begun = None
            kv_2BKpd = (self._around_inner if step else self._over_outer).pop(part).wait()
            self._send_on(turn, part, step, kv_2BKpd)
            if begun is not None:
                yield begun, 1
            source = (outer.index - turn) % outer.size * inner.size + (inner.index - step) % inner.size
            begun = _Arrived(turn, part, step, source, kv_2BKpd)
            del kv_2BKpd  # the next part may take its place while the caller works
            yield begun, 0
        assert begun is not None
        yield begun, 1

    def _places(self) -> Iterator[tuple[int, range, int]]:
        """Yield turn, part and step of all parts of other ranks. In a forward a part goes around the inner ring before
        the next one comes. In a backward all do so side by side, so that sums have time to come home."""
        for turn, parts in enumerate(self._parts):
            steps = range(turn == 0, self._inner.size)
            if self._is_backward:
                yield from ((turn, part, step) for step in steps for part in parts)
            else:
                yield from ((turn, part, step) for part in parts for step in steps)

    def _send_on(self, turn: int, part: range, step: int, kv_2BKpd: Tensor) -> None:
        if step == 0 and turn + 1 < self._outer.size:
            for sent in self._parts[turn + 1]:
                if sent.start in part:
                    rows = slice(sent.start - part.start, sent.stop - part.start)
                    self._over_outer[sent] = self._outer.ring_shift(kv_2BKpd[:, :, :, rows].contiguous())
        if step + 1 < self._inner.size:
            self._around_inner[part] = self._inner.ring_shift(kv_2BKpd)


class _TravellingSums:
    """Sums of the gradients of parts of keys and values, which follow these around the rings."""

    _PARTS_TO_COME_HOME = 2
    """Parts whose work hides the last hop of a sum around an inner ring."""

    def __init__(self, axis: ContextAxis, own_2BKsd: Tensor) -> None:
        """`own_2BKsd`: the gradient of this rank's keys and values, to which the terms of the other ranks come."""
        self._inner, self._outer = axis.rings()
        self._own = own_2BKsd
        self._num_added = 0
        self._here: dict[range, Tensor] = {}
        """This rank's terms of parts whose sums are on their way around the inner ring."""
        self._following: dict[range, PendingTensor] = {}
        """The other ranks' terms of these."""
        self._homing: list[tuple[int, int, range]] = []
        """Parts whose sum over an inner ring is on its last hop: parts added before it, turn and part."""
        self._totals: dict[range, PendingTensor] = {}
        """Sums over the inner rings before, on the way to this one, by the parts of the turn before."""
        self._next_totals: dict[range, PendingTensor] = {}

    def add(self, at: _Arrived, term_2BKpd: Tensor) -> None:
        """Add this rank's term of a part, and start to send the sum on."""
        self._num_added += 1
        while self._homing and self._homing[0][0] + self._PARTS_TO_COME_HOME <= self._num_added:
            self._hand_on()
        if at.step <= (at.turn == 0):
            self._here[at.part] = term_2BKpd if at.turn else self._own[:, :, :, at.part.start : at.part.stop]
        if at.step:
            if at.part in self._following:
                term_2BKpd += self._following.pop(at.part).wait()
            self._following[at.part] = self._inner.ring_shift(term_2BKpd)
        if at.step + 1 == self._inner.size:
            self._homing.append((self._num_added, at.turn, at.part))
            if self._inner.size == 1:
                self._hand_on()

    def start_last_hop(self) -> None:
        """Send what is left home."""
        while self._homing:
            self._hand_on()

    def finish(self) -> None:
        """Add the other ranks' terms to the gradient of this rank's keys and values."""
        for part in list(self._totals):
            self._own[:, :, :, part.start : part.stop] += self._totals.pop(part).wait()

    def _hand_on(self) -> None:
        """Complete a sum over an inner ring, and start to send it on over the outer ring with those of the rings
        before; that of this rank's own part stays."""
        _, turn, part = self._homing.pop(0)
        sum_2BKpd = self._here.pop(part)
        if part in self._following:
            sum_2BKpd += self._following.pop(part).wait()
        if turn == 0:
            return
        if turn > 1:
            before = next(before for before in self._totals if part.start in before)
            total = self._totals[before].wait()
            self._totals[before] = PendingTensor([], lambda: total)
            sum_2BKpd += total[:, :, :, part.start - before.start : part.stop - before.start]
            if part.stop == before.stop:
                del self._totals[before]
        self._next_totals[part] = self._outer.ring_shift(sum_2BKpd)
        if part.stop == self._own.shape[3]:
            self._totals, self._next_totals = self._next_totals, {}


def ring_forward(
    axis: ContextAxis,
    q_BHsd: Tensor,
    k_BKsd: Tensor,
    v_BKsd: Tensor,
    blocks: BlocksByRank,
    rule: ScoreRule,
    sinks_H: Tensor | None,
) -> MergedAttention:
    """Return the attention of this rank's queries, merged from the blocks of all ranks."""
    merged = MergedAttention(q_BHsd, sinks_H)
    travel = _Travel(axis, k_BKsd, v_BKsd, is_backward=False)
    merged.add(q_BHsd, k_BKsd, v_BKsd, blocks[axis.index], rule)
    for at, half in travel:
        k_BKpd, v_BKpd = at.kv_2BKpd
        merged.add(q_BHsd, k_BKpd, v_BKpd, blocks_of_keys(blocks[at.source], at.part)[half::2], rule)
        del at, k_BKpd, v_BKpd
    return merged


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        axis: ContextAxis,
        q_BHsd: Tensor,
        k_BKsd: Tensor,
        v_BKsd: Tensor,
        blocks: BlocksByRank,
        rule: ScoreRule,
        sinks_H: Tensor | None,
    ) -> Tensor:
        merged = ring_forward(axis, q_BHsd, k_BKsd, v_BKsd, blocks, rule, sinks_H)
        out_BHsd = merged.out_BHSd.to(q_BHsd.dtype)
        ctx.axis, ctx.blocks, ctx.rule = axis, blocks, rule
        ctx.save_for_backward(q_BHsd, k_BKsd, v_BKsd, out_BHsd, merged.lse_BHS, sinks_H)
        return out_BHsd

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        axis: ContextAxis = ctx.axis
        q_BHsd, k_BKsd, v_BKsd, out_BHsd, lse_BHs, sinks_H = ctx.saved_tensors
        summed = BlockGradients(grads[0], q_BHsd, out_BHsd, lse_BHs, ctx.rule)
        own_2BKsd = torch.zeros(2, *k_BKsd.shape, dtype=lse_BHs.dtype, device=k_BKsd.device)
        first_blocks, last_blocks = _halves(ctx.blocks[axis.index], axis.window > 1)
        travel, sums = _Travel(axis, k_BKsd, v_BKsd, is_backward=True), _TravellingSums(axis, own_2BKsd)
        summed.add(k_BKsd, v_BKsd, first_blocks, own_2BKsd[0], own_2BKsd[1])
        term_2BKpd = own_2BKsd
        for at, half in travel:
            k_BKpd, v_BKpd = at.kv_2BKpd
            if half == 0:
                term_2BKpd = torch.zeros_like(at.kv_2BKpd, dtype=lse_BHs.dtype)
            work = blocks_of_keys(ctx.blocks[at.source], at.part)[half::2]
            summed.add(k_BKpd, v_BKpd, work, term_2BKpd[0], term_2BKpd[1])
            if half == 1:
                sums.add(at, term_2BKpd)
                term_2BKpd = own_2BKsd
            del at, k_BKpd, v_BKpd
        sums.start_last_hop()
        summed.add(k_BKsd, v_BKsd, last_blocks, own_2BKsd[0], own_2BKsd[1])
        sums.finish()
        grad_k_BKsd, grad_v_BKsd = own_2BKsd.to(k_BKsd.dtype)
        grad_sinks_H = sink_gradients(grads[0], out_BHsd, lse_BHs, sinks_H)
        return None, summed.q_BHSd.to(q_BHsd.dtype), grad_k_BKsd, grad_v_BKsd, None, None, grad_sinks_H


class RingAttention(BlockAttention):
    """Attention of this rank's queries to keys and values that travel around the ring."""

    function = _RingAttention


def _halves(blocks: tuple[AttentionBlock, ...], is_double: bool) -> tuple[tuple[AttentionBlock, ...], ...]:
    """Return the part of the work on a rank's own block that hides the first hop, and the part that hides the last: a
    half each, or less and more where the last hop is over the slower outer ring."""
    return (blocks[:1], blocks[1:]) if is_double else (blocks[::2], blocks[1::2])
