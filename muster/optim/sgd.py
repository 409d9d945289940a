"""Stochastic gradient descent with momentum."""

import torch
from torch import Tensor

from muster.optim.base import ElementwiseOptimizer


class SGD(ElementwiseOptimizer):
    """SGD with momentum: m = momentum · m + g; the step is lr · m, with Nesterov lr · (g + momentum · m).

    Nesterov's form is that of I. Sutskever et al. (ICML 2013). Weight decay is decoupled (SGDW, arXiv:1711.05101 §2).
    """

    def _update_group(
        self, params: list[Tensor], grads: list[Tensor], state: dict[str, list[Tensor]], lr: float
    ) -> None:
        momentum = self.config.momentum
        updates = grads
        if momentum:
            torch._foreach_mul_(state["momentum"], momentum)
            torch._foreach_add_(state["momentum"], grads)
            updates = state["momentum"]
        if self.config.nesterov:
            updates = torch._foreach_mul(updates, momentum)
            torch._foreach_add_(updates, grads)
        torch._foreach_add_(params, updates, alpha=-lr)
