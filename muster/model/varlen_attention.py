"""Causal attention of sequences of unequal lengths, each of which sees itself alone (variable-length attention): packed
documents, and sequences under a sliding window.

The sequences lie one behind another along one dimension, so that only the scores that count are computed, and no mask
of length² is stored. A GPU's kernel takes all of them in one call (the interface of FlashAttention's
`flash_attn_varlen_func`, arXiv:2307.08691); on a CPU one autograd node calls PyTorch's flash kernel on one sequence, or
one band of a window, after another.

Suffixes of tensors: N rows of a batch, T positions of all sequences, H query heads, K key/value heads, d head width.
"""

import inspect
from collections.abc import Callable, Sequence
from functools import lru_cache
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from muster.model.attention_sinks import add_sinks_, sink_gradients
from muster.model.kernels import accumulation_dtype

MAX_HEAD_DIM = 256
"""Widest heads of FlashAttention's kernels."""
BAND_QUERIES = 64
"""Queries of one band of a window on a CPU: of 64, 128 and 256 the fastest for windows of 64 to 1,024."""
_forward_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


# ----------------------------------------------------------------------------------------------------------------------
# On a CPU


class Piece(NamedTuple):
    """Some queries of a sequence and all keys that one of them sees, as positions from `begin` to `end`."""

    begin: int
    end: int
    first_key: int
    """Position of the first key; the last is that of the last query."""
    in_window: bool
    """True if the window hides some of the keys from some of the queries."""


@lru_cache(maxsize=256)
def sequence_pieces(lengths: tuple[int, ...], window: int | None) -> tuple[Piece, ...]:
    """Return the pieces of sequences of these lengths: whole ones where the window reaches everywhere, else bands."""
    pieces: list[Piece] = []
    begin = 0
    for length in lengths:
        end = begin + length
        if window is None or length <= window:
            pieces.append(Piece(begin, end, begin, False))
        else:
            for at in range(begin, end, BAND_QUERIES):
                last, first_key = min(at + BAND_QUERIES, end), max(begin, at - window + 1)
                pieces.append(Piece(at, last, first_key, last - begin > window or first_key < at))
        begin = end
    return tuple(pieces)


class _BandMask:
    """Terms added to the scores of bands: −∞ where a query doesn't see a key. One matrix has those of every band, the
    first of its keys is `window − 1` before the first query."""

    def __init__(self, window: int | None, dtype: torch.dtype) -> None:
        self._window = window or 0
        keys_T, queries_R1 = torch.arange(BAND_QUERIES + self._window), torch.arange(BAND_QUERIES).unsqueeze(1)
        hidden_RT = (keys_T < queries_R1) | (keys_T >= queries_R1 + self._window)
        self._terms_RT = torch.zeros(hidden_RT.shape, dtype=dtype).masked_fill_(hidden_RT, -torch.inf)

    def of(self, piece: Piece) -> Tensor | None:
        """Return the terms of one piece; None where only keys after their query are hidden."""
        if not piece.in_window:
            return None
        rows, first = piece.end - piece.begin, self._window - 1 - (piece.begin - piece.first_key)
        return self._terms_RT[:rows, first : self._window - 1 + rows]


