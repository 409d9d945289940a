"""Context parallelism in a ring (`cp4`): blocks of keys and values travel, each rank's queries stay.

While a rank attends to one block, the next one arrives (arXiv:2310.01889; the zigzag order and the merge of partial
results are those of zhuzilin/ring-flash-attention). In the backward keys and values travel again, and each block's
gradient follows it from the second rank on, one term added on every rank; the last hop brings it home, where the term
of the rank itself has stayed. A part of a rank's work on its own block hides the first hop, the rest the last.

A double ring (`cp8w2`; LoongTrain, arXiv:2406.18485 §4.2) has inner rings of neighbours and an outer ring that joins
them. Blocks go around the inner ring while the one of the inner ring before arrives over the outer, whose links may be
slower by the number of steps. Gradients go around an inner ring, home within it, and their sum goes on over the outer.

Suffixes of tensors: B sequences, H query heads, K key/value heads, s positions of one rank, d head width; 2 stands for
keys and values.
"""

from typing import Any

import torch
from torch import Tensor

from muster.layout.context_parallel import AttentionBlock
from muster.model.attention_sinks import sink_gradients
from muster.model.block_attention import BlockGradients, MergedAttention, ScoreRule
from muster.parallel.axis import ContextAxis, PendingTensor
from muster.parallel.cp_blocks import BlockAttention, BlocksByRank


def _source(inner: ContextAxis, outer: ContextAxis, turn: int, step: int) -> int:
    """Return the rank whose block is here in one step of one turn of the outer ring."""
    return (outer.index - turn) % outer.size * inner.size + (inner.index - step) % inner.size


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
    inner, outer = axis.rings()
    merged, kv_2BKsd = MergedAttention(q_BHsd, sinks_H), torch.stack((k_BKsd, v_BKsd))
    for turn in range(outer.size):
        next_turn = outer.ring_shift(kv_2BKsd) if turn + 1 < outer.size else None
        for step in range(inner.size):
            arriving = inner.ring_shift(kv_2BKsd) if step + 1 < inner.size else None
            merged.add(q_BHsd, *kv_2BKsd, blocks[_source(inner, outer, turn, step)], rule)
            if arriving is not None:
                kv_2BKsd, arriving = arriving.wait(), None  # which frees the block before
        if next_turn is not None:
            kv_2BKsd, next_turn = next_turn.wait(), None
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
        q_BHsd, k_BKsd, v_BKsd, out_BHsd, lse_BHs, sinks_H = ctx.saved_tensors
        inner, outer = ctx.axis.rings()
        summed = BlockGradients(grads[0], q_BHsd, out_BHsd, lse_BHs, ctx.rule)
        kv_2BKsd = torch.stack((k_BKsd, v_BKsd))
        own_2BKsd = here_2BKsd = torch.zeros_like(kv_2BKsd, dtype=lse_BHs.dtype)
        first_blocks, last_blocks = _halves(ctx.blocks[ctx.axis.index], outer.size > 1)
        home: PendingTensor | None = None  # terms of an inner ring, on the way to the rank on which their block began
        total: PendingTensor | None = None  # the sum over the inner rings before, on the way to this one
        for turn in range(outer.size):
            next_turn = outer.ring_shift(kv_2BKsd) if turn + 1 < outer.size else None
            before_2BKsd, here_2BKsd = here_2BKsd, torch.zeros_like(own_2BKsd) if turn else own_2BKsd
            following: PendingTensor | None = None
            for step in range(inner.size):
                arriving = inner.ring_shift(kv_2BKsd) if step + 1 < inner.size else None
                grad_2BKsd = torch.zeros_like(own_2BKsd) if step else here_2BKsd
                blocks = ctx.blocks[_source(inner, outer, turn, step)] if turn or step else first_blocks
                summed.add(*kv_2BKsd, blocks, *grad_2BKsd)
                if step == 0:
                    if home is not None:
                        home, total = None, _hand_on(outer, before_2BKsd, home, total, is_own=turn == 1)
                else:
                    if following is not None:  # the sum of the ranks on which this block has been
                        grad_2BKsd += following.wait()
                        following = None
                    following = inner.ring_shift(grad_2BKsd)
                if arriving is not None:
                    kv_2BKsd, arriving = arriving.wait(), None
            home = following
            del before_2BKsd, grad_2BKsd, following
            if next_turn is not None:
                kv_2BKsd, next_turn = next_turn.wait(), None
        del kv_2BKsd
        assert home is not None
        last = home if outer.size == 1 else _hand_on(outer, here_2BKsd, home, total)
        summed.add(k_BKsd, v_BKsd, last_blocks, *own_2BKsd)
        assert last is not None
        own_2BKsd += last.wait()
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


def _hand_on(
    outer: ContextAxis, sum_2BKsd: Tensor, home: PendingTensor, total: PendingTensor | None, is_own: bool = False
) -> PendingTensor | None:
    """Complete the sum over an inner ring, and start to send it on over the outer ring with those of the rings before;
    the sum of this rank's own block stays."""
    sum_2BKsd += home.wait()
    if is_own:
        return None
    if total is not None:
        sum_2BKsd += total.wait()
    return outer.ring_shift(sum_2BKsd)
