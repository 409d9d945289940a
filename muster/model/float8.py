"""Linear layers whose matmuls read fp8, with one scale for each tensor.

Inputs and weights are cast to e4m3, gradients, which vary more, to e5m2 (P. Micikevicius et al., arXiv:2209.05433 §3).
Before each use a tensor is divided by a scale that makes its largest value just fit (dynamic tensorwise scaling, as in
torchao's Float8Linear). Sums are in float32, results in the dtype of the input. Scales are powers of two, so that
scaling rounds nothing; a CPU therefore computes the same products from the same fp8 numbers in the input's dtype.

Suffixes of tensors: N rows, I inputs, O outputs.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FORWARD_DTYPE, GRADIENT_DTYPE = torch.float8_e4m3fn, torch.float8_e5m2
SIZE_MULTIPLE = 16
"""Sizes of a GPU's fp8 matmuls are multiples of this; a layer of other sizes stays as it is."""
LEAST_SCALE = 2.0**-100
FIRST_CAPABILITY = (8, 9)
"""CUDA capability of the first GPUs with fp8 matmuls (Ada, Hopper)."""


class Float8Operand(NamedTuple):
    """A matrix in fp8, which stands for `values · scale`."""

    values: Tensor
    scale: Tensor
    """float32 scalar, a power of two."""

    def transposed(self) -> "Float8Operand":
        return Float8Operand(self.values.t(), self.scale)

    def relaid(self) -> "Float8Operand":
        """Return the same matrix in the other memory layout, by rows or by columns; a CPU takes either."""
        if self.values.device.type == "cpu":
            return self
        return Float8Operand(self.values.t().contiguous().t(), self.scale)


def to_float8(x: Tensor, dtype: torch.dtype) -> Float8Operand:
    """Cast a matrix to fp8. Infinite and undefined elements become undefined, as does what is computed from them."""
    largest = torch.linalg.vector_norm(x, torch.inf).float()
    exponent = torch.log2(largest / torch.finfo(dtype).max).ceil()
    scale = torch.exp2(exponent).clamp(min=LEAST_SCALE)
    return Float8Operand((x / scale.to(x.dtype)).to(dtype), scale)


def float8_product(a: Float8Operand, b: Float8Operand, dtype: torch.dtype, fast: bool = False) -> Tensor:
    """Return a @ b. On a GPU `a` lies in memory by rows and `b` by columns; `fast`: it may sum partly in less than
    float32."""
    if a.values.device.type == "cpu":
        return (a.values.to(dtype) @ b.values.to(dtype)) * (a.scale * b.scale).to(dtype)
    return torch._scaled_mm(a.values, b.values, scale_a=a.scale, scale_b=b.scale, out_dtype=dtype, use_fast_accum=fast)


class _Float8Linear(torch.autograd.Function):
    """Keeps input and weight as they are and casts them anew in the backward, so that it saves no more than a plain
    linear layer. The result is no view: the residual is added to it in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight_OI)
        x8, weight8 = to_float8(x.flatten(0, -2), FORWARD_DTYPE), to_float8(weight_OI, FORWARD_DTYPE)
        y_NO = float8_product(x8, weight8.transposed(), x.dtype, fast=True)
        if bias_O is not None:
            y_NO += bias_O
        return torch.ops.aten._unsafe_view(y_NO, (*x.shape[:-1], len(weight_OI)))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight_OI = ctx.saved_tensors
        grad_NO = grads[0].flatten(0, -2).contiguous()
        grad8 = to_float8(grad_NO, GRADIENT_DTYPE)
        grad_x = grad_weight_OI = grad_bias_O = None
        if ctx.needs_input_grad[0]:
            grad_x_NI = float8_product(grad8, to_float8(weight_OI, FORWARD_DTYPE).relaid(), x.dtype)
            grad_x = grad_x_NI.view(x.shape)
        if ctx.needs_input_grad[1]:
            x8 = to_float8(x.flatten(0, -2), FORWARD_DTYPE)
            grad_weight_OI = float8_product(grad8.relaid().transposed(), x8.relaid(), x.dtype)
        if ctx.needs_input_grad[2]:
            grad_bias_O = grad_NO.sum(0)
        return grad_x, grad_weight_OI, grad_bias_O


class Float8Linear(nn.Linear):
    """Linear layer with fp8 matmuls; the bias is added, and its gradient summed, in the dtype of the input."""

    def forward(self, input: Tensor) -> Tensor:
        if input.shape[:-1].numel() % SIZE_MULTIPLE:
            return F.linear(input, self.weight, self.bias)
        return _Float8Linear.apply(input, self.weight, self.bias)  # type: ignore[return-value]


def apply_float8(block: nn.Module) -> None:
    """Let the linear layers of a block multiply in fp8, where their sizes allow it."""
    for part in block.modules():
        if type(part) is nn.Linear and not (part.in_features % SIZE_MULTIPLE or part.out_features % SIZE_MULTIPLE):
            part.__class__ = Float8Linear


def has_float8(device: torch.device) -> bool:
    """Return True if a device multiplies in fp8, or is a CPU, which emulates it."""
    return device.type != "cuda" or (
        torch.version.cuda is not None and torch.cuda.get_device_capability(device) >= FIRST_CAPABILITY
    )


def float8_note(device: torch.device) -> str | None:
    """Return one sentence where fp8 isn't what a device multiplies in."""
    if device.type == "cpu":
        return "fp8 is emulated: a CPU computes what a GPU would, more slowly than in bf16"
    if not has_float8(device):
        return "matmuls are in bf16 instead of fp8, which this GPU doesn't have"
    return None
