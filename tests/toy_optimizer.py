"""A toy optimizer as a contributor would add it: one file in muster/optim, and `ENTRY` in the registry."""

import torch
from torch import Tensor

from muster.config.optimizers import OptimizerEntry, StateTensor, UpdateRule
from muster.optim.base import ElementwiseOptimizer

ENTRY = OptimizerEntry(
    "tests.toy_optimizer:Adagrad",
    UpdateRule(state=(StateTensor("sum"), StateTensor("sign", dtype="bf16", required_key="momentum"))),
    keys=frozenset({"eps", "momentum"}),
    defaults={"eps": 1e-10},
)
"""Adagrad with the sign of a mean gradient in bf16, where momentum is not 0."""


class Adagrad(ElementwiseOptimizer):
    """The step is lr · g / (√Σg² + eps) (J. Duchi et al., JMLR 12, 2011); with momentum, lr times the kept sign."""

    def _update_group(
        self, params: list[Tensor], grads: list[Tensor], state: dict[str, list[Tensor]], lr: float
    ) -> None:
        for param, grad, total in zip(params, grads, state["sum"], strict=True):
            total.addcmul_(grad, grad)
            param.addcdiv_(grad, total.sqrt().add_(self.config.eps), value=-lr)
        for param, grad, sign in zip(params, grads, state.get("sign", ()), strict=False):
            sign.lerp_(torch.sign(grad).to(sign.dtype), 1 - self.config.momentum)
            param.add_(sign.to(param.dtype), alpha=-lr)
