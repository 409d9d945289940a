"""Context parallelism by all-gathers of keys and values (`cp4a`).

Every rank gathers the keys and values of the whole sequence and attends to them with its own queries; the backward
gathers them again, so that no rank saves more than its own, and reduce-scatters their gradients (Llama 3,
arXiv:2407.21783 §3.3.2; Megatron-LM's cp_comm_type all_gather). Beside linear attention ranks keep consecutive
positions, so that the last one computes most scores (LASP-2H, arXiv:2502.07563 §3.3).

Suffixes of tensors: C context-parallel ranks, B sequences, H query heads, K key/value heads, s positions of this rank,
S positions of the whole sequence, d head width; 2 stands for keys and values.
"""

from typing import Any

import torch
from torch import Tensor

from muster.layout.context_parallel import AttentionBlock, attention_blocks, chunk_places, kept_positions
from muster.model.attention import Attention
from muster.model.attention_sinks import sink_gradients
from muster.model.block_attention import BlockGradients, MergedAttention, ScoreRule
from muster.model.documents import Documents
from muster.parallel.axis import ContextAxis
from muster.parallel.cp_blocks import BlockAttention


class _AllGatherAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        axis: ContextAxis,
        q_BHsd: Tensor,
        k_BKsd: Tensor,
        v_BKsd: Tensor,
        blocks: tuple[AttentionBlock, ...],
        rule: ScoreRule,
        sinks_H: Tensor | None,
    ) -> Tensor:
        k_BKSd, v_BKSd = _gather(axis, k_BKsd, v_BKsd)
        merged = MergedAttention(q_BHsd, sinks_H)
        merged.add(q_BHsd, k_BKSd, v_BKSd, blocks, rule)
        out_BHsd = merged.out_BHSd.to(q_BHsd.dtype)
        ctx.axis, ctx.blocks, ctx.rule = axis, blocks, rule
        ctx.save_for_backward(q_BHsd, k_BKsd, v_BKsd, out_BHsd, merged.lse_BHS, sinks_H)
        return out_BHsd

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q_BHsd, k_BKsd, v_BKsd, out_BHsd, lse_BHs, sinks_H = ctx.saved_tensors
        k_BKSd, v_BKSd = _gather(ctx.axis, k_BKsd, v_BKsd)
        grad_2BKSd = torch.zeros(2, *k_BKSd.shape, dtype=lse_BHs.dtype, device=k_BKSd.device)
        summed = BlockGradients(grads[0], q_BHsd, out_BHsd, lse_BHs, ctx.rule)
        summed.add(k_BKSd, v_BKSd, ctx.blocks, *grad_2BKSd)
        del k_BKSd, v_BKSd
        by_rank = _by_rank(grad_2BKSd.to(k_BKsd.dtype), ctx.axis)
        del grad_2BKSd
        grad_k_BKsd, grad_v_BKsd = ctx.axis.reduce_scatter(by_rank).wait()
        grad_sinks_H = sink_gradients(grads[0], out_BHsd, lse_BHs, sinks_H)
        return None, summed.q_BHSd.to(q_BHsd.dtype), grad_k_BKsd, grad_v_BKsd, None, None, grad_sinks_H


class AllGatherAttention(BlockAttention):
    """Attention of this rank's queries to gathered keys and values."""

    function = _AllGatherAttention

    def blocks(
        self, axis: ContextAxis, attention: Attention, q_BHsd: Tensor, documents: Documents | None
    ) -> tuple[tuple[AttentionBlock, ...]]:
        """Return the blocks of this rank's queries and the whole sequence's keys."""
        length = q_BHsd.shape[2] * axis.size
        own = kept_positions(length, axis.size, axis.index, axis.is_contiguous)
        lengths = None if documents is None else documents.lengths
        return (attention_blocks(length, own, (range(length),), attention.window, lengths),)


def _gather(axis: ContextAxis, k_BKsd: Tensor, v_BKsd: Tensor) -> Tensor:
    """Return keys and values of the whole sequence, in order: (2, B, K, S, d)."""
    gathered_C2BKsd = axis.all_gather(torch.stack((k_BKsd, v_BKsd))).wait()
    if axis.is_contiguous:
        return torch.cat(tuple(gathered_C2BKsd), dim=3)
    halves = [rank.chunk(2, dim=3) for rank in gathered_C2BKsd]
    return torch.cat([halves[rank][place] for rank, place in chunk_places(axis.size)], dim=3)


def _by_rank(x_2BKSd: Tensor, axis: ContextAxis) -> Tensor:
    """Return the positions that each rank keeps: (C, 2, B, K, s, d)."""
    ranks = axis.size
    if axis.is_contiguous:
        return torch.stack(x_2BKSd.chunk(ranks, dim=3))
    chunks = x_2BKSd.chunk(2 * ranks, dim=3)
    found = x_2BKSd.new_empty(ranks, *x_2BKSd.shape[:3], x_2BKSd.shape[3] // ranks, x_2BKSd.shape[4])
    for chunk, (rank, place) in zip(chunks, chunk_places(ranks), strict=True):
        found[rank].chunk(2, dim=3)[place].copy_(chunk)
    return found
