"""Context parallelism whose backward sends queries instead of keys and values (`cp4b`).

The forward is that of the ring. In the backward keys and values stay, and the gradients of each rank's own are summed
where they are; queries, the gradients of their outputs, and two numbers for each query travel (its log-sum-exp and
delta, the product of output and gradient), and the gradient of the queries follows them, one hop more bringing it home
(BurstAttention, arXiv:2403.09347 §3.2). That is less than keys, values and both of their gradients where each head has
keys and values of its own, and more where heads share them.

Suffixes of tensors: B sequences, H query heads, K key/value heads, s positions of one rank, d head width; the first 2
stands for queries and gradients, or for log-sum-exps and deltas.
"""

from typing import Any

import torch
from torch import Tensor

from muster.model.attention import Attention
from muster.model.attention_sinks import sink_gradients
from muster.model.block_attention import ScoreRule
from muster.model.documents import Documents
from muster.parallel.axis import ContextAxis, PendingTensor
from muster.parallel.cp_blocks import BlockAttention, BlocksByRank, blocks_by_query_rank, blocks_by_source
from muster.parallel.cp_ring import ring_forward
from muster.parallel.travelling_queries import TravellingQueries


class _BurstAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        axis: ContextAxis,
        q_BHsd: Tensor,
        k_BKsd: Tensor,
        v_BKsd: Tensor,
        forward_blocks: BlocksByRank,
        backward_blocks: BlocksByRank,
        rule: ScoreRule,
        sinks_H: Tensor | None,
    ) -> Tensor:
        merged = ring_forward(axis, q_BHsd, k_BKsd, v_BKsd, forward_blocks, rule, sinks_H)
        out_BHsd = merged.out_BHSd.to(q_BHsd.dtype)
        ctx.axis, ctx.blocks, ctx.rule = axis, backward_blocks, rule
        ctx.save_for_backward(q_BHsd, k_BKsd, v_BKsd, out_BHsd, merged.lse_BHS, sinks_H)
        return out_BHsd

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        axis: ContextAxis = ctx.axis
        q_BHsd, k_BKsd, v_BKsd, out_BHsd, lse_BHs, sinks_H = ctx.saved_tensors
        traveller = TravellingQueries.of(q_BHsd, grads[0], out_BHsd, lse_BHs)
        grad_sinks_H = sink_gradients(grads[0], out_BHsd, lse_BHs, sinks_H)
        del out_BHsd
        grad_2BKsd = torch.zeros(2, *k_BKsd.shape, dtype=lse_BHs.dtype, device=k_BKsd.device)
        following: PendingTensor | None = None
        for step in range(axis.size):
            arriving = traveller.shift(axis) if step + 1 < axis.size else None
            summed = traveller.gradients(ctx.rule)
            summed.add(k_BKsd, v_BKsd, ctx.blocks[(axis.index - step) % axis.size], *grad_2BKsd)
            if following is not None:  # the sum of the ranks on which these queries have been
                summed.q_BHSd += following.wait()
            following = axis.ring_shift(summed.q_BHSd)
            del summed  # and with it the queries, once they are sent
            if arriving is not None:
                traveller, arriving = arriving.wait(), None  # which frees the queries before
        assert following is not None
        grad_k_BKsd, grad_v_BKsd = grad_2BKsd.to(k_BKsd.dtype)
        return None, following.wait().to(q_BHsd.dtype), grad_k_BKsd, grad_v_BKsd, None, None, None, grad_sinks_H


class BurstAttention(BlockAttention):
    """Attention in a ring of keys and values, with a ring of queries in the backward."""

    function = _BurstAttention

    def blocks(
        self, axis: ContextAxis, attention: Attention, q_BHsd: Tensor, documents: Documents | None
    ) -> tuple[BlocksByRank, ...]:
        """Return the blocks by rank of the keys, for the forward, and by rank of the queries, for the backward."""
        own = axis, attention, q_BHsd, documents
        return blocks_by_source(*own), blocks_by_query_rank(*own)
