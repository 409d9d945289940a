"""CO2: momentum towards the mean of the islands' parameters of one round before (arXiv:2401.16265)."""

import torch
from torch import Tensor

from muster.optim.outer.base import OuterParameter
from muster.optim.outer.diloco import DiLoCo


class CO2(DiLoCo):
    """Exchanges run beside the whole next round; islands continue with the outer parameters."""

    def update(self, parameter: OuterParameter, change: Tensor) -> None:
        """Step towards the mean parameters x̄ of the round that was exchanged, from the outer parameters x of now:
        m = momentum · m + (x − x̄) / staleness_penalty, each element clipped to ± momentum_clip, and x = x − lr · m
        (algorithm 1; momentum clipping §3.3).

        `change` is x' − x̄, of the outer parameters x' with which that round began. There was one update since, the last
        one: x − x' = −lr · m.
        """
        config, momentum = self.config, parameter.momentum
        gap = change - config.learning_rate * momentum if config.delay else change
        momentum.mul_(config.momentum).add_(gap / config.staleness_penalty)
        if config.momentum_clip is not None:
            momentum.clamp_(-config.momentum_clip, config.momentum_clip)
        with torch.no_grad():
            parameter.value.add_(momentum, alpha=-config.learning_rate)
