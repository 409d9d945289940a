"""Causal attention in PyTorch's own operations, with what its fused kernels don't have: soft-capped scores (Gemma 2,
arXiv:2408.00118 §2), dropout whose masks every plan shares (`muster.model.dropout`), and sinks where no kernel returns
the log-sum-exp.

Some rows of the scores are in memory at a time, as in flash attention (arXiv:2205.14135, arXiv:2307.08691): the forward
saves queries, keys, values, the output and the log-sum-exp of each row, and the backward computes the scores again.

Suffixes of tensors: B sequences, S positions, H query heads, K key/value heads, G query heads for each of these, R rows
(query positions) of a piece, T its keys, d head width.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from muster.model.attention_sinks import add_sinks_, sink_gradients
from muster.model.chunk_sizes import chunk_elements
from muster.model.dropout import ScoreDropout
from muster.model.kernels import accumulation_dtype, soft_cap_, soft_cap_slope_


@dataclass(frozen=True, eq=False)
class ScoreRules:
    """Rules by which scores become probabilities."""

    scale: float
    """Factor of the scores."""
    window: int | None = None
    """Positions that a position sees, itself the last of them; None: all before it."""
    softcap: float | None = None
    """Bound of the scaled scores."""
    dropout: ScoreDropout | None = None
    """Dropout of the probabilities."""
    starts_BS: Tensor | None = None
    """First position of each position's document, before which it sees none; None: 0."""


class _PiecewiseAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q_BHSd: Tensor, k_BKSd: Tensor, v_BKSd: Tensor, sinks_H: Tensor | None, rules: ScoreRules
    ) -> Tensor:
        batch, heads, length, width = q_BHSd.shape
        out_BSHd = q_BHSd.new_empty(batch, length, heads, width)
        lse_BHS = q_BHSd.new_empty(batch, heads, length, dtype=accumulation_dtype(q_BHSd.dtype))
        for rows, keys in _pieces(q_BHSd, rules.window):
            p_BKGRT = _scores(q_BHSd, k_BKSd, rows, keys, rules)
            max_BKGR1 = p_BKGRT.amax(-1, keepdim=True)
            sum_BKGR1 = p_BKGRT.sub_(max_BKGR1).exp_().sum(-1, keepdim=True)
            lse_BHS[:, :, rows] = sum_BKGR1.log().add_(max_BKGR1).squeeze(-1).flatten(1, 2)
            p_BKGRT = _dropped_(p_BKGRT.div_(sum_BKGR1), rules, rows, keys).to(v_BKSd.dtype)
            out_BSHd[:, rows] = _matmul(p_BKGRT, v_BKSd[:, :, keys]).flatten(1, 2).transpose(1, 2)
        add_sinks_(out_BSHd.transpose(1, 2), lse_BHS, sinks_H)
        ctx.rules = rules
        ctx.save_for_backward(q_BHSd, k_BKSd, v_BKSd, out_BSHd, lse_BHS, sinks_H)
        return out_BSHd.transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q_BHSd, k_BKSd, v_BKSd, out_BSHd, lse_BHS, sinks_H = ctx.saved_tensors
        grad_BHSd, rules = grads[0], ctx.rules
        groups = q_BHSd.shape[1] // k_BKSd.shape[1]
        grad_q_BHSd = torch.empty_like(q_BHSd)
        grad_k_BKSd, grad_v_BKSd = (torch.zeros_like(x, dtype=lse_BHS.dtype) for x in (k_BKSd, v_BKSd))
        for rows, keys in _pieces(q_BHSd, rules.window):
            y_BKGRT = _scores(q_BHSd, k_BKSd, rows, keys, rules)
            grad_BKGRd, out_BKGRd, q_BKGRd = (
                x[:, :, rows].unflatten(1, (-1, groups)) for x in (grad_BHSd, out_BSHd.transpose(1, 2), q_BHSd)
            )
            p_BKGRT = (y_BKGRT - lse_BHS[:, :, rows].unflatten(1, (-1, groups)).unsqueeze(-1)).exp_()
            # d p / d y of a softmax: p · (dL/dp − Σ dL/dp · p), where that sum is grad · out (arXiv:2205.14135 §B.4).
            product_BKGR1 = (grad_BKGRd.to(lse_BHS.dtype) * out_BKGRd).sum(-1, keepdim=True)
            ds_BKGRT = _matmul(grad_BKGRd, v_BKSd[:, :, keys].mT).to(lse_BHS.dtype)
            ds_BKGRT = _dropped_(ds_BKGRT, rules, rows, keys).sub_(product_BKGR1).mul_(p_BKGRT)
            p_BKGRT = _dropped_(p_BKGRT, rules, rows, keys).to(v_BKSd.dtype)
            grad_v_BKSd[:, :, keys] += _matmul_transposed(p_BKGRT, grad_BKGRd)
            del p_BKGRT
            if rules.softcap is not None:
                # Hidden scores are −∞ instead of capped; their p, and with it the gradient, is 0 whatever the slope.
                ds_BKGRT.mul_(soft_cap_slope_(y_BKGRT.clamp_(min=-rules.softcap), rules.softcap))
            ds_BKGRT = ds_BKGRT.mul_(rules.scale).to(q_BHSd.dtype)
            grad_q_BHSd[:, :, rows] = _matmul(ds_BKGRT, k_BKSd[:, :, keys]).flatten(1, 2)
            grad_k_BKSd[:, :, keys] += _matmul_transposed(ds_BKGRT, q_BKGRd)
        grad_sinks_H = sink_gradients(grad_BHSd, out_BSHd.transpose(1, 2), lse_BHS, sinks_H)
        return grad_q_BHSd, grad_k_BKSd.to(k_BKSd.dtype), grad_v_BKSd.to(v_BKSd.dtype), grad_sinks_H, None


