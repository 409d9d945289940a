"""Exponential moving average of the weights, kept beside any optimizer (`optim.ema_decay`).

After each step, average ← d · average + (1 − d) · weight. The n-th step has d = min(ema_decay, (n − 1) / (n + 8)), as
TensorFlow's `ExponentialMovingAverage` has with its number of updates: the first step's average is its weights, and
early weights are forgotten soon. An average that begins later begins with the weights of that moment, as if they had
been the first step's.
"""

from collections.abc import Collection

import torch
from torch import Tensor

from muster.config.optimizer_state import EMA_STATE
from muster.optim.base import Optimizer, WrappingOptimizer


class AveragingOptimizer(WrappingOptimizer):
    """Optimizer that takes another one's steps, and averages the weights after each.

    The averages have the shapes and the dtype of the local tensors, and are a part of the state.
    """

    def __init__(self, inner: Optimizer, ema_decay: float) -> None:
        super().__init__(inner)
        self.ema_decay = ema_decay
        self.averages: dict[str, Tensor] = {name: torch.zeros_like(param) for name, param in inner.params.items()}

    def begin_state(self, parameters: Collection[str], average: bool = False) -> None:
        super().begin_state(parameters)
        if average:
            self.starts = self.starts._replace(average=self.step_count)
        with torch.no_grad():  # a parameter that was frozen until now was its own average
            for name in self.averages if average else self.averages.keys() & parameters:
                self.averages[name].copy_(self.params[name])

    def step(self, lr: float) -> None:
        self.inner.step(lr)
        with torch.no_grad():
            self._average()

    def _average(self) -> None:
        if not self.averages:  # a rank may hold no part of any parameter
            return
        decay = average_decay(self.ema_decay, self.step_count - self.starts.average + 1)
        weights = [self.params[name] for name in self.averages]
        torch._foreach_lerp_(list(self.averages.values()), weights, 1 - decay)

    def state(self) -> dict[str, tuple[str, Tensor]]:
        averages = {f"{name}.{EMA_STATE}": (name, tensor) for name, tensor in self.averages.items()}
        return self.inner.state() | averages


def average_decay(ema_decay: float, step: int) -> float:
    """Return the decay of the average in its `step`-th step, counted from 1."""
    return min(ema_decay, (step - 1) / (step + 8))
