"""Small functions with a derivative written by hand, where what PyTorch composes moves several times the memory.

Eager training on a CPU is bound by memory traffic outside the matrix products. Each function here names what it saves
for its backward, which is what `muster.cost.memory` counts. None can be differentiated twice.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums, angles and the loss are computed for tensors of `dtype`: float32 at least."""
    return torch.promote_types(dtype, torch.float32)


# ----------------------------------------------------------------------------------------------------------------------
# Root-mean-square normalisation


class _RmsNorm(torch.autograd.Function):
    """y = x · r · w with r = 1 / sqrt(mean(x²) + eps). Saves x, w and r."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x_wide = x.to(wide(x.dtype))
        r = torch.linalg.vector_norm(x_wide, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, r)
        return (x_wide * r).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, r = ctx.saved_tensors
        width = x.shape[-1]
        x_wide, w, g = x.to(r.dtype), weight.to(r.dtype), grads[0].to(r.dtype)
        gx_ND = (g * x_wide).reshape(-1, width)
        grad_weight = torch.mv(gx_ND.t(), r.reshape(-1))
        # dL/dx = r·g·w − x·r³·mean(g·w·x)
        pull = torch.mv(gx_ND, w).view(r.shape) * r.pow(3).div_(-width)
        grad_x = (g * w).mul_(r).addcmul_(x_wide, pull)
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x scaled to root mean square 1 over the last dimension, times `weight` (arXiv:1910.07467).

    On a CPU PyTorch has no kernel for it and composes one that takes two to four times as long.
    """
    if x.device.type == "cpu":
        return _RmsNorm.apply(x, weight, eps)  # type: ignore[return-value]
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


# ----------------------------------------------------------------------------------------------------------------------
# Gated linear unit


class _Swiglu(torch.autograd.Function):
    """Saves gate and up; silu(gate) is computed again in the backward, which costs less than keeping it does."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        grad_up = F.silu(gate).mul_(grads[0])
        grad_gate = torch.ops.aten.silu_backward(grads[0] * up, gate)
        return grad_gate, grad_up


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up (arXiv:2002.05202)."""
    return _Swiglu.apply(gate, up)  # type: ignore[return-value]


# ----------------------------------------------------------------------------------------------------------------------
# Rotation of pairs


class _Rotate(torch.autograd.Function):
    """Three passes over memory each way, where the written-out formula takes five and its derivative seven.

    Saves nothing: the tables are constants that all layers share, so they hang on the context.
    """

    @staticmethod
    def forward(ctx: Any, x_BSHD: Tensor, cos_S1D: Tensor, sin_S1D: Tensor) -> Tensor:
        ctx.cos, ctx.sin = cos_S1D, sin_S1D
        return _turn(x_BSHD, cos_S1D, sin_S1D, 1.0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        # The transpose of a rotation is the rotation by minus the angle.
        return _turn(grads[0], ctx.cos, ctx.sin, -1.0), None, None


def _turn(x_BSHD: Tensor, cos_S1D: Tensor, sin_S1D: Tensor, sign: float) -> Tensor:
    half = x_BSHD.shape[-1] // 2
    y_BSHD = x_BSHD * cos_S1D
    y_BSHD[..., :half].addcmul_(x_BSHD[..., half:], sin_S1D[..., half:], value=-sign)
    y_BSHD[..., half:].addcmul_(x_BSHD[..., :half], sin_S1D[..., :half], value=sign)
    return y_BSHD


def rotate(x_BSHD: Tensor, cos_S1D: Tensor, sin_S1D: Tensor) -> Tensor:
    """Number i of each head's first half turned with number i of its second half by the angle of the tables.

    This pairing is that of Hugging Face's Llama weights; Meta's own pairs neighbours.
    """
    return _Rotate.apply(x_BSHD, cos_S1D, sin_S1D)  # type: ignore[return-value]
