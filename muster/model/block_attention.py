"""Attention of some queries to some keys, block by block, merged by log-sum-exp.

Each block is computed alone and yields its output and the log-sum-exp of each query's scores; two results of one query
are merged by these (arXiv:2205.14135 §3.1). The backward of a block needs the complete output and log-sum-exp, and
nothing else of the other blocks.

Suffixes of tensors: B sequences, H query heads, K key/value heads, S queries, T keys, d head width.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from muster.layout.context_parallel import AttentionBlock, BlockMask
from muster.model.attention import Attention
from muster.model.block_kernels import SavedAttention, fused_backward, fused_forward, has_block_kernel, trim_block
from muster.model.chunk_sizes import chunk_elements
from muster.model.kernels import accumulation_dtype, soft_cap_, soft_cap_slope_


@dataclass(frozen=True, slots=True)
class ScoreRule:
    """Scale, soft cap and window of the scores of one layer."""

    scale: float
    softcap: float | None = None
    window: int | None = None


def score_rule(attention: Attention) -> ScoreRule:
    """Return the rule of a layer's scores."""
    scale = attention.head_dim**-0.5 if attention.scale is None else attention.scale
    return ScoreRule(scale, attention.softcap, attention.window)


class MergedAttention:
    """Output and log-sum-exp of a rank's queries, to which blocks are added; both in the accumulation dtype."""

    def __init__(self, q_BHSd: Tensor, sinks_H: Tensor | None = None) -> None:
        """Begin with nothing, or with the sinks, keys whose values are zeros."""
        dtype = accumulation_dtype(q_BHSd.dtype)
        batch, heads, length, width = q_BHSd.shape
        # In memory as the output projection reads it, so that it isn't copied.
        self.out_BHSd = q_BHSd.new_zeros(batch, length, heads, width, dtype=dtype).transpose(1, 2)
        self.lse_BHS = torch.full(q_BHSd.shape[:3], -torch.inf, dtype=dtype, device=q_BHSd.device)
        if sinks_H is not None:
            self.lse_BHS.copy_(sinks_H.view(1, -1, 1))

    def add(
        self, q_BHSd: Tensor, k_BKTd: Tensor, v_BKTd: Tensor, blocks: Sequence[AttentionBlock], rule: ScoreRule
    ) -> None:
        """Add the attention of the queries to the keys of some blocks."""
        for block in _pieces(q_BHSd, blocks, rule):
            rows, keys = block_slices(block, block.queries), block_slices(block, block.keys)
            out, lse = block_forward(q_BHSd[rows], k_BKTd[keys], v_BKTd[keys], block, rule)
            self._merge(rows, out, lse)

    def merge(self, out_BHSd: Tensor, lse_BHS: Tensor) -> None:
        """Add the attention of the queries to other keys, as another rank has computed it."""
        self._merge((slice(None),) * 3, out_BHSd, lse_BHS)

    def _merge(self, rows: tuple[slice, ...], out_BHSd: Tensor, lse_BHS: Tensor) -> None:
        whole_out, whole_lse = self.out_BHSd[rows], self.lse_BHS[rows]
        merged = torch.logaddexp(whole_lse, lse_BHS)
        # Queries that see none of the keys yet have −∞ − (−∞).
        kept = (whole_lse - merged).exp_().nan_to_num_(0.0).unsqueeze(-1)
        added = (lse_BHS - merged).exp_().nan_to_num_(0.0).unsqueeze(-1)
        whole_out.mul_(kept).addcmul_(out_BHSd.to(whole_out.dtype), added)
        whole_lse.copy_(merged)


class BlockGradients:
    """Gradients of a rank's queries, to which those of blocks are added, in the accumulation dtype."""

    def __init__(self, grad_BHSd: Tensor, q_BHSd: Tensor, out_BHSd: Tensor, lse_BHS: Tensor, rule: ScoreRule) -> None:
        self._grad, self._q, self._out, self._lse, self._rule = grad_BHSd, q_BHSd, out_BHSd, lse_BHS, rule
        self.q_BHSd = torch.zeros_like(q_BHSd, dtype=lse_BHS.dtype)

    def add(
        self,
        k_BKTd: Tensor,
        v_BKTd: Tensor,
        blocks: Sequence[AttentionBlock],
        grad_k_BKTd: Tensor,
        grad_v_BKTd: Tensor,
    ) -> None:
        """Add the gradients of some blocks, those of keys and values to `grad_k_BKTd` and `grad_v_BKTd`."""
        for block in _pieces(self._q, blocks, self._rule):
            rows, keys = block_slices(block, block.queries), block_slices(block, block.keys)
            saved = self._grad[rows], self._q[rows], k_BKTd[keys], v_BKTd[keys], self._out[rows], self._lse[rows]
            grads = block_backward(SavedAttention(*saved), block, self._rule)
            for total, grad in zip((self.q_BHSd[rows], grad_k_BKTd[keys], grad_v_BKTd[keys]), grads, strict=True):
                total += grad


