"""Context parallelism in which queries travel one way and their results the other (`cp4t`).

Keys and values stay. Queries go around the ring, and each rank sends what its keys make of them straight back to the
rank that they belong to, against the ring's direction: outputs with their log-sum-exps in the forward, gradients of the
queries in the backward. So both directions of the links carry bytes at once (TokenRing, arXiv:2412.20501 §3, which has
the forward). The ring of keys and values sends less where heads share these.

Suffixes of tensors: B sequences, H query heads, K key/value heads, s positions of one rank, d head width; 2 stands for
keys and values.
"""

from typing import Any

import torch
from torch import Tensor

from muster.model.attention import Attention
from muster.model.attention_sinks import sink_gradients
from muster.model.block_attention import MergedAttention, ScoreRule
from muster.model.documents import Documents
from muster.parallel.axis import ContextAxis, PendingTensor
from muster.parallel.cp_blocks import BlockAttention, BlocksByRank, blocks_by_query_rank
from muster.parallel.travelling_queries import TravellingQueries


class _TokenRingAttention(torch.autograd.Function):
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
        own, travelling, back = MergedAttention(q_BHsd, sinks_H), q_BHsd.contiguous(), axis.second_ring()
        own_blocks = blocks[axis.index]  # half of the work hides the first hop, half the last way back
        arriving = axis.ring_shift(travelling)
        own.add(q_BHsd, k_BKsd, v_BKsd, own_blocks[::2], rule)
        returning: tuple[PendingTensor, PendingTensor] | None = None
        for step in range(1, axis.size):
            travelling = arriving.wait()
            if step + 1 < axis.size:
                arriving = axis.ring_shift(travelling)
            merged = MergedAttention(travelling)
            merged.add(travelling, k_BKsd, v_BKsd, blocks[(axis.index - step) % axis.size], rule)
            out_BsHd = merged.out_BHSd.transpose(1, 2).to(q_BHsd.dtype)
            sent = back.ring_shift(out_BsHd, -step), back.ring_shift(merged.lse_BHS, -step)
            del merged, out_BsHd
            if returning is not None:
                own.merge(returning[0].wait().transpose(1, 2), returning[1].wait())
            returning = sent
        assert returning is not None
        own.add(q_BHsd, k_BKsd, v_BKsd, own_blocks[1::2], rule)
        own.merge(returning[0].wait().transpose(1, 2), returning[1].wait())
        out_BHsd = own.out_BHSd.to(q_BHsd.dtype)
        ctx.axis, ctx.blocks, ctx.rule = axis, blocks, rule
        ctx.save_for_backward(q_BHsd, k_BKsd, v_BKsd, out_BHsd, own.lse_BHS, sinks_H)
        return out_BHsd

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        axis: ContextAxis = ctx.axis
        back = axis.second_ring()
        q_BHsd, k_BKsd, v_BKsd, out_BHsd, lse_BHs, sinks_H = ctx.saved_tensors
        traveller = TravellingQueries.of(q_BHsd, grads[0], out_BHsd, lse_BHs)
        grad_2BKsd = torch.zeros(2, *k_BKsd.shape, dtype=lse_BHs.dtype, device=k_BKsd.device)
        grad_q_BHsd: Tensor | None = None
        returning: PendingTensor | None = None
        for step in range(axis.size):
            arriving = traveller.shift(axis) if step + 1 < axis.size else None
            summed = traveller.gradients(ctx.rule)
            summed.add(k_BKsd, v_BKsd, ctx.blocks[(axis.index - step) % axis.size], *grad_2BKsd)
            if grad_q_BHsd is None:
                grad_q_BHsd = summed.q_BHSd
            else:
                sent = back.ring_shift(summed.q_BHSd, -step)
                if returning is not None:
                    grad_q_BHsd += returning.wait()
                returning = sent
            del summed
            if arriving is not None:
                traveller, arriving = arriving.wait(), None
        assert grad_q_BHsd is not None
        assert returning is not None
        grad_q_BHsd += returning.wait()
        grad_k_BKsd, grad_v_BKsd = grad_2BKsd.to(k_BKsd.dtype)
        grad_sinks_H = sink_gradients(grads[0], out_BHsd, lse_BHs, sinks_H)
        return None, grad_q_BHsd.to(q_BHsd.dtype), grad_k_BKsd, grad_v_BKsd, None, None, grad_sinks_H


class TokenRingAttention(BlockAttention):
    """Attention of queries that travel around the ring to keys and values that stay."""

    function = _TokenRingAttention

    def blocks(
        self, axis: ContextAxis, attention: Attention, q_BHsd: Tensor, documents: Documents | None
    ) -> tuple[BlocksByRank]:
        """Return the blocks of each rank's queries and this rank's keys."""
        return (blocks_by_query_rank(axis, attention, q_BHsd, documents),)
