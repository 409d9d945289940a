"""Weight gradients that wait: what makes a split backward, `I` and `W`, out of the ordinary one.

The backward of a linear layer computes the gradient of its input at once and, while `I` runs, keeps what the gradient
of its weight needs, until `W` asks for it. Autograd sees nothing of this, so that recomputing activations and sharded
data parallelism work as ever. Gradients of norms and of the embedding are small sums and stay in `I`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from torch import Tensor


class _Product(NamedTuple):
    """The gradient of `weight_OI` is grad_NO^T @ x_NI."""

    weight_OI: Tensor
    x_NI: Tensor
    grad_NO: Tensor


class WeightWork:
    """The weight gradients of a stage that are still to be computed, by micro-batch."""

    def __init__(self) -> None:
        self._kept: dict[int, list[_Product]] = {}
        self._keeping: list[_Product] | None = None

    @contextmanager
    def keeping(self, micro_batch: int) -> Iterator[None]:
        """Backwards within keep their weight gradients for `do(micro_batch)`."""
        self._keeping = self._kept[micro_batch] = []
        try:
            yield
        finally:
            self._keeping = None

    def gradient(self, weight_OI: Tensor, x_NI: Tensor, grad_NO: Tensor) -> Tensor | None:
        """The weight's gradient; None when it is kept for later."""
        if self._keeping is None:
            return grad_NO.t() @ x_NI
        self._keeping.append(_Product(weight_OI, x_NI, grad_NO))
        return None

    def do(self, micro_batch: int) -> None:
        """Adds the gradients that were kept to those of the weights."""
        for weight_OI, x_NI, grad_NO in self._kept.pop(micro_batch):
            if weight_OI.grad is None:
                weight_OI.grad = grad_NO.t() @ x_NI
            else:
                weight_OI.grad.addmm_(grad_NO.t(), x_NI)