class _PiecewiseAttention(torch.autograd.Function):
    """Attention piece by piece. Saves queries, keys, values, the output and each row's log-sum-exp, as the kernel for a
    whole sequence does."""

    @staticmethod
    def forward(
        ctx: Any,
        q_NHTd: Tensor,
        k_NKTd: Tensor,
        v_NKTd: Tensor,
        sinks_H: Tensor | None,
        pieces: Sequence[Piece],
        window: int | None,
        scale: float | None,
    ) -> Tensor:
        batch, heads, length, width = q_NHTd.shape
        out_NHTd = q_NHTd.new_empty(batch, length, heads, width).transpose(1, 2)
        lse_NHT = q_NHTd.new_empty(batch, length, heads, dtype=accumulation_dtype(q_NHTd.dtype)).transpose(1, 2)
        masks = _BandMask(window, q_NHTd.dtype)
        for piece in pieces:
            rows, keys, mask = slice(piece.begin, piece.end), slice(piece.first_key, piece.end), masks.of(piece)
            own = q_NHTd[:, :, rows], k_NKTd[:, :, keys], v_NKTd[:, :, keys]
            out_NHTd[:, :, rows], lse_NHT[:, :, rows] = _forward_cpu(
                *own, 0.0, mask is None, attn_mask=mask, scale=scale
            )
        add_sinks_(out_NHTd, lse_NHT, sinks_H)
        ctx.pieces, ctx.window, ctx.scale = pieces, window, scale
        ctx.save_for_backward(q_NHTd, k_NKTd, v_NKTd, out_NHTd, lse_NHT, sinks_H)
        return out_NHTd

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q_NHTd, k_NKTd, v_NKTd, out_NHTd, lse_NHT, sinks_H = ctx.saved_tensors
        overlaps = any(piece.in_window for piece in ctx.pieces)
        grad_q, grad_k, grad_v = (_like(x) for x in (q_NHTd, k_NKTd, v_NKTd))
        if overlaps:  # keys are in several bands, whose gradients are summed
            grad_k, grad_v = (_like(x, lse_NHT.dtype).zero_() for x in (k_NKTd, v_NKTd))
        masks = _BandMask(ctx.window, q_NHTd.dtype)
        for piece in ctx.pieces:
            rows, keys, mask = slice(piece.begin, piece.end), slice(piece.first_key, piece.end), masks.of(piece)
            own_q, own_k, own_v = _backward_cpu(
                grads[0][:, :, rows],
                q_NHTd[:, :, rows],
                k_NKTd[:, :, keys],
                v_NKTd[:, :, keys],
                out_NHTd[:, :, rows],
                lse_NHT[:, :, rows],
                0.0,
                mask is None,
                attn_mask=mask,
                scale=ctx.scale,
            )
            grad_q[:, :, rows] = own_q
            if overlaps:
                grad_k[:, :, keys] += own_k
                grad_v[:, :, keys] += own_v
            else:
                grad_k[:, :, keys], grad_v[:, :, keys] = own_k, own_v
        grad_sinks = sink_gradients(grads[0], out_NHTd, lse_NHT, sinks_H)
        return grad_q, grad_k.to(k_NKTd.dtype), grad_v.to(v_NKTd.dtype), grad_sinks, None, None, None


def _like(x_NHTd: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return memory for a tensor of this shape, laid out as linear layers read it."""
    batch, heads, length, width = x_NHTd.shape
    return x_NHTd.new_empty(batch, length, heads, width, dtype=dtype or x_NHTd.dtype).transpose(1, 2)


# ----------------------------------------------------------------------------------------------------------------------
# On a GPU

GpuKernel = Callable[[Tensor, Tensor, Tensor, Tensor, int, int | None, float | None], Tensor]
"""Attention of queries (T, H, d) to keys and values (T, K, d), from the first position of each sequence and the end of
the last (int32), the longest length, the window and the scale."""


def _torch_kernel() -> GpuKernel | None:
    """Return PyTorch's kernel; None where PyTorch has none, or one that knows no windows yet."""
    try:
        kernel = import_module("torch.nn.attention.varlen").varlen_attn
    except (ImportError, AttributeError):
        return None
    known = inspect.signature(kernel).parameters
    if not {"window_size", "scale"} <= known.keys():
        return None

    def attend(
        q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int, window: int | None, scale: float | None
    ) -> Tensor:
        grouped = {"enable_gqa": q.shape[1] != k.shape[1]} if "enable_gqa" in known else {}
        reach = _window_size(window)
        return kernel(q, k, v, starts, starts, longest, longest, scale=scale, window_size=reach, **grouped)

    return attend


def _flash_kernel() -> GpuKernel | None:
    """Return the kernel of the package flash-attn, where that is installed."""
    try:
        kernel = import_module("flash_attn").flash_attn_varlen_func
    except (ImportError, AttributeError):
        return None

    def attend(
        q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int, window: int | None, scale: float | None
    ) -> Tensor:
        reach = _window_size(window)
        own = {"softmax_scale": scale, "causal": True, "window_size": reach}
        return kernel(q, k, v, starts, starts, longest, longest, **own)

    return attend


def _window_size(window: int | None) -> tuple[int, int]:
    """Return the positions before and after a query that it sees beside its own; −1: all before it."""
    return (-1 if window is None else window - 1, 0)


@lru_cache
def gpu_kernel() -> GpuKernel | None:
    """Return the kernel of this machine's programs."""
    return _torch_kernel() or _flash_kernel()


class _FlashWithSinks(torch.autograd.Function):
    """PyTorch's FlashAttention-2 for sequences one behind another, of queries (T, H, d), whose log-sum-exp (H, T) gets
    the sinks."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks_H: Tensor,
        starts: Tensor,
        longest: int,
        left: int,
        scale: float,
    ) -> Tensor:
        reach = None if left < 0 else left
        own = {"scale": scale, "window_size_left": reach, "window_size_right": 0}
        out, lse_HT, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, starts, starts, longest, longest, 0.0, True, False, **own
        )
        add_sinks_(out.transpose(0, 1).unsqueeze(0), lse_HT.unsqueeze(0), sinks_H)
        ctx.longest, ctx.own = longest, own
        ctx.save_for_backward(q, k, v, sinks_H, starts, out, lse_HT)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks_H, starts, out, lse_HT = ctx.saved_tensors
        no_dropout = (torch.empty(shape, dtype=torch.uint64, device=q.device) for shape in ((2,), ()))
        grad_q, grad_k, grad_v = torch.ops.aten._flash_attention_backward(
            grads[0], q, k, v, out, lse_HT, starts, starts, ctx.longest, ctx.longest, 0.0, True, *no_dropout, **ctx.own
        )
        grad_1HTd, out_1HTd = (x.transpose(0, 1).unsqueeze(0) for x in (grads[0], out))
        grad_sinks_H = sink_gradients(grad_1HTd, out_1HTd, lse_HT.unsqueeze(0), sinks_H)
        return grad_q, grad_k, grad_v, grad_sinks_H, None, None, None, None


@lru_cache
def _has_flash_attention(device: torch.device) -> bool:
    """Return True for a GPU that FlashAttention-2 runs on: Ampere and later, or one of AMD's."""
    return torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 0)


