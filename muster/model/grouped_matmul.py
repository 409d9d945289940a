"""Grouped matmuls: rows that are sorted by expert, each segment of them times its expert's matrix.

One parameter layout serves every kernel: the matrices of all experts stacked, (E, O, I). A CPU loops over the segments;
a GPU takes them all in one launch, where its kernel knows the dtype (`torch._grouped_mm`, arXiv:2211.15841 §5 for the
idea). Suffixes: R rows, E experts, I input width, O output width.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from muster.model.kernels import accumulation_dtype

WeightGrad = Callable[[Tensor, Tensor, Tensor, "Segments"], Tensor | None]
"""Makes a stacked weight's gradient from the weight, the rows, and the gradients of their products; None: later."""


class Segments:
    """Rows of each expert, one segment after another, from the number of rows of each (E)."""

    def __init__(self, counts_E: Tensor, num_rows: int) -> None:
        self.counts_E = counts_E
        self.num_rows = num_rows

    @cached_property
    def sizes(self) -> list[int]:
        """Rows of each segment on the host, which waits for the device; under fake tensors, which have no values, equal
        ones."""
        return host_counts(self.counts_E, self.num_rows)

    @cached_property
    def ends_E(self) -> Tensor:
        """Row behind each segment, as `torch._grouped_mm` takes it."""
        return self.counts_E.cumsum(0).to(torch.int32)

    @cached_property
    def expert_R(self) -> Tensor:
        """Expert of each row."""
        expert_E = torch.arange(len(self.counts_E), device=self.counts_E.device)
        return expert_E.repeat_interleave(self.counts_E, output_size=self.num_rows)

    def part(self, start: int, end: int) -> "Segments":
        """Return the segments of some consecutive experts."""
        return Segments(self.counts_E[start:end], sum(self.sizes[start:end]))

    def __iter__(self) -> Iterator[tuple[int, slice]]:
        """Yield expert and rows of each segment that isn't empty."""
        start = 0
        for expert, size in enumerate(self.sizes):
            if size:
                yield expert, slice(start, start + size)
            start += size


def host_counts(counts_E: Tensor, total: int) -> list[int]:
    """Return counts that add up to `total` as integers; of fake tensors, which have no values, as equal as can be."""
    if not isinstance(counts_E, FakeTensor):
        return counts_E.tolist()
    base, rest = divmod(total, counts_E.numel())
    return [base + (index < rest) for index in range(counts_E.numel())]


class StackedLinear(nn.Module):
    """The matrices of several experts (E, O, I), and their biases (E, O)."""

    def __init__(self, num_experts: int, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, out_features, in_features))
        nn.init.normal_(self.weight, std=in_features**-0.5)
        self.bias = nn.Parameter(torch.zeros(num_experts, out_features)) if bias else None
        self.adds_bias = True
        """False on ranks whose results are summed with that of a rank that adds it."""


class StackedMatrices(NamedTuple):
    """The same from elsewhere: matrices and biases of experts whose module isn't here."""

    weight: Tensor
    bias: Tensor | None
    adds_bias: bool


Stacked = StackedLinear | StackedMatrices


def _runs_grouped_kernel(x_RI: Tensor) -> bool:
    """Return True where PyTorch has one kernel for all segments (2.8 and later: CUDA, bfloat16, rows of 16 bytes)."""
    aligned = x_RI.shape[-1] * x_RI.element_size() % 16 == 0
    fits = len(x_RI) > 0 and aligned and x_RI.dtype == torch.bfloat16
    return x_RI.device.type == "cuda" and fits and hasattr(torch, "_grouped_mm")


def grouped_product(x_RI: Tensor, weight_EIO: Tensor, segments: Segments) -> Tensor:
    """Return x[segment e] @ weight[e] for every segment: (R, O)."""
    if _runs_grouped_kernel(x_RI) and weight_EIO.shape[-1] % 8 == 0:
        return torch._grouped_mm(x_RI, weight_EIO, offs=segments.ends_E)
    y_RO = x_RI.new_empty(len(x_RI), weight_EIO.shape[-1])
    for expert, rows in segments:
        torch.mm(x_RI[rows], weight_EIO[expert], out=y_RO[rows])
    return y_RO


