"""The outer step of islands: one mechanism, of which each method says what an island continues with."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from muster.config.outer_config import OuterConfig


@dataclass(frozen=True)
class OuterParameter:
    """Outer copy of a rank's part of one parameter: the same on all islands that share it."""

    value: Tensor
    momentum: Tensor
    paths: int = 1
    """Paths through the module of the parameter (dipaco)."""


class OuterMethod(ABC):
    """A method: what an island continues with after an outer step. What is exchanged when follows from the run file
    alone (`muster.schedule.outer_steps`)."""

    def __init__(self, config: OuterConfig) -> None:
        self.config = config

    @abstractmethod
    def merge(self, local: Tensor, outer: Tensor) -> None:
        """Change an island's parameter `local` after its outer copy has been updated."""

    def average(self, parameter: OuterParameter, local: Tensor, change: Tensor) -> None:
        """Continue with the islands' mean parameters, as after each step of the warm-up."""
        with torch.no_grad():
            parameter.value.sub_(change)
        local.copy_(parameter.value)

    def update(self, parameter: OuterParameter, change: Tensor) -> None:
        """Step the outer optimizer, SGD: `change` is the islands' mean of outer − local parameters, which stands for a
        gradient (arXiv:2311.08105, algorithm 1). m = momentum · m + change; the step is lr · m, with Nesterov lr ·
        (change + momentum · m)."""
        config = self.config
        step = change
        if config.momentum:
            parameter.momentum.mul_(config.momentum).add_(change)
            step = parameter.momentum
            if config.optimizer == "nesterov":
                step = change.add(parameter.momentum, alpha=config.momentum)
        with torch.no_grad():
            parameter.value.add_(step, alpha=-config.learning_rate)