def piecewise_attention(
    q_BHSd: Tensor, k_BKSd: Tensor, v_BKSd: Tensor, rules: ScoreRules, sinks_H: Tensor | None = None
) -> Tensor:
    """Return causal attention (B, H, S, d) by these rules, with a sink for each head or None."""
    return _PiecewiseAttention.apply(q_BHSd, k_BKSd, v_BKSd, sinks_H, rules)  # type: ignore[return-value]


def whole_scores_attention(
    q_BHSd: Tensor,
    k_BKTd: Tensor,
    v_BKTd: Tensor,
    visible: Tensor | None,
    scale: float,
    softcap: float | None,
    sinks_H: Tensor | None,
) -> Tensor:
    """Return attention to the keys that the mask shows (None: all), with all scores in memory; for generation."""
    q_BKGSd = q_BHSd.unflatten(1, (k_BKTd.shape[1], -1))
    y_BKGST = _matmul(q_BKGSd, k_BKTd.mT).to(accumulation_dtype(q_BHSd.dtype)).mul_(scale)
    if softcap is not None:
        soft_cap_(y_BKGST, softcap)
    if visible is not None:
        y_BKGST.masked_fill_(~visible.unsqueeze(1), -torch.inf)
    if sinks_H is not None:  # a key without a value
        sinks_BKGS1 = sinks_H.to(y_BKGST.dtype).view(1, *y_BKGST.shape[1:3], 1, 1).expand(*y_BKGST.shape[:-1], 1)
        p_BKGST = torch.cat((y_BKGST, sinks_BKGS1), -1).softmax(-1)[..., :-1]
        return _matmul(p_BKGST.to(v_BKTd.dtype), v_BKTd).flatten(1, 2)
    return _matmul(y_BKGST.softmax(-1).to(v_BKTd.dtype), v_BKTd).flatten(1, 2)


def _pieces(q_BHSd: Tensor, window: int | None) -> Iterator[tuple[slice, slice]]:
    """Yield the rows of each piece, and the keys that at least one of them sees."""
    batch, heads, length, _ = q_BHSd.shape
    rows = max(1, chunk_elements("attention", q_BHSd.device.type) // (batch * heads * length))
    for start in range(0, length, rows):
        end = min(start + rows, length)
        yield slice(start, end), slice(0 if window is None else max(0, start - window + 1), end)


def _scores(q_BHSd: Tensor, k_BKSd: Tensor, rows: slice, keys: slice, rules: ScoreRules) -> Tensor:
    """Return the scores of a piece (B, K, G, R, T), −∞ where a row doesn't see a key."""
    q_BKGRd = q_BHSd[:, :, rows].unflatten(1, (k_BKSd.shape[1], -1))
    y_BKGRT = _matmul(q_BKGRd, k_BKSd[:, :, keys].mT).to(accumulation_dtype(q_BHSd.dtype)).mul_(rules.scale)
    if rules.softcap is not None:
        soft_cap_(y_BKGRT, rules.softcap)
    row_R1 = torch.arange(rows.start, rows.stop, device=q_BHSd.device).unsqueeze(1)
    key_T = torch.arange(keys.start, keys.stop, device=q_BHSd.device)
    behind_RT = row_R1 - key_T
    hidden_RT = behind_RT < 0 if rules.window is None else (behind_RT < 0) | (behind_RT >= rules.window)
    if rules.starts_BS is not None:
        hidden_BRT = hidden_RT | (key_T < rules.starts_BS[:, rows].unsqueeze(2))
        return y_BKGRT.masked_fill_(hidden_BRT[:, None, None], -torch.inf)
    return y_BKGRT.masked_fill_(hidden_RT, -torch.inf)


def _dropped_(p_BKGRT: Tensor, rules: ScoreRules, rows: slice, keys: slice) -> Tensor:
    """Replace a piece's probabilities, or the gradients after them, by those after dropout."""
    if rules.dropout is None:
        return p_BKGRT
    heads = p_BKGRT.shape[1] * p_BKGRT.shape[2]
    kept_BHRT = rules.dropout.kept(heads, rows, keys)
    return p_BKGRT.masked_fill_(kept_BHRT.logical_not_().view(p_BKGRT.shape), 0).mul_(rules.dropout.scale)


def _matmul(x_BKGRn: Tensor, y_BKnm: Tensor) -> Tensor:
    """Multiply the rows of all query heads of a group by the one matrix of their key/value head."""
    return (x_BKGRn.flatten(2, 3) @ y_BKnm).unflatten(2, x_BKGRn.shape[2:4])


def _matmul_transposed(x_BKGRT: Tensor, y_BKGRd: Tensor) -> Tensor:
    """Return Σ over groups and rows of x · y: (B, K, T, d)."""
    return x_BKGRT.flatten(2, 3).mT @ y_BKGRd.flatten(2, 3)
