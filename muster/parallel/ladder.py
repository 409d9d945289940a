"""Ladder residual over tensor-parallel ranks: the all-reduce of a sub-layer's output travels while the next sub-layer
computes, and in the backward that of its input's gradient while the backward of the one before does
(arXiv:2501.06589 §3).

Autograd runs, of the nodes whose gradients are there, the one that was made last. So the node that adds a sub-layer's
output to the stream is made before the next sub-layer, in memory that is filled behind it: in the backward it comes
after that sub-layer, and waits there for the gradient that set out before.

The norm before a sub-layer lies between the stream and the sum of gradients. Each rank takes its own part of a gradient
through it, so that the weights of these norms have a part of their gradients on each rank.

Suffixes: B sequences, S positions, D hidden width.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from muster.model.four_bit import dense
from muster.model.ladder import Ladder, LadderState
from muster.parallel.axis import PendingTensor, TensorAxis
from muster.parallel.weight_grad_store import WeightGradStore


class _Terms:
    """Terms of the gradient of a stream that are on their way."""

    def __init__(self) -> None:
        self.under_way: list[PendingTensor] = []


class ParallelLadder(Ladder):
    """Steps of a ladder whose sub-layers' outputs are summed over tensor-parallel ranks."""

    def __init__(self, axis: TensorAxis) -> None:
        self._axis = axis
        self._started: PendingTensor | None = None
        """Sum of the output of the sub-layer under way."""
        self._is_repeating = False

    def begin(self, x_BSD: Tensor, pending_BSD: Tensor | None = None) -> LadderState:
        terms = _Terms()
        return LadderState(_Stream.apply(terms, x_BSD, None), pending_BSD, None, terms)  # type: ignore[arg-type]

    def step(self, state: LadderState, sublayer: Callable[[Tensor], Tensor]) -> LadderState:
        terms, after_BSD = state.gradients, state.x_BSD
        if state.pending_BSD is not None:
            terms = _Terms()
            after_BSD = _Stream.apply(terms, state.x_BSD, state.pending_BSD)  # type: ignore[assignment]
        y_BSD = sublayer(_Read.apply(self._axis, state.gradients, state.x_BSD))  # type: ignore[arg-type]
        arrival, self._started = self._started, None
        self._fill(after_BSD, state)
        return LadderState(after_BSD, y_BSD, arrival, terms)

    def end(self, state: LadderState) -> Tensor:
        if state.pending_BSD is None:
            return state.x_BSD
        x_BSD: Tensor = _Stream.apply(_Terms(), state.x_BSD, state.pending_BSD)  # type: ignore[assignment]
        self._fill(x_BSD, state)
        return x_BSD

    def at_boundary(self, state: LadderState) -> Tensor:
        _wait(state.arrival)
        return super().at_boundary(state)

    def settle(self) -> None:
        _wait(self._started)

    def row_parallel_linear(self, weight_grads: WeightGradStore, x: Tensor, linear: nn.Linear) -> Tensor:
        """Apply the row-parallel linear layer at the end of a sub-layer, and start to sum over the ranks."""
        return _StartedSum.apply(self, weight_grads, x, linear.weight, linear.bias)  # type: ignore[return-value]

    def start_sum(self, y_BSD: Tensor) -> None:
        """Start to sum a sub-layer's output in place, which only a first forward needs."""
        if not self._is_repeating:
            self._started = self._axis.all_reduce(y_BSD)

    def takes_bias(self) -> bool:
        """Return True on the rank that adds a sub-layer's last bias."""
        return self._axis.index == 0

    @contextmanager
    def repeating(self) -> Iterator[None]:
        """Start no sums meanwhile: of a layer's repeated forward, the stream comes from outside, and nothing else reads
        the outputs of its sub-layers."""
        self._is_repeating = True
        try:
            yield
        finally:
            self._is_repeating = False

    @staticmethod
    @torch.no_grad()
    def _fill(x_BSD: Tensor, before: LadderState) -> None:
        """Fill a sum's memory once the pending output is there."""
        if before.pending_BSD is None:
            return
        _wait(before.arrival)
        torch.add(before.x_BSD, before.pending_BSD, out=x_BSD.detach())


def _wait(arrival: PendingTensor | None) -> None:
    if arrival is not None:
        arrival.wait()


class _Stream(torch.autograd.Function):
    """Sum of a stream and a pending output, in memory that is filled later. The backward adds to its gradient the terms
    that are on their way."""

    @staticmethod
    def forward(ctx: Any, terms: _Terms, x_BSD: Tensor, pending_BSD: Tensor | None) -> Tensor:
        ctx.terms, ctx.has_pending = terms, pending_BSD is not None
        return x_BSD.view_as(x_BSD) if pending_BSD is None else torch.empty_like(x_BSD)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor, Tensor | None]:
        grad_BSD, terms = grads[0], ctx.terms.under_way
        while terms:
            grad_BSD = terms.pop().wait().add_(grad_BSD)
        return None, grad_BSD, grad_BSD if ctx.has_pending else None


class _Read(torch.autograd.Function):
    """The stream that a sub-layer reads. The backward starts to sum its gradient over the ranks, for which `_Stream`
    waits."""

    @staticmethod
    def forward(ctx: Any, axis: TensorAxis, terms: _Terms, x_BSD: Tensor) -> Tensor:
        ctx.axis, ctx.terms = axis, terms
        return x_BSD.view_as(x_BSD)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None]:
        ctx.terms.under_way.append(ctx.axis.all_reduce(grads[0].contiguous()))
        return None, None, None


class _StartedSum(torch.autograd.Function):
    """Row-parallel linear layer whose sum over the ranks is under way; one of them adds the bias."""

    @staticmethod
    def forward(
        ctx: Any, ladder: ParallelLadder, weight_grads: WeightGradStore, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        # Not through save_for_backward, as in `tensor_parallel._ParallelLinears`.
        ctx.weight_grads, ctx.weight, ctx.bias = weight_grads, weight, bias
        ctx.save_for_backward(x)
        y = x @ dense(weight, x.dtype).t()
        if bias is not None and ladder.takes_bias():
            y += bias
        ladder.start_sum(y)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x,), grad = ctx.saved_tensors, grads[0]
        grad_x = grad @ dense(ctx.weight, grad.dtype)
        rows = x.flatten(0, -2), grad.flatten(0, -2)
        return None, None, grad_x, *ctx.weight_grads.compute_or_defer(ctx.weight, ctx.bias, *rows)
