"""Deferred weight gradients, which split a backward into `I` (gradients of inputs) and `W` (gradients of weights).

The backward of a linear layer computes the gradient of its input at once. While `I` runs it stores the input and the
output's gradient, from which `W` later computes the gradients of weight and bias (S. Qi et al., Zero Bubble Pipeline
Parallelism, arXiv:2401.10241 §2). Autograd doesn't see this, so recomputation and sharded data parallelism work
unchanged. Gradients of norms and of the embedding are cheap sums and stay in `I`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from muster.model.grouped_matmul import Segments, grouped_weight_grad


class _DeferredGrad(NamedTuple):
    """Operands of a deferred gradient: that of `weight_OI` is grad_NO^T @ x_NI (`weight_grad`), that of `bias_O` the
    sum of grad_NO over N. With `segments` the weight is stacked: each of its matrices has the rows of one segment."""

    weight_OI: Tensor
    bias_O: Tensor | None
    x_NI: Tensor
    grad_NO: Tensor
    segments: Segments | None = None


Operands = tuple[Tensor, Tensor, Tensor]


def sublayer_operands(weight_OI: Tensor, x_NI: Tensor, grad_NO: Tensor) -> Iterator[Operands]:
    """Yield the matrix, the input and the output's gradient of each linear layer that a weight has: of an ordinary one
    these, of sub-layers side by side (`muster.model.kraken.SublayerLinear`) their parts. Only those have an input, or
    an output, that is wider than the weight."""
    outputs, inputs = weight_OI.shape
    count = x_NI.shape[1] // inputs * (grad_NO.shape[1] // outputs)
    matrices = weight_OI.chunk(count, 0 if x_NI.shape[1] > inputs else 1)
    return zip(matrices, x_NI.chunk(count, 1), grad_NO.chunk(count, 1), strict=True)


def weight_grad(weight_OI: Tensor, x_NI: Tensor, grad_NO: Tensor) -> Tensor:
    """Return the gradient of a weight."""
    if x_NI.shape[1] == weight_OI.shape[1] and grad_NO.shape[1] == weight_OI.shape[0]:
        return grad_NO.t() @ x_NI
    made = torch.empty_like(weight_OI)
    for part, x, grad in sublayer_operands(made, x_NI, grad_NO):
        torch.mm(grad.t(), x, out=part)
    return made


class WeightGradStore:
    """Deferred weight gradients of a stage, by micro-batch."""

    def __init__(self) -> None:
        self._deferred: dict[int, list[_DeferredGrad]] = {}
        self._open: list[_DeferredGrad] | None = None

    @contextmanager
    def deferring(self, micro_batch: int) -> Iterator[None]:
        """Defer the weight gradients of backwards in this context until `flush(micro_batch)`."""
        self._open = self._deferred[micro_batch] = []
        try:
            yield
        finally:
            self._open = None

    def compute_or_defer(
        self, weight_OI: Tensor, bias_O: Tensor | None, x_NI: Tensor, grad_NO: Tensor
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradients of the weight and of the bias; None for a deferred one, a frozen one, and for a
        missing bias."""
        trains_weight, trains_bias = weight_OI.requires_grad, bias_O is not None and bias_O.requires_grad
        if self._open is None or not (trains_weight or trains_bias):
            grad_weight = weight_grad(weight_OI, x_NI, grad_NO) if trains_weight else None
            return grad_weight, grad_NO.sum(0) if trains_bias else None
        self._open.append(_DeferredGrad(weight_OI, bias_O, x_NI, grad_NO))
        return None, None

    def compute_or_defer_grouped(
        self, weight_EOI: Tensor, x_RI: Tensor, grad_RO: Tensor, segments: Segments
    ) -> Tensor | None:
        """Return the gradient of a stacked weight; None for a deferred one and a frozen one."""
        if self._open is None or not weight_EOI.requires_grad:
            return grouped_weight_grad(weight_EOI, x_RI, grad_RO, segments)
        self._open.append(_DeferredGrad(weight_EOI, None, x_RI, grad_RO, segments))
        return None

    @torch.no_grad()
    def flush(self, micro_batch: int, take: Callable[[Tensor], None] = lambda _: None) -> None:
        """Compute the deferred gradients of a micro-batch and add them to the `.grad` of unfrozen parameters, which
        `take` may take from there.

        Operands are freed as soon as they have been used.
        """
        deferred = self._deferred.pop(micro_batch)[::-1]
        while deferred:
            weight_OI, bias_O, x_NI, grad_NO, segments = deferred.pop()
            if segments is not None:
                made = grouped_weight_grad(weight_OI, x_NI, grad_NO, segments)
                if made is not None:
                    weight_OI.grad = made if weight_OI.grad is None else weight_OI.grad.add_(made)
                    take(weight_OI)
            elif weight_OI.requires_grad:
                if weight_OI.grad is None:
                    weight_OI.grad = weight_grad(weight_OI, x_NI, grad_NO)
                else:
                    for part, x, grad in sublayer_operands(weight_OI.grad, x_NI, grad_NO):
                        part.addmm_(grad.t(), x)
                take(weight_OI)
            if bias_O is not None and bias_O.requires_grad:
                bias_O.grad = grad_NO.sum(0) if bias_O.grad is None else bias_O.grad.add_(grad_NO.sum(0))
                take(bias_O)
