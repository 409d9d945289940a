"""Grouped matmuls: rows that are sorted by expert, each segment of them times its expert's matrix.

One parameter layout serves every kernel: the matrices of all experts stacked, (E, O, I). On a machine that
`muster profile` has measured each product takes the kernel that is fastest for its sizes (`MeasuredKernels`). Elsewhere
a CPU loops over the segments, and a GPU takes them all in one launch, where its kernel knows the dtype
(`torch._grouped_mm`, arXiv:2211.15841 §5 for the idea). Suffixes: R rows, E experts, C rows of the fullest expert, I
input width, O output width.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, cached_property
from math import log2
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from muster.cost.time.rate_interpolation import GroupedMatmulRates
from muster.model.dtypes import DTYPES
from muster.model.kernels import accumulation_dtype
from muster.spec.machine_rates import GroupedKernel, GroupedMatmuls, MatmulPass
from muster.spec.plan import Precision

WeightGrad = Callable[[Tensor, Tensor, Tensor, "Segments"], Tensor | None]
"""Makes a stacked weight's gradient from the weight, the rows, and the gradients of their products; None: later."""


class Segments:
    """Rows of each expert, one segment after another, from the number of rows of each (E)."""

    def __init__(self, counts_E: Tensor, num_rows: int) -> None:
        self.counts_E = counts_E
        self.num_rows = num_rows
        self.choose_kernel: ChooseKernel = default_kernel
        """Function that says which kernel multiplies these rows."""

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

    @cached_property
    def padded_R(self) -> Tensor:
        """Place of each row where all experts have as many rows as the fullest one."""
        before_E = self.counts_E.cumsum(0) - self.counts_E
        place_R = torch.arange(self.num_rows, device=self.counts_E.device)
        return place_R + (max(self.sizes) * torch.arange(len(before_E), device=place_R.device) - before_E).index_select(
            0, self.expert_R
        )

    @cached_property
    def is_even(self) -> bool:
        """True where all experts have equally many rows, so that none is padded."""
        return len(self.sizes) * max(self.sizes) == self.num_rows

    def pad(self, x_RI: Tensor) -> Tensor:
        """Return rows with zeros behind those of each expert but the fullest: (E, C, I)."""
        experts, most = len(self.sizes), max(self.sizes)
        if self.is_even:
            return x_RI.view(experts, most, -1)
        x_PI = x_RI.new_zeros(experts * most, x_RI.shape[-1])
        return x_PI.index_copy_(0, self.padded_R, x_RI).view(experts, most, -1)

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


ChooseKernel = Callable[[MatmulPass, torch.dtype, Segments, int, int], GroupedKernel]
"""Chooses a kernel by pass, dtype, segments, input and output width."""


def default_kernel(
    kind: MatmulPass, dtype: torch.dtype, segments: Segments, in_features: int, out_features: int
) -> GroupedKernel:
    """Return the kernel of a machine that was not measured."""
    is_half_on_gpu = segments.counts_E.is_cuda and dtype == torch.bfloat16
    return "grouped_mm" if is_half_on_gpu else "segments"


class MeasuredKernels:
    """The kernels that were the fastest when `muster profile` measured them, for sizes to the nearest power of two."""

    def __init__(self, measured: Mapping[Precision, GroupedMatmuls]) -> None:
        self._rates = {DTYPES[precision]: GroupedMatmulRates(rates) for precision, rates in measured.items()}
        self._known: dict[tuple[Any, ...], GroupedKernel] = {}

    def __call__(
        self, kind: MatmulPass, dtype: torch.dtype, segments: Segments, in_features: int, out_features: int
    ) -> GroupedKernel:
        experts = len(segments.counts_E)
        if not self._rates.get(dtype) or not segments.num_rows:
            return default_kernel(kind, dtype, segments, in_features, out_features)
        rows = segments.num_rows / experts
        kernel = self._fastest(kind, dtype, rows, rows, in_features, out_features)
        if kernel != "padded":
            return kernel
        # Only here the number of the fullest expert's rows matters, for which the host waits for a GPU.
        return self._fastest(kind, dtype, rows, max(segments.sizes), in_features, out_features)

    def _fastest(
        self, kind: MatmulPass, dtype: torch.dtype, rows: float, most: float, in_features: int, out_features: int
    ) -> GroupedKernel:
        at = kind, dtype, round(log2(rows)), round(log2(most)), in_features, out_features
        if at not in self._known:
            sizes = 2.0 ** at[2], 2.0 ** at[3], in_features, out_features
            self._known[at] = self._rates[dtype].fastest(kind, *sizes)[0]
        return self._known[at]


@cache
def has_grouped_mm(device: torch.device, dtype: torch.dtype) -> bool:
    """Return True where PyTorch has one kernel for all segments (2.8 and later on GPUs, later ones on CPUs)."""
    x_RI, weight_EIO = torch.zeros(8, 8, dtype=dtype, device=device), torch.zeros(1, 8, 8, dtype=dtype, device=device)
    try:
        torch._grouped_mm(x_RI, weight_EIO, offs=torch.full((1,), 8, dtype=torch.int32, device=device))
    except (AttributeError, NotImplementedError, RuntimeError):
        return False
    return True


def _kernel(kind: MatmulPass, x_RI: Tensor, segments: Segments, in_features: int, out_features: int) -> GroupedKernel:
    """Return the chosen kernel where it knows these rows (PyTorch's wants rows of 16 bytes), else `segments`."""
    if isinstance(x_RI, FakeTensor) or not len(x_RI):
        return "segments"
    kernel = segments.choose_kernel(kind, x_RI.dtype, segments, in_features, out_features)
    if kernel != "grouped_mm":
        return kernel
    aligned = in_features * x_RI.element_size() % 16 == 0 and out_features * x_RI.element_size() % 16 == 0
    return "grouped_mm" if aligned and has_grouped_mm(x_RI.device, x_RI.dtype) else "segments"


def grouped_product(x_RI: Tensor, weight_EIO: Tensor, segments: Segments, kind: MatmulPass = "forward") -> Tensor:
    """Return x[segment e] @ weight[e] for every segment: (R, O)."""
    _, inner, outer = weight_EIO.shape
    # The gradient of inputs has the layer's output width inside.
    widths = (outer, inner) if kind == "input" else (inner, outer)
    match _kernel(kind, x_RI, segments, *widths):
        case "grouped_mm":
            return torch._grouped_mm(x_RI, weight_EIO, offs=segments.ends_E)
        case "padded":
            y_PO = torch.bmm(segments.pad(x_RI), weight_EIO).flatten(0, 1)
            return y_PO if segments.is_even else y_PO.index_select(0, segments.padded_R)
    y_RO = x_RI.new_empty(len(x_RI), outer)
    for expert, rows in segments:
        torch.mm(x_RI[rows], weight_EIO[expert], out=y_RO[rows])
    return y_RO


def grouped_weight_grad(weight_EOI: Tensor, x_RI: Tensor, grad_RO: Tensor, segments: Segments) -> Tensor | None:
    """Return the gradient of a stacked weight, zeros for experts without rows; None where it isn't trained."""
    if not weight_EOI.requires_grad:
        return None
    match _kernel("weight", x_RI, segments, x_RI.shape[-1], grad_RO.shape[-1]):
        case "grouped_mm":
            return torch._grouped_mm(grad_RO.t(), x_RI, offs=segments.ends_E)
        case "padded":
            return torch.bmm(segments.pad(grad_RO).transpose(1, 2), segments.pad(x_RI))
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
            term = grouped_product(grad, weight, ctx.segments, "input")
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