def grouped_weight_grad(weight_EOI: Tensor, x_RI: Tensor, grad_RO: Tensor, segments: Segments) -> Tensor | None:
    """Return the gradient of a stacked weight, zeros for experts without rows; None where it isn't trained."""
    if not weight_EOI.requires_grad:
        return None
    if _runs_grouped_kernel(x_RI) and grad_RO.shape[-1] % 8 == 0:
        return torch._grouped_mm(grad_RO.t(), x_RI, offs=segments.ends_E)
    grad_EOI = torch.zeros_like(weight_EOI, memory_format=torch.contiguous_format)
    for expert, rows in segments:
        torch.mm(grad_RO[rows].t(), x_RI[rows], out=grad_EOI[expert])
    return grad_EOI


def _add_biases_(y_RO: Tensor, bias_EO: Tensor, segments: Segments) -> None:
    if y_RO.device.type != "cpu":
        y_RO.add_(bias_EO.index_select(0, segments.expert_R))
        return
    for expert, rows in segments:
        y_RO[rows] += bias_EO[expert]


def _bias_grad(bias_EO: Tensor | None, adds_bias: bool, grad_RO: Tensor, segments: Segments) -> Tensor | None:
    """Return the gradient of stacked biases, summed in float32 at least: zeros where this rank doesn't add them."""
    if bias_EO is None or not bias_EO.requires_grad:
        return None
    grad_EO = torch.zeros_like(bias_EO, dtype=accumulation_dtype(grad_RO.dtype))
    if adds_bias and grad_RO.device.type != "cpu":
        grad_EO.index_add_(0, segments.expert_R, grad_RO.to(grad_EO.dtype))
    elif adds_bias:
        for expert, rows in segments:
            torch.sum(grad_RO[rows], 0, dtype=grad_EO.dtype, out=grad_EO[expert])
    return grad_EO.to(bias_EO.dtype)


class _GroupedLinears(torch.autograd.Function):
    """Several stacked linear layers of the same rows. Saves the rows; keeps the parameters themselves, which hooks on
    saved tensors would replace by copies."""

    @staticmethod
    def forward(
        ctx: Any,
        weight_grad: WeightGrad,
        segments: Segments,
        adds_bias: Sequence[bool],
        x_RI: Tensor,
        *parameters: Tensor | None,
    ) -> tuple[Tensor, ...]:
        ctx.weight_grad, ctx.segments, ctx.adds_bias = weight_grad, segments, adds_bias
        weights = tuple(weight for weight in parameters[::2] if weight is not None)
        ctx.weights, ctx.biases = weights, parameters[1::2]
        ctx.save_for_backward(x_RI)
        made = tuple(grouped_product(x_RI, weight.transpose(1, 2), segments) for weight in weights)
        for adds, bias, y_RO in zip(adds_bias, ctx.biases, made, strict=True):
            if bias is not None and adds:
                _add_biases_(y_RO, bias, segments)
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x_RI,) = ctx.saved_tensors
        grad_x = None
        for grad, weight in zip(grads, ctx.weights, strict=True):
            term = grouped_product(grad, weight, ctx.segments)
            grad_x = term if grad_x is None else grad_x.add_(term)
        made: list[Tensor | None] = []
        for weight, bias, adds, grad in zip(ctx.weights, ctx.biases, ctx.adds_bias, grads, strict=True):
            made.append(ctx.weight_grad(weight, x_RI, grad, ctx.segments))
            made.append(_bias_grad(bias, adds, grad, ctx.segments))
        return None, None, None, grad_x, *made


def grouped_linears(
    x_RI: Tensor, segments: Segments, *linears: Stacked, weight_grad: WeightGrad = grouped_weight_grad
) -> tuple[Tensor, ...]:
    """Apply several stacked linear layers to the same rows, each segment with its expert's matrix and bias."""
    parameters = (one for linear in linears for one in (linear.weight, linear.bias))
    adds_bias = [linear.adds_bias for linear in linears]
    return _GroupedLinears.apply(weight_grad, segments, adds_bias, x_RI, *parameters)  # type: ignore[return-value]
