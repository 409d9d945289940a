"""Weight gradients that wait: what makes a split backward, `I` and `W`, out of the ordinary one.

The backward of a linear layer computes the gradient of its input at once and, while `I` runs, keeps what the gradient
of its weight and bias needs, until `W` asks for it. Autograd sees nothing of this, so that recomputing activations and
sharded data parallelism work as ever. Gradients of norms and of the embedding are small sums and stay in `I`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from torch import Tensor


class _DeferredGrad(NamedTuple):
    """The gradient of `weight_OI` is grad_NO^T @ x_NI, that of `bias_O` the sum of grad_NO."""

    weight_OI: Tensor
    bias_O: Tensor | None
    x_NI: Tensor
    grad_NO: Tensor


class WeightGradStore:
    """The weight gradients of a stage that are still to be computed, by micro-batch."""

    def __init__(self) -> None:
        self._deferred: dict[int, list[_DeferredGrad]] = {}
        self._open: list[_DeferredGrad] | None = None

    @contextmanager
    def deferring(self, micro_batch: int) -> Iterator[None]:
        """Backwards within keep their weight gradients for `do(micro_batch)`."""
        self._open = self._deferred[micro_batch] = []
        try:
            yield
        finally:
            self._open = None

    def compute_or_defer(
        self, weight_OI: Tensor, bias_O: Tensor | None, x_NI: Tensor, grad_NO: Tensor
    ) -> tuple[Tensor | None, Tensor | None]:
        """The gradients of the weight and of the bias; None where there is no bias, or they are kept for later."""
        if self._open is None:
            return grad_NO.t() @ x_NI, None if bias_O is None else grad_NO.sum(0)
        self._open.append(_DeferredGrad(weight_OI, bias_O, x_NI, grad_NO))
        return None, None

    def flush(self, micro_batch: int) -> None:
        """Adds the gradients that were kept to those of the weights and biases."""
        for weight_OI, bias_O, x_NI, grad_NO in self._deferred.pop(micro_batch):
            if weight_OI.grad is None:
                weight_OI.grad = grad_NO.t() @ x_NI
            else:
                weight_OI.grad.addmm_(grad_NO.t(), x_NI)
            if bias_O is not None:
                bias_O.grad = grad_NO.sum(0) if bias_O.grad is None else bias_O.grad.add_(grad_NO.sum(0))
