"""PyTorch's fused kernels for one block of attention: they return the log-sum-exp, by which blocks are merged.

On a CPU there is a flash kernel for whole blocks and for causal squares. On a GPU FlashAttention-2 (arXiv:2307.08691)
also takes bands: it lays the last query over the last key, and shows a query keys from `left` before to `right` after
that diagonal. It returns +∞ for queries that see no key, so `trim_block` leaves these out.

Suffixes of tensors: B sequences, H query heads, K key/value heads, S queries, T keys, d head width.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from muster.layout.context_parallel import AttentionBlock
from muster.model.varlen_attention import fits_flash_attention

_forward_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_forward_gpu = torch.ops.aten._flash_attention_forward
_backward_gpu = torch.ops.aten._flash_attention_backward


class SavedAttention(NamedTuple):
    """Tensors from which a block's terms of the gradients are computed: those of its queries and keys."""

    grad_BHSd: Tensor
    q_BHSd: Tensor
    k_BKTd: Tensor
    v_BKTd: Tensor
    out_BHSd: Tensor
    """The complete output, of all blocks."""
    lse_BHS: Tensor
    """The complete log-sum-exp."""


def has_block_kernel(q_BHSd: Tensor, block: AttentionBlock, softcap: float | None) -> bool:
    """Return True where PyTorch has a fused kernel that returns the log-sum-exp of such a block."""
    if softcap is not None:
        return False
    if q_BHSd.device.type == "cpu":
        return block.mask != "band"
    # The kernels for AMD's GPUs have no bands whose diagonal is shifted.
    return fits_flash_attention(q_BHSd, q_BHSd.shape[3]) and (block.mask != "band" or torch.version.hip is None)


def fused_forward(
    q_BHSd: Tensor, k_BKTd: Tensor, v_BKTd: Tensor, block: AttentionBlock, scale: float, window: int | None
) -> tuple[Tensor, Tensor]:
    """Return output (B, H, S, d) and log-sum-exp (B, H, S) of a block whose queries all see some of its keys."""
    if q_BHSd.device.type == "cpu":
        return _forward_cpu(q_BHSd, k_BKTd, v_BKTd, 0.0, block.mask == "causal", scale=scale)
    return flash_forward(q_BHSd, k_BKTd, v_BKTd, block, scale, window)


def flash_forward(
    q_BHSd: Tensor, k_BKTd: Tensor, v_BKTd: Tensor, block: AttentionBlock, scale: float, window: int | None
) -> tuple[Tensor, Tensor]:
    """Return what `fused_forward` returns, on a GPU."""
    qkv = (x.transpose(1, 2) for x in (q_BHSd, k_BKTd, v_BKTd))
    lengths = q_BHSd.shape[2], k_BKTd.shape[2]
    left, right = _reach(block, window)
    out_BSHd, lse_BHS, *_ = _forward_gpu(
        *qkv,
        None,
        None,
        *lengths,
        0.0,
        block.mask == "causal",
        False,
        scale=scale,
        window_size_left=left,
        window_size_right=right,
    )
    return out_BSHd.transpose(1, 2), lse_BHS


def fused_backward(
    saved: SavedAttention, block: AttentionBlock, scale: float, window: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the block's terms of the gradients of queries, keys and values."""
    if saved.q_BHSd.device.type == "cpu":
        *tensors, out_BHSd, lse_BHS = saved
        complete = out_BHSd.contiguous(), lse_BHS.contiguous()
        return _backward_cpu(*tensors, *complete, 0.0, block.mask == "causal", scale=scale)
    return flash_backward(saved, block, scale, window)


def flash_backward(
    saved: SavedAttention, block: AttentionBlock, scale: float, window: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `fused_backward` returns, on a GPU."""
    *tensors_BHSd, lse_BHS = saved
    tensors = (x.transpose(1, 2) for x in tensors_BHSd)
    lengths = saved.q_BHSd.shape[2], saved.k_BKTd.shape[2]
    no_dropout = (torch.empty(shape, dtype=torch.uint64, device=lse_BHS.device) for shape in ((2,), ()))
    left, right = _reach(block, window)
    grads = _backward_gpu(
        *tensors,
        lse_BHS.contiguous(),
        None,
        None,
        *lengths,
        0.0,
        block.mask == "causal",
        *no_dropout,
        scale=scale,
        window_size_left=left,
        window_size_right=right,
    )
    grad_q_BHSd, grad_k_BKTd, grad_v_BKTd = (grad.transpose(1, 2) for grad in grads)
    return grad_q_BHSd, grad_k_BKTd, grad_v_BKTd


def _reach(block: AttentionBlock, window: int | None) -> tuple[int | None, int | None]:
    """Return the keys that a query of a band sees before and after FlashAttention's diagonal, None for all of them.

    Query i sees keys from i + offset − window + 1 to i + offset; the diagonal is at i + keys − queries.
    """
    if block.mask != "band":
        return None, None
    right = block.offset - (len(block.keys) - len(block.queries))
    return (None if window is None else window - 1 - right), right


def trim_block(block: AttentionBlock, window: int | None) -> AttentionBlock | None:
    """Return a band without the queries that see none of its keys and the keys that none of its queries sees; None if
    nothing is left."""
    queries, keys, offset = block.queries, block.keys, block.offset
    if block.mask != "band":
        return block
    first_query = max(0, -offset)
    last_query = len(queries) if window is None else min(len(queries), len(keys) - 1 - offset + window)
    first_key = 0 if window is None else max(0, first_query + offset - window + 1)
    last_key = min(len(keys), last_query + offset)
    if first_query >= last_query or first_key >= last_key:
        return None
    return AttentionBlock(
        block.sequence,
        queries[first_query:last_query],
        keys[first_key:last_key],
        "band",
        offset + first_query - first_key,
    )
