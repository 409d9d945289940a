"""Small functions with hand-written derivatives, where PyTorch's composition would move several times the memory.

Eager training on a CPU is bound by memory traffic outside the matmuls. Each function names the tensors that it saves
for its backward, which `muster.cost.memory` counts. None can be differentiated twice.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from muster.spec.model import ModelSpec
from muster.spec.model_components import Activation


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums, angles and losses of tensors of `dtype`: float32 at least."""
    return torch.promote_types(dtype, torch.float32)


# ----------------------------------------------------------------------------------------------------------------------
# Root-mean-square normalisation


class _RmsNorm(torch.autograd.Function):
    """y = x · r · (w + offset) with r = 1 / sqrt(mean(x²) + eps). Saves x, w and r."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
        ctx.offset = offset
        x_wide = x.to(accumulation_dtype(x.dtype))
        r = torch.linalg.vector_norm(x_wide, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, r)
        return (x_wide * r).mul_(weight.to(r.dtype) + offset if offset else weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, weight, r = ctx.saved_tensors
        width = x.shape[-1]
        x_wide, w, g = x.to(r.dtype), weight.to(r.dtype) + ctx.offset, grads[0].to(r.dtype)
        gx_ND = (g * x_wide).reshape(-1, width)
        grad_weight = torch.mv(gx_ND.t(), r.reshape(-1))
        # dL/dx = r·g·w − x·r³·mean(g·w·x)
        norm_term = torch.mv(gx_ND, w).view(r.shape) * r.pow(3).div_(-width)
        grad_x = (g * w).mul_(r).addcmul_(x_wide, norm_term)
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), None, None


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """Scale x to root mean square 1 over the last dimension, times `weight + offset` (arXiv:1910.07467).

    PyTorch has no CPU kernel for it and composes one that takes two to four times as long; and none that adds an offset
    in more digits than the weight has.
    """
    if x.device.type == "cpu" or offset:
        return _RmsNorm.apply(x, weight, eps, offset)  # type: ignore[return-value]
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


# ----------------------------------------------------------------------------------------------------------------------
# Activations


def activate(x: Tensor, kind: Activation) -> Tensor:
    """Apply the activation to each element. Saves x, and not the result, which the next matmul saves."""
    if kind == "silu":
        return F.silu(x)
    if kind == "relu":
        return F.threshold(x, 0.0, 0.0)
    return F.gelu(x, approximate=_APPROXIMATE[kind])


def _activate_backward(grad: Tensor, x: Tensor, kind: Activation) -> Tensor:
    if kind == "silu":
        return torch.ops.aten.silu_backward(grad, x)
    if kind == "relu":
        return torch.ops.aten.threshold_backward(grad, x, 0)
    return torch.ops.aten.gelu_backward(grad, x, approximate=_APPROXIMATE[kind])


_APPROXIMATE = {"gelu": "none", "gelu_tanh": "tanh"}


class _GatedActivation(torch.autograd.Function):
    """Saves gate and up; the backward computes the activation again, which costs less than saving it."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, kind: Activation) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.kind = kind
        return activate(gate, kind).mul_(up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        gate, up = ctx.saved_tensors
        grad_up = activate(gate, ctx.kind).mul_(grads[0])
        return _activate_backward(grads[0] * up, gate, ctx.kind), grad_up, None


def gated_activation(gate: Tensor, up: Tensor, kind: Activation = "silu") -> Tensor:
    """Return activation(gate) · up (arXiv:2002.05202)."""
    return _GatedActivation.apply(gate, up, kind)  # type: ignore[return-value]


class _ClampedSwiglu(torch.autograd.Function):
    """Saves gate and up, as `_GatedActivation` does."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, alpha: float, limit: float) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.alpha, ctx.limit = alpha, limit
        gate = gate.clamp(max=limit)
        y = (gate * alpha).sigmoid_().mul_(gate)
        return y.mul_(torch.clamp(up, -limit, limit, out=gate).add_(1))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        gate, up = ctx.saved_tensors
        alpha, limit = ctx.alpha, ctx.limit
        clamped = gate.clamp(max=limit)
        sigmoid = (clamped * alpha).sigmoid_()
        grad_up = (sigmoid * clamped).mul_(grads[0]).masked_fill_((up < -limit) | (up > limit), 0)
        # d (g · σ(α g)) / d g = σ · (1 + α · g · (1 − σ))
        clamped.addcmul_(clamped, sigmoid, value=-1).mul_(alpha).add_(1).mul_(sigmoid)
        grad_gate = clamped.mul_(torch.clamp(up, -limit, limit, out=sigmoid).add_(1)).mul_(grads[0])
        return grad_gate.masked_fill_(gate > limit, 0), grad_up, None, None


def clamped_swiglu(gate: Tensor, up: Tensor, alpha: float, limit: float) -> Tensor:
    """Return gate · sigmoid(α · gate) · (up + 1), of gates of at most `limit` and ups of at most `limit` either way
    (gpt-oss, arXiv:2508.10925 §2.1)."""
    return _ClampedSwiglu.apply(gate, up, alpha, limit)  # type: ignore[return-value]


def mlp_activation(spec: ModelSpec) -> Callable[..., Tensor]:
    """Return the function of the results of an MLP's first matrices: gate and up, or up alone."""
    if spec.swiglu_limit is not None:
        return partial(clamped_swiglu, alpha=spec.swiglu_alpha, limit=spec.swiglu_limit)
    return partial(gated_activation if spec.gated else activate, kind=spec.activation)


# ----------------------------------------------------------------------------------------------------------------------
# Soft caps


class _SoftCap(torch.autograd.Function):
    """Saves its result, from which the derivative follows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cap: float) -> Tensor:
        y = soft_cap_(x.clone(), cap)
        ctx.cap = cap
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (y,) = ctx.saved_tensors
        return soft_cap_slope_(y.clone(), ctx.cap).mul_(grads[0]), None


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """Return cap · tanh(x / cap), which lies between −cap and cap (arXiv:2408.00118 §2)."""
    return _SoftCap.apply(x, cap)  # type: ignore[return-value]


def soft_cap_(x: Tensor, cap: float) -> Tensor:
    """Replace x by cap · tanh(x / cap)."""
    return x.div_(cap).tanh_().mul_(cap)


def soft_cap_slope_(y: Tensor, cap: float) -> Tensor:
    """Replace y = cap · tanh(x / cap) by its derivative after x, 1 − (y / cap)²."""
    return y.div_(cap).square_().neg_().add_(1)


# ----------------------------------------------------------------------------------------------------------------------
# Rotation of pairs


class _ApplyRotary(torch.autograd.Function):
    """Rotary embedding in three passes over memory each way; the written-out formula takes five, its derivative seven.

    Saves nothing: the tables are constants that all layers share, kept on the context.
    """

    @staticmethod
    def forward(ctx: Any, x_BSHD: Tensor, cos_S1D: Tensor, sin_S1D: Tensor) -> Tensor:
        ctx.cos = cos_S1D
        ctx.sin = sin_S1D
        return _rotate_pairs(x_BSHD, cos_S1D, sin_S1D, 1.0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        # The transpose of a rotation is the rotation by minus the angle.
        return _rotate_pairs(grads[0], ctx.cos, ctx.sin, -1.0), None, None


def _rotate_pairs(x_BSHD: Tensor, cos_S1D: Tensor, sin_S1D: Tensor, sign: float) -> Tensor:
    width = cos_S1D.shape[-1]
    if width == x_BSHD.shape[-1]:
        y_BSHD = x_BSHD * cos_S1D
    else:
        y_BSHD = x_BSHD.clone(memory_format=torch.contiguous_format)
        y_BSHD[..., :width] *= cos_S1D
    half = width // 2
    y_BSHD[..., :half].addcmul_(x_BSHD[..., half:width], sin_S1D[..., half:], value=-sign)
    y_BSHD[..., half:width].addcmul_(x_BSHD[..., :half], sin_S1D[..., :half], value=sign)
    return y_BSHD


def apply_rotary(x_BSHD: Tensor, cos_S1D: Tensor, sin_S1D: Tensor) -> Tensor:
    """Rotate element i of each head's first half with element i of its second half by the angle of the tables; of heads
    that are wider than the tables, the first elements.

    This pairing is that of Hugging Face's Llama weights; Meta's own weights pair neighbours.
    """
    return _ApplyRotary.apply(x_BSHD, cos_S1D, sin_S1D)  # type: ignore[return-value]


class _RotateNeighbours(torch.autograd.Function):
    """Rotary embedding of neighbouring elements, the last ones of each head. Saves nothing, as `_ApplyRotary`."""

    @staticmethod
    def forward(ctx: Any, x_BSHD: Tensor, cos_S1D: Tensor, sin_S1D: Tensor) -> Tensor:
        ctx.cos = cos_S1D
        ctx.sin = sin_S1D
        return _rotate_neighbours(x_BSHD, cos_S1D, sin_S1D, 1.0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _rotate_neighbours(grads[0], ctx.cos, ctx.sin, -1.0), None, None


def _rotate_neighbours(x_BSHD: Tensor, cos_S1D: Tensor, sin_S1D: Tensor, sign: float) -> Tensor:
    width = cos_S1D.shape[-1]
    cos_S1P, sin_S1P = cos_S1D[..., : width // 2], sin_S1D[..., : width // 2]
    y_BSHD = x_BSHD.clone(memory_format=torch.contiguous_format)
    turned, given = y_BSHD[..., -width:], x_BSHD[..., -width:]
    turned[..., ::2].mul_(cos_S1P).addcmul_(given[..., 1::2], sin_S1P, value=-sign)
    turned[..., 1::2].mul_(cos_S1P).addcmul_(given[..., ::2], sin_S1P, value=sign)
    return y_BSHD


def rotate_neighbours(x_BSHD: Tensor, cos_S1D: Tensor, sin_S1D: Tensor) -> Tensor:
    """Rotate elements 2 i and 2 i + 1 of each head's last ones, as many as the tables are wide, by angle i.

    This pairing is DeepSeek's and the paper's (arXiv:2104.09864 §3.2.2); the halves of the tables are equal.
    """
    return _RotateNeighbours.apply(x_BSHD, cos_S1D, sin_S1D)  # type: ignore[return-value]