def _pieces(q_BHSd: Tensor, blocks: Sequence[AttentionBlock], rule: ScoreRule) -> Iterator[AttentionBlock]:
    """Yield the blocks, those without a fused kernel in pieces of some queries each, whose scores are in memory."""
    for block in blocks:
        if has_block_kernel(q_BHSd, block, rule.softcap):
            if seen_block := trim_block(block, rule.window):
                yield seen_block
            continue
        batch, heads, *_ = q_BHSd[block_slices(block, block.queries)].shape
        # Under a window, as many queries as it is wide see less than twice as many keys.
        seen = len(block.keys) if rule.window is None else min(len(block.keys), 2 * rule.window)
        size = max(1, chunk_elements("attention", q_BHSd.device.type) // (batch * heads * seen))
        size = size if rule.window is None else min(size, rule.window)
        for start in range(0, len(block.queries), size):
            queries = block.queries[start : start + size]
            end = len(block.keys) if block.mask == "none" else start + len(queries) + block.offset
            first = 0 if rule.window is None else max(0, start + block.offset - rule.window + 1)
            if keys := block.keys[first : min(end, len(block.keys))]:
                mask: BlockMask = "none" if block.mask == "none" else "band"
                yield AttentionBlock(block.sequence, queries, keys, mask, start + block.offset - first)


def block_slices(block: AttentionBlock, positions: range) -> tuple[slice, slice, slice]:
    batch = slice(None) if block.sequence is None else slice(block.sequence, block.sequence + 1)
    return batch, slice(None), slice(positions.start, positions.stop)


# ----------------------------------------------------------------------------------------------------------------------
# One block


def block_forward(
    q_BHSd: Tensor, k_BKTd: Tensor, v_BKTd: Tensor, block: AttentionBlock, rule: ScoreRule
) -> tuple[Tensor, Tensor]:
    """Return output (B, H, S, d) and log-sum-exp (B, H, S) of one block; −∞ for queries that see none of the keys."""
    if has_block_kernel(q_BHSd, block, rule.softcap):
        return fused_forward(q_BHSd, k_BKTd, v_BKTd, block, rule.scale, rule.window)
    s_BKGST = block_scores(q_BHSd, k_BKTd, block, rule)
    lse_BKGS = s_BKGST.logsumexp(-1)
    p_BKGST = (s_BKGST - lse_BKGS.unsqueeze(-1)).exp_().nan_to_num_(0.0).to(v_BKTd.dtype)
    return (p_BKGST @ v_BKTd.unsqueeze(2)).flatten(1, 2), lse_BKGS.flatten(1, 2)


def block_backward(saved: SavedAttention, block: AttentionBlock, rule: ScoreRule) -> tuple[Tensor, Tensor, Tensor]:
    """Return one block's terms of the gradients of queries, keys and values."""
    if has_block_kernel(saved.q_BHSd, block, rule.softcap):
        return fused_backward(saved, block, rule.scale, rule.window)
    grad_BHSd, q_BHSd, k_BKTd, v_BKTd, out_BHSd, lse_BHS = saved
    groups = q_BHSd.shape[1] // k_BKTd.shape[1]
    grad_BKGSd, out_BKGSd, q_BKGSd = (x.unflatten(1, (-1, groups)) for x in (grad_BHSd, out_BHSd, q_BHSd))
    s_BKGST = block_scores(q_BHSd, k_BKTd, block, rule)
    p_BKGST = (s_BKGST - lse_BHS.unflatten(1, (-1, groups)).unsqueeze(-1)).exp_()
    grad_v_BKTd = (p_BKGST.to(v_BKTd.dtype).mT @ grad_BKGSd).sum(2)
    # Of a softmax: p · (dL/dp − Σ dL/dp · p), where that sum is grad · out (arXiv:2205.14135 §B.4).
    product_BKGS1 = (grad_BKGSd.to(p_BKGST.dtype) * out_BKGSd).sum(-1, keepdim=True)
    ds_BKGST = (grad_BKGSd @ v_BKTd.unsqueeze(2).mT).to(p_BKGST.dtype).sub_(product_BKGS1).mul_(p_BKGST)
    if rule.softcap is not None:
        ds_BKGST *= soft_cap_slope_(s_BKGST.clamp_(min=-rule.softcap), rule.softcap)
    ds_BKGST = ds_BKGST.mul_(rule.scale).to(q_BHSd.dtype)
    grad_q_BHSd = (ds_BKGST @ k_BKTd.unsqueeze(2)).flatten(1, 2)
    return grad_q_BHSd, (ds_BKGST.mT @ q_BKGSd).sum(2), grad_v_BKTd


def block_scores(q_BHSd: Tensor, k_BKTd: Tensor, block: AttentionBlock, rule: ScoreRule) -> Tensor:
    """Return the scores of a block (B, K, G, S, T), −∞ where a query doesn't see a key."""
    q_BKGSd = q_BHSd.unflatten(1, (k_BKTd.shape[1], -1))
    s_BKGST = (q_BKGSd @ k_BKTd.unsqueeze(2).mT).to(accumulation_dtype(q_BHSd.dtype)).mul_(rule.scale)
    if rule.softcap is not None:
        s_BKGST = soft_cap_(s_BKGST, rule.softcap)
    if block.mask == "none":
        return s_BKGST
    queries = torch.arange(len(block.queries), device=q_BHSd.device) + block.offset
    behind_ST = queries.unsqueeze(1) - torch.arange(len(block.keys), device=q_BHSd.device)
    hidden_ST = behind_ST < 0 if rule.window is None else (behind_ST < 0) | (behind_ST >= rule.window)
    return s_BKGST.masked_fill_(hidden_ST, -torch.inf)
