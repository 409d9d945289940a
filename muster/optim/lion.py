"""Lion: steps of constant size, in the direction of the sign of a mean gradient."""

import torch
from torch import Tensor

from muster.optim.base import ElementwiseOptimizer


class Lion(ElementwiseOptimizer):
    """The step is lr · sign(β₁ m + (1 − β₁) g), then m = β₂ m + (1 − β₂) g (X. Chen et al., arXiv:2302.06675, Alg. 2).

    It needs a learning rate 3 to 10 times smaller than AdamW's, and a weight decay as many times larger (§5).
    """

    def _update_group(
        self, params: list[Tensor], grads: list[Tensor], state: dict[str, list[Tensor]], lr: float
    ) -> None:
        means = state["exp_avg"]
        updates = torch._foreach_mul(means, self.config.beta1)
        torch._foreach_add_(updates, grads, alpha=1 - self.config.beta1)
        torch._foreach_sign_(updates)
        torch._foreach_add_(params, updates, alpha=-lr)
        torch._foreach_mul_(means, self.config.beta2)
        torch._foreach_add_(means, grads, alpha=1 - self.config.beta2)