# ----------------------------------------------------------------------------------------------------------------------
# On either


def has_varlen_attention(x: Tensor, head_dim: int) -> bool:
    """Return True if `varlen_attention` runs on the device of a tensor, in its dtype."""
    if x.device.type != "cuda":
        return x.device.type == "cpu"
    return fits_flash_attention(x, head_dim) and gpu_kernel() is not None


def fits_flash_attention(x: Tensor, head_dim: int) -> bool:
    """Return True if FlashAttention-2 runs on the GPU of a tensor, in its dtype."""
    fits = x.dtype in (torch.bfloat16, torch.float16) and head_dim <= MAX_HEAD_DIM and head_dim % 8 == 0
    return fits and x.device.type == "cuda" and _has_flash_attention(x.device)


def varlen_attention(
    qkv_BHSd: tuple[Tensor, ...],
    lengths: tuple[int, ...],
    starts: Tensor | None,
    window: int | None,
    scale: float | None,
    sinks_H: Tensor | None = None,
) -> Tensor | None:
    """Return causal attention (B, H, S, d) of sequences of these lengths, which add up to B · S, one behind another in
    the order of the batch; each position sees itself and those before it as far as `window` reaches. None where
    `has_varlen_attention` finds no kernel.

    `starts`: the first position of each sequence and the end of the last, int32 on the device; None: made from the
    lengths. Scores are multiplied by `scale` (None: 1 / √d). `sinks_H`: see `muster.model.attention_sinks`. Gradients
    can't be differentiated again.
    """
    if not has_varlen_attention(qkv_BHSd[0], qkv_BHSd[0].shape[3]):
        return None
    batch, _, length, _ = qkv_BHSd[0].shape
    if qkv_BHSd[0].device.type == "cpu":
        alike = lengths == (length,) * batch
        rows = qkv_BHSd if alike else tuple(_in_one_row(x) for x in qkv_BHSd)
        pieces = sequence_pieces(lengths[:1] if alike else lengths, window)
        out_NHTd: Tensor = _PiecewiseAttention.apply(*rows, sinks_H, pieces, window, scale)  # type: ignore[assignment]
        return out_NHTd if alike else out_NHTd.transpose(1, 2).view(batch, length, *_heads(out_NHTd)).transpose(1, 2)
    return _attend_on_gpu(qkv_BHSd, lengths, starts, window, scale, sinks_H)


def _attend_on_gpu(
    qkv_BHSd: tuple[Tensor, ...],
    lengths: tuple[int, ...],
    starts: Tensor | None,
    window: int | None,
    scale: float | None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    kernel = gpu_kernel()
    assert kernel is not None, "has_varlen_attention found one"
    batch, _, length, _ = qkv_BHSd[0].shape
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in qkv_BHSd)
    if starts is None:
        starts = torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=q.device)
    longest = max(lengths)
    reach = window if window is not None and window < longest else None
    if sinks_H is None:
        out = kernel(q, k, v, starts, longest, reach, scale)
    else:
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        out = _FlashWithSinks.apply(q, k, v, sinks_H, starts, longest, _window_size(reach)[0], scale)
    return out.unflatten(0, (batch, length)).transpose(1, 2)


def _in_one_row(x_BHSd: Tensor) -> Tensor:
    """Return the positions of all rows of a batch in one: (1, H, B · S, d)."""
    return x_BHSd.transpose(1, 2).flatten(0, 1).transpose(0, 1).unsqueeze(0)


def _heads(x_NHTd: Tensor) -> tuple[int, int]:
    return x_NHTd.shape[1], x_NHTd.shape[3]
