"""Context parallelism in a ring (`cp4`): blocks of keys and values travel, each rank's queries stay.

While a rank attends to one block, the next one arrives (arXiv:2310.01889; the zigzag order and the merge of partial
results are those of zhuzilin/ring-flash-attention). In the backward keys and values travel again, and each block's
gradient follows it, one term added on every rank, and one hop more brings it home.

A double ring (`cp8w2`; LoongTrain, arXiv:2406.18485 §4.2) has inner rings of neighbours and an outer ring that joins
them. Blocks go around the inner ring while the one of the inner ring before arrives over the outer, whose links may be
slower by the number of steps. Gradients go around an inner ring, home within it, and their sum goes on over the outer.

Suffixes of tensors: B sequences, H query heads, K key/value heads, s positions of one rank, d head width; 2 stands for
keys and values.
"""

from typing import Any

import torch
from torch import Tensor

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
        home: PendingTensor | None = None  # the sum over an inner ring, on the way to the rank that it began on
        total: PendingTensor | None = None  # the sum over the inner rings before, on the way to this one
        for turn in range(outer.size):
            next_turn = outer.ring_shift(kv_2BKsd) if turn + 1 < outer.size else None
            following: PendingTensor | None = None
            for step in range(inner.size):
                arriving = inner.ring_shift(kv_2BKsd) if step + 1 < inner.size else None
                grad_2BKsd = torch.zeros_like(kv_2BKsd, dtype=lse_BHs.dtype)
                summed.add(*kv_2BKsd, ctx.blocks[_source(inner, outer, turn, step)], *grad_2BKsd)
                if following is not None:  # the sum of the ranks on which this block has been
                    grad_2BKsd += following.wait()
                    following = None
                following = inner.ring_shift(grad_2BKsd)
                if home is not None:
                    home, total = None, outer.ring_shift(_sum(home, total))
                if arriving is not None:
                    kv_2BKsd, arriving = arriving.wait(), None
            home = following
            if next_turn is not None:
                kv_2BKsd, next_turn = next_turn.wait(), None
        grad_2BKsd = _sum(home, total)
        if outer.size > 1:
            grad_2BKsd = outer.ring_shift(grad_2BKsd).wait()
        grad_k_BKsd, grad_v_BKsd = grad_2BKsd.to(k_BKsd.dtype)
        grad_sinks_H = sink_gradients(grads[0], out_BHsd, lse_BHs, sinks_H)
        return None, summed.q_BHSd.to(q_BHsd.dtype), grad_k_BKsd, grad_v_BKsd, None, None, grad_sinks_H


class RingAttention(BlockAttention):
    """Attention of this rank's queries to keys and values that travel around the ring."""

    function = _RingAttention


def _sum(home: PendingTensor | None, total: PendingTensor | None) -> Tensor:
    assert home is not None
    found = home.wait()
    return found if total is None else found.add_(total.wait())
