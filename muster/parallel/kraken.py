"""Sub-layers side by side over tensor-parallel ranks, each of which has whole ones: the sum of all streams travels
while attention computes, and in the backward the sum of its gradients beside the backward of attention
(arXiv:2408.07802 §3).

Autograd runs, of the nodes whose gradients are there, the one that was made last. The node that starts the sum is made
before attention and the one that reads it behind: in the backward the latter starts to sum gradients, and the former,
which waits for them, comes after attention.

Suffixes as in `muster.model.kraken`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from muster.model.kraken import Streams, SublayerLinear, add_to_streams, sum_of_streams
from muster.parallel.axis import PendingTensor, TensorAxis
from muster.parallel.weight_grad_store import WeightGradStore


@dataclass
class _Started:
    """A sum of streams over the ranks that is under way, and later that of its gradients."""

    sum_BSD: Tensor | None = None
    arrival: PendingTensor | None = None
    gradient: PendingTensor | None = None


class ParallelStreams(Streams):
    """Streams of which each tensor-parallel rank has some, and whose sum is all-reduced."""

    def __init__(self, axis: TensorAxis) -> None:
        self._axis = axis

    def begin(self, x_BSD: Tensor, count: int) -> Tensor:
        return _BeginStreams.apply(self._axis, x_BSD, count)  # type: ignore[return-value]

    def start_sum(self, x_BSE: Tensor, width: int) -> _Started:
        started = _Started()
        started.sum_BSD = _StartSum.apply(started, self._axis, x_BSE, width)  # type: ignore[assignment]
        return started

    def add_sum(self, y_BSE: Tensor, started: _Started) -> Tensor:
        sum_BSD, started.sum_BSD = started.sum_BSD, None
        return _AddSum.apply(started, self._axis, y_BSE, sum_BSD)  # type: ignore[return-value]


class _BeginStreams(torch.autograd.Function):
    """Embeddings as streams of their own. The backward sums the gradients of all ranks' streams."""

    @staticmethod
    def forward(ctx: Any, axis: TensorAxis, x_BSD: Tensor, count: int) -> Tensor:
        ctx.axis, ctx.width = axis, x_BSD.shape[-1]
        return x_BSD.repeat(1, 1, count)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor, None]:
        return None, ctx.axis.all_reduce(sum_of_streams(grads[0], ctx.width)).wait(), None


class _StartSum(torch.autograd.Function):
    """Sum of all ranks' streams, which is under way. The backward waits for the sum of the gradients."""

    @staticmethod
    def forward(ctx: Any, started: _Started, axis: TensorAxis, x_BSE: Tensor, width: int) -> Tensor:
        ctx.started, ctx.count = started, x_BSE.shape[-1] // width
        sum_BSD = sum_of_streams(x_BSE, width)
        started.arrival = axis.all_reduce(sum_BSD)
        return sum_BSD

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, Tensor, None]:
        gradient, ctx.started.gradient = ctx.started.gradient, None
        grad_BSD = gradient.wait()
        return None, None, grad_BSD if ctx.count == 1 else grad_BSD.repeat(1, 1, ctx.count), None


class _AddSum(torch.autograd.Function):
    """Attention's outputs with the sum of all streams added, once it is there. The backward starts to sum its
    gradient."""

    @staticmethod
    def forward(ctx: Any, started: _Started, axis: TensorAxis, y_BSE: Tensor, sum_BSD: Tensor) -> Tensor:
        ctx.started, ctx.axis, ctx.width = started, axis, sum_BSD.shape[-1]
        _wait(started)
        return add_to_streams(y_BSE, sum_BSD)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, Tensor, Tensor | None]:
        if not ctx.needs_input_grad[3]:
            return None, None, grads[0], None
        grad_BSD = sum_of_streams(grads[0], ctx.width)
        ctx.started.gradient = ctx.axis.all_reduce(grad_BSD)
        return None, None, grads[0], grad_BSD


def _wait(started: _Started) -> None:
    """Wait for a sum of streams."""
    if started.arrival is not None:
        started.arrival.wait()
        started.arrival = None


# ----------------------------------------------------------------------------------------------------------------------
# Linear layers whose weight gradients can be deferred


def sublayer_linears(weight_grads: WeightGradStore, x: Tensor, *linears: SublayerLinear) -> tuple[Tensor, ...]:
    """Apply linear layers of this rank's sub-layers to one input."""
    parameters = *(linear.weight for linear in linears), *(linear.bias for linear in linears)
    return _SublayerLinears.apply(weight_grads, linears, x, *parameters)  # type: ignore[return-value]


def sublayer_linear(weight_grads: WeightGradStore, x: Tensor, linear: SublayerLinear) -> Tensor:
    """Apply the linear layer that leads back to this rank's streams."""
    return sublayer_linears(weight_grads, x, linear)[0]


class _SublayerLinears(torch.autograd.Function):
    """Several linear layers of one input; weights come first, then their biases (None for a missing one)."""

    @staticmethod
    def forward(
        ctx: Any, weight_grads: WeightGradStore, linears: Sequence[SublayerLinear], x: Tensor, *parameters: Any
    ) -> tuple[Tensor, ...]:
        count = len(linears)
        ctx.weight_grads, ctx.linears = weight_grads, linears
        # Not through save_for_backward, as in `tensor_parallel._ParallelLinears`.
        ctx.weights, ctx.biases = parameters[:count], parameters[count:]
        ctx.save_for_backward(x)
        return tuple(map(_linear, (x,) * count, linears, ctx.weights, ctx.biases))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        (x,) = ctx.saved_tensors
        grad_x = torch.empty_like(x)
        for place, (linear, grad, weight) in enumerate(zip(ctx.linears, grads, ctx.weights, strict=True)):
            inputs, outputs = linear.widths
            parts = grad_x.flatten(0, -2).split(inputs, -1), grad.flatten(0, -2).split(outputs, -1)
            for grad_x_NI, grad_NO, weight_OI in zip(*parts, linear.matrices(weight), strict=True):
                if place:
                    grad_x_NI.addmm_(grad_NO, weight_OI)
                else:
                    torch.mm(grad_NO, weight_OI, out=grad_x_NI)
        x_NI = x.flatten(0, -2)
        made = [
            ctx.weight_grads.compute_or_defer(weight, bias, x_NI, grad.flatten(0, -2))
            for weight, bias, grad in zip(ctx.weights, ctx.biases, grads, strict=True)
        ]
        return None, None, grad_x, *(weight for weight, _ in made), *(bias for _, bias in made)


def _linear(x: Tensor, linear: SublayerLinear, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the outputs of all sub-layers side by side, in memory of their own."""
    inputs, outputs = linear.widths
    parts = x.flatten(0, -2).split(inputs, -1)
    y = x.new_empty(*x.shape[:-1], outputs * len(parts))
    for x_NI, weight_OI, y_NO in zip(parts, linear.matrices(weight), y.flatten(0, -2).split(outputs, -1), strict=True):
        torch.mm(x_NI, weight_OI.t(), out=y_NO)
    return y if bias is None else y.add_(bias)
