"""Linear layers whose matmuls read fp8, scaled as a whole, by rows, or by blocks of 32.

Each matmul is a @ bᵀ of two operands whose rows run along the sum. Before each use an operand is divided by scales that
make its largest values just fit (dynamic scaling), and cast: P. Micikevicius et al., arXiv:2209.05433 §3. The recipes
are those of torchtitan and torchao:

* tensorwise: one scale for a tensor; inputs and weights are e4m3, gradients, which vary more, e5m2.
* rowwise: a scale for each row, so that one large value costs no other row its precision; all are e4m3.
* mxfp8: a scale for each 32 neighbouring elements of a row (OCP Microscaling Formats 1.0 §5), rounded up to a power of
  two (A. Mishra et al., arXiv:2506.08027); all are e4m3.

Rows and blocks run along the sum of each matmul, so the backward casts transposes anew; a scale of a whole tensor is
that of its transpose. Sums are in float32, results in the dtype of the input. Scales are powers of two, so that scaling
rounds nothing; a CPU therefore computes the same products from the same fp8 numbers in the input's dtype.

Suffixes of tensors: N rows, I inputs, O outputs; M × K and N × K the operands of a product.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from muster.spec.plan import Float8Recipe

FORWARD_DTYPE, GRADIENT_DTYPE = torch.float8_e4m3fn, torch.float8_e5m2
SIZE_MULTIPLE: dict[Float8Recipe, int] = {"tensorwise": 16, "rowwise": 16, "mxfp8": 32}
"""Sizes of a GPU's fp8 matmuls are multiples of this; a layer of other sizes stays as it is."""
BLOCK_SIZE = 32
"""Elements that share a scale under mxfp8."""
LEAST_SCALE = 2.0**-100
FIRST_CAPABILITY: dict[Float8Recipe, tuple[int, int]] = {"tensorwise": (8, 9), "rowwise": (8, 9), "mxfp8": (10, 0)}
"""CUDA capability of the first GPUs with such matmuls: Ada and Hopper, or Blackwell."""


class Float8Operand(NamedTuple):
    """A matrix in fp8, which stands for `values · scale`."""

    values: Tensor
    scale: Tensor
    """Powers of two in float32: a scalar, one for each row (N, 1), or for each block of a row (N, K / 32)."""
    recipe: Float8Recipe

    def transposed(self) -> "Float8Operand":
        """Return the transpose of a matrix with one scale."""
        return self._replace(values=self.values.t())


def to_float8(x_NK: Tensor, dtype: torch.dtype, recipe: Float8Recipe = "tensorwise") -> Float8Operand:
    """Cast a matrix to fp8. Infinite and undefined elements become undefined, as does what is computed from them."""
    if recipe == "mxfp8":
        blocks_NGB = x_NK.unflatten(-1, (-1, BLOCK_SIZE))
        scale = _scale(torch.linalg.vector_norm(blocks_NGB, torch.inf, dim=-1), dtype)
        return Float8Operand((blocks_NGB / scale.to(x_NK.dtype).unsqueeze(-1)).to(dtype).flatten(-2), scale, recipe)
    norm = partial(torch.linalg.vector_norm, x_NK, torch.inf)
    scale = _scale(norm(dim=-1, keepdim=True) if recipe == "rowwise" else norm(), dtype)
    return Float8Operand((x_NK / scale.to(x_NK.dtype)).to(dtype), scale, recipe)


def _scale(largest: Tensor, dtype: torch.dtype) -> Tensor:
    exponent = torch.log2(largest.float() / torch.finfo(dtype).max).ceil()
    return torch.exp2(exponent).clamp(min=LEAST_SCALE)


def float8_product(a_MK: Float8Operand, b_NK: Float8Operand, dtype: torch.dtype, fast: bool = False) -> Tensor:
    """Return a @ bᵀ (M, N) of operands with scales of the same kind; `fast`: a GPU may sum partly in less than
    float32."""
    if a_MK.values.device.type == "cpu":
        return _emulated_product(a_MK, b_NK, dtype)
    # Kernels read both operands by rows of contiguous memory.
    a, b = a_MK.values.contiguous(), b_NK.values.contiguous().t()
    scale_a, scale_b = a_MK.scale, b_NK.scale
    if a_MK.recipe == "mxfp8":
        scale_a, scale_b = swizzled(scale_a), swizzled(scale_b)
    elif a_MK.recipe == "rowwise":
        scale_b = scale_b.t()
    return torch._scaled_mm(a, b, scale_a=scale_a, scale_b=scale_b, out_dtype=dtype, use_fast_accum=fast)


def _emulated_product(a_MK: Float8Operand, b_NK: Float8Operand, dtype: torch.dtype) -> Tensor:
    if a_MK.recipe == "mxfp8":
        a, b = (
            one.values.to(dtype).unflatten(-1, (-1, BLOCK_SIZE)).mul(one.scale.to(dtype).unsqueeze(-1)).flatten(-2)
            for one in (a_MK, b_NK)
        )
        return a @ b.t()
    scale = a_MK.scale * (b_NK.scale.t() if a_MK.recipe == "rowwise" else b_NK.scale)
    return (a_MK.values.to(dtype) @ b_NK.values.to(dtype).t()) * scale.to(dtype)


