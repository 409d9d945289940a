"""Context parallelism that computes all scores before it uses them (`cp4s`): ring self-attention in two passes.

Keys travel around a ring, and each rank writes the scores of its own queries and all keys, a row of the sequence's
length for each query; a softmax of whole rows follows, and values travel around the ring (Ring Self-Attention,
arXiv:2105.13120 §3.2). Other kinds merge blocks and never have a row at once; this one is for attention that looks at
its scores, and costs their memory, which grows with the square of the length. In the backward values travel for the
gradients of probabilities, keys for those of queries; the gradients of keys and values of the whole sequence are
reduce-scattered, which is half of the all-reduce that the paper has.

Suffixes of tensors: C context-parallel ranks, B sequences, H query heads, K key/value heads, G query heads of one of
these, s positions of this rank, S positions of all ranks, rank after rank, d head width; 2 stands for keys and values.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from muster.layout.context_parallel import AttentionBlock
from muster.model.block_attention import ScoreRule, block_scores, block_slices
from muster.model.kernels import accumulation_dtype, soft_cap_slope_
from muster.parallel.axis import ContextAxis
from muster.parallel.cp_blocks import BlockAttention, BlocksByRank


def _around(axis: ContextAxis, own: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield each rank's tensor as (rank, tensor), this rank's first, while the next one arrives."""
    shard = own.contiguous()
    for step in range(axis.size):
        arriving = axis.ring_shift(shard) if step + 1 < axis.size else None
        yield (axis.index - step) % axis.size, shard
        if arriving is not None:
            shard = arriving.wait()


class _Rows:
    """Rows of a rank's queries (B, H, s, S), of which the blocks of each rank's keys are read and written."""

    def __init__(self, rows_BHsS: Tensor, blocks: BlocksByRank) -> None:
        self.rows_BHsS, self._blocks = rows_BHsS, blocks

    def blocks_of(self, source: int) -> Iterator[tuple[AttentionBlock, tuple[slice, ...], tuple[slice, ...], Tensor]]:
        """Yield each block of a rank's keys, the slices of its queries and of its keys, and its part of the rows."""
        begin = source * self.rows_BHsS.shape[2]
        for block in self._blocks[source]:
            rows, keys = block_slices(block, block.queries), block_slices(block, block.keys)
            columns = slice(begin + block.keys.start, begin + block.keys.stop)
            yield block, rows, keys, self.rows_BHsS[(*rows, columns)]


