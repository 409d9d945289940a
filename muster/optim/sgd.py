"""Stochastic gradient descent with momentum."""

import torch
from torch import Tensor

from muster.optim.base import ElementwiseOptimizer


class SGD(ElementwiseOptimizer):
    """SGD with momentum: m = momentum · m + g; the step is lr · m, with Nesterov lr · (g + momentum · m).

    Nesterov's form is that of I. Sutskever et al. (ICML 2013). Weight decay is decoupled (SGDW, arXiv:1711.05101 §2).

    With spike compensation (A. Kosson et al., arXiv:2003.11666) a gradient that comes D steps late is treated as if it
    had been there in time: the step is lr · (a · m + b · g), a = momentum^D, b = (1 − momentum^D) / (1 − momentum).
    """

    def _update(self, lr: float) -> None:
        super()._update(lr)
        momentum = self.config.momentum
        for name, param in self.params.items() if self.config.delay_compensation == "spike" else ():
            delay = self.delays.get(name, 0.0)
            if delay and param.grad is not None:
                kept = momentum**delay
                param.add_(self._state[name]["momentum"], alpha=lr * (1 - kept))
                param.add_(param.grad, alpha=-lr * (1 - kept) / (1 - momentum))

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