def swizzled(scale_NG: Tensor) -> Tensor:
    """Return the scales of blocks as bytes of exponents (e8m0), in the order in which a GPU's tensor cores read them.

    128 rows × 4 scales lie together, of which row 32·i + j, scale k, comes at place 16·j + 4·i + k; rows and scales
    that fill the last of these tiles are zeros (cuBLAS documentation, "1D Block Scaling Factors Layout").
    """
    rows, groups = scale_NG.shape
    exponents = torch.log2(scale_NG).add(127).clamp(0, 254).to(torch.uint8)
    padded = F.pad(exponents, (0, -groups % 4, 0, -rows % 128))
    tiles = padded.unflatten(0, (-1, 4, 32)).unflatten(-1, (-1, 4))  # tile row, i, j, tile column, k
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1).view(torch.float8_e8m0fnu)


class _Float8Linear(torch.autograd.Function):
    """Keeps input and weight as they are and casts them anew in the backward, so that it saves no more than a plain
    linear layer. The result is no view: the residual is added to it in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_OI: Tensor, bias_O: Tensor | None, recipe: Float8Recipe) -> Tensor:
        ctx.save_for_backward(x, weight_OI)
        ctx.recipe = recipe
        x8_NI = to_float8(x.flatten(0, -2), FORWARD_DTYPE, recipe)
        y_NO = float8_product(x8_NI, to_float8(weight_OI, FORWARD_DTYPE, recipe), x.dtype, fast=True)
        if bias_O is not None:
            y_NO += bias_O
        return torch.ops.aten._unsafe_view(y_NO, (*x.shape[:-1], len(weight_OI)))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight_OI = ctx.saved_tensors
        recipe: Float8Recipe = ctx.recipe
        grad_NO = grads[0].flatten(0, -2).contiguous()
        dtype = GRADIENT_DTYPE if recipe == "tensorwise" else FORWARD_DTYPE
        grad8_NO = to_float8(grad_NO, dtype, recipe)
        grad_x = grad_weight_OI = grad_bias_O = None
        if ctx.needs_input_grad[0]:
            weight8_IO = to_float8(weight_OI.t(), FORWARD_DTYPE, recipe)
            grad_x = float8_product(grad8_NO, weight8_IO, x.dtype).view(x.shape)
        if ctx.needs_input_grad[1]:
            whole = recipe == "tensorwise"
            grad8_ON = grad8_NO.transposed() if whole else to_float8(grad_NO.t(), dtype, recipe)
            x8_IN = to_float8(x.flatten(0, -2).t(), FORWARD_DTYPE, recipe)
            grad_weight_OI = float8_product(grad8_ON, x8_IN, x.dtype)
        if ctx.needs_input_grad[2]:
            grad_bias_O = grad_NO.sum(0)
        return grad_x, grad_weight_OI, grad_bias_O, None


class Float8Linear(nn.Linear):
    """Linear layer with fp8 matmuls; the bias is added, and its gradient summed, in the dtype of the input."""

    recipe: Float8Recipe = "tensorwise"

    def forward(self, input: Tensor) -> Tensor:
        if input.shape[:-1].numel() % SIZE_MULTIPLE[self.recipe]:
            return F.linear(input, self.weight, self.bias)
        return _Float8Linear.apply(input, self.weight, self.bias, self.recipe)  # type: ignore[return-value]


def apply_float8(block: nn.Module, recipe: Float8Recipe = "tensorwise") -> None:
    """Let the linear layers of a block multiply in fp8, where their sizes allow it."""
    size = SIZE_MULTIPLE[recipe]
    for part in block.modules():
        if type(part) is nn.Linear and not (part.in_features % size or part.out_features % size):
            part.__class__ = Float8Linear
            part.recipe = recipe  # type: ignore[assignment]


def has_float8(device: torch.device, recipe: Float8Recipe = "tensorwise") -> bool:
    """Return True if a device multiplies in fp8 by a recipe, or is a CPU, which emulates it."""
    return device.type != "cuda" or (
        torch.version.cuda is not None and torch.cuda.get_device_capability(device) >= FIRST_CAPABILITY[recipe]
    )


def float8_note(device: torch.device, recipe: Float8Recipe = "tensorwise") -> str | None:
    """Return one sentence where fp8 isn't what a device multiplies in."""
    if device.type == "cpu":
        return "fp8 is emulated: a CPU computes what a GPU would, more slowly than in bf16"
    if not has_float8(device, recipe):
        what = "fp8" if recipe == "tensorwise" else f"fp8 ({recipe})"
        return f"matmuls are in bf16 instead of {what}, which this GPU doesn't have"
    return None