class _RingSelfAttention(torch.autograd.Function):
    """Saves queries, keys, values, the probabilities, and the log-sum-exp of each row's scores."""

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
        dtype, length = accumulation_dtype(q_BHsd.dtype), q_BHsd.shape[2] * axis.size
        scores = _Rows(q_BHsd.new_full((*q_BHsd.shape[:3], length), -torch.inf, dtype=dtype), blocks)
        for source, keys_BKsd in _around(axis, k_BKsd):
            for block, rows, keys, part in scores.blocks_of(source):
                part.copy_(block_scores(q_BHsd[rows], keys_BKsd[keys], block, rule).flatten(1, 2))
        lse_BHs = scores.rows_BHsS.logsumexp(-1)
        if sinks_H is not None:
            lse_BHs = torch.logaddexp(lse_BHs, sinks_H.to(dtype).view(1, -1, 1))
        p_BHsS = scores.rows_BHsS.sub_(lse_BHs.unsqueeze(-1)).exp_().to(v_BKsd.dtype)
        out_BHsd = torch.zeros_like(q_BHsd, dtype=dtype)
        probabilities, groups = _Rows(p_BHsS, blocks), q_BHsd.shape[1] // k_BKsd.shape[1]
        for source, values_BKsd in _around(axis, v_BKsd):
            for _, rows, keys, part in probabilities.blocks_of(source):
                out_BHsd[rows] += (part.unflatten(1, (-1, groups)) @ values_BKsd[keys].unsqueeze(2)).flatten(1, 2)
        ctx.axis, ctx.blocks, ctx.rule = axis, blocks, rule
        ctx.save_for_backward(q_BHsd, k_BKsd, v_BKsd, p_BHsS, lse_BHs, sinks_H)
        # In memory as the output projection reads it.
        return out_BHsd.to(q_BHsd.dtype).transpose(1, 2).contiguous().transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        axis, rule = ctx.axis, ctx.rule
        q_BHsd, k_BKsd, v_BKsd, p_BHsS, lse_BHs, sinks_H = ctx.saved_tensors
        grad_BKGsd, q_BKGsd = (x.unflatten(1, (k_BKsd.shape[1], -1)) for x in (grads[0], q_BHsd))
        ds = _Rows(torch.zeros_like(p_BHsS, dtype=lse_BHs.dtype), ctx.blocks)
        for source, values_BKsd in _around(axis, v_BKsd):
            for block, _, keys, part in ds.blocks_of(source):
                own = grad_BKGsd[_grouped(block)]
                part.copy_((own @ values_BKsd[keys].unsqueeze(2).mT).flatten(1, 2))
        # Of a softmax: p · (dL/dp − Σ dL/dp · p).
        ds_BHsS = ds.rows_BHsS
        delta_BHs1, grad_sinks_H = (ds_BHsS * p_BHsS).sum(-1, keepdim=True), None
        if sinks_H is not None:  # a score whose value is zero
            p_BHs = (sinks_H.to(lse_BHs.dtype).view(1, -1, 1) - lse_BHs).exp_()
            grad_sinks_H = -(p_BHs * delta_BHs1.squeeze(-1)).sum((0, 2)).to(sinks_H.dtype)
        ds_BHsS.sub_(delta_BHs1).mul_(p_BHsS)
        if rule.softcap is not None:
            # Where a probability is 0, so is what the slope multiplies.
            capped = p_BHsS.to(ds_BHsS.dtype).log().add_(lse_BHs.unsqueeze(-1)).clamp_(-rule.softcap, rule.softcap)
            ds_BHsS *= soft_cap_slope_(capped, rule.softcap)
        ds = _Rows(ds_BHsS.mul_(rule.scale).to(q_BHsd.dtype), ctx.blocks)
        grad_q_BHsd = torch.zeros_like(q_BHsd, dtype=lse_BHs.dtype)
        groups = q_BKGsd.shape[2]
        for source, keys_BKsd in _around(axis, k_BKsd):
            for _, rows, keys, part in ds.blocks_of(source):
                grad_q_BHsd[rows] += (part.unflatten(1, (-1, groups)) @ keys_BKsd[keys].unsqueeze(2)).flatten(1, 2)
        whole_2BKSd = torch.stack(
            (_summed_heads(ds.rows_BHsS, q_BKGsd), _summed_heads(p_BHsS, grad_BKGsd)),
        )
        by_rank_C2BKsd = whole_2BKSd.unflatten(3, (axis.size, -1)).movedim(3, 0)
        grad_k_BKsd, grad_v_BKsd = axis.reduce_scatter(by_rank_C2BKsd.to(k_BKsd.dtype)).wait()
        return None, grad_q_BHsd.to(q_BHsd.dtype), grad_k_BKsd, grad_v_BKsd, None, None, grad_sinks_H


class RingSelfAttention(BlockAttention):
    """Attention of this rank's queries, whose scores are in memory all at once."""

    function = _RingSelfAttention


def _grouped(block: AttentionBlock) -> tuple[slice, ...]:
    """Return the slices of a block's queries in a tensor (B, K, G, s, d)."""
    batch, heads, queries = block_slices(block, block.queries)
    return batch, heads, slice(None), queries


def _summed_heads(rows_BHsS: Tensor, x_BKGsd: Tensor) -> Tensor:
    """Return the sum over queries, and over those that share keys and values, of row entries times a vector of each
    query: (B, K, S, d)."""
    return (rows_BHsS.unflatten(1, x_BKGsd.shape[1:3]).mT @ x_BKGsd).sum(2)
