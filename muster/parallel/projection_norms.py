"""Norms over all heads of queries and keys, of which each tensor-parallel rank has some."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from muster.model.attention import Attention
from muster.model.decoder import Decoder
from muster.model.kernels import accumulation_dtype
from muster.model.norms import RmsNorm
from muster.parallel.axis import TensorAxis
from muster.spec.model import ModelSpec


class _ProjectionNorms(torch.autograd.Function):
    """RMSNorms of queries and keys over the heads of all ranks; saves both, the weights, and a statistic per position.

    `kv_copies` ranks hold the same key heads: each adds its share to their mean square, and has its share of their
    gradient, the sum over the copies being the whole.
    """

    @staticmethod
    def forward(
        ctx: Any,
        axis: TensorAxis,
        widths: tuple[int, int],
        kv_copies: int,
        eps: float,
        q: Tensor,
        k: Tensor,
        q_weight: Tensor,
        k_weight: Tensor,
    ) -> tuple[Tensor, Tensor]:
        ctx.axis, ctx.widths, ctx.kv_copies = axis, widths, kv_copies
        *normed, q_scale, k_scale = projection_norms_forward(axis, widths, kv_copies, eps, q, k, q_weight, k_weight)
        ctx.save_for_backward(q, k, q_weight, k_weight, q_scale, k_scale)
        return normed[0], normed[1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        made = projection_norms_backward(ctx.axis, ctx.widths, ctx.kv_copies, grads, ctx.saved_tensors)
        return None, None, None, None, *made


def projection_norms_forward(
    axis: TensorAxis,
    widths: Sequence[int],
    kv_copies: int,
    eps: float,
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return both normed, and the factor of each position of either."""
    wide = [x.to(accumulation_dtype(x.dtype)) for x in (q, k)]
    sums_2BS = torch.stack([torch.linalg.vector_norm(x, dim=-1).square_() for x in wide])
    sums_2BS[1] /= kv_copies
    sums_2BS = axis.all_reduce(sums_2BS).wait()
    scales = [(total / width).add_(eps).rsqrt_().unsqueeze(-1) for total, width in zip(sums_2BS, widths, strict=True)]
    normed = [(x * r).mul_(weight).to(q.dtype) for x, r, weight in zip(wide, scales, (q_weight, k_weight), strict=True)]
    return normed[0], normed[1], scales[0], scales[1]


def projection_norms_backward(
    axis: TensorAxis, widths: Sequence[int], kv_copies: int, grads: Sequence[Tensor], saved: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Return the gradients of queries, keys and both weights; `saved`: these four, and the factors of either."""
    q, k, q_weight, k_weight, *scales = saved
    parts = list(zip(grads, (q, k), (q_weight, k_weight), scales, strict=True))
    # As in `muster.model.kernels`: dL/dx = r·g·w − x·r³·mean(g·w·x), where the mean is over all ranks' elements.
    products_2BS = torch.stack([((g.to(r.dtype) * x.to(r.dtype)) @ w.to(r.dtype)) for g, x, w, r in parts])
    products_2BS = axis.all_reduce(products_2BS).wait()
    grad_inputs, grad_weights = [], []
    for (g, x, w, r), product_BS, width, share in zip(parts, products_2BS, widths, (1, kv_copies), strict=True):
        g_wide, x_wide = g.to(r.dtype), x.to(r.dtype)
        grad_weights.append((g_wide * x_wide).mul_(r).flatten(0, -2).sum(0).to(w.dtype))
        norm_term = product_BS.unsqueeze(-1) * r.pow(3).div_(-width * share)
        grad_inputs.append((g_wide * w).mul_(r).addcmul_(x_wide, norm_term).to(x.dtype))
    return *grad_inputs, *grad_weights


def normalize_sharded_projections(
    axis: TensorAxis, widths: tuple[int, int], kv_copies: int, q: Tensor, k: Tensor, q_norm: RmsNorm, k_norm: RmsNorm
) -> tuple[Tensor, Tensor]:
    """Apply norms over all heads to a rank's queries and keys; `widths` are those of all heads together."""
    return _ProjectionNorms.apply(axis, widths, kv_copies, q_norm.eps, q, k, q_norm.weight, k_norm.weight)  # type: ignore[return-value]


def apply_projection_norms(module: Decoder, spec: ModelSpec, axis: TensorAxis) -> None:
    """Let a decoder's norms over all heads sum over the ranks of an axis, each of which has some of the heads."""
    widths = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    normalize = partial(normalize_sharded_projections, axis, widths, max(1, axis.size // spec.num_kv_heads))
    for part in module.modules():
        if isinstance(part, Attention):
            part.normalize_projections = normalize  # type: ignore[method-assign]
