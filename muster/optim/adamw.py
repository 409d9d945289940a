"""AdamW over one rank's local tensors, with a state that exists from the start and has names."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from muster.config.optim_config import OptimConfig
from muster.config.optimizers import ADAMW_UPDATE
from muster.optim.base import Optimizer, has_decay

FUSED_DEVICES = ("cpu", "cuda")
"""Types of devices for which PyTorch has a fused kernel."""
STATE = tuple(tensor.name for tensor in ADAMW_UPDATE.state)
PIECE = 2**22
"""Elements of a parameter whose next mean gradient is held at a time."""


class AdamW(Optimizer):
    """PyTorch's AdamW (I. Loshchilov and F. Hutter, arXiv:1711.05101), fused where there is a fused kernel.

    With `nesterov`, where AdamW is the run's optimizer, it is NAdam (T. Dozat, ICLR workshop 2016) with decoupled
    weight decay: β₁ m / (1 − β₁ᵗ⁺¹) + (1 − β₁) g / (1 − β₁ᵗ), the mean gradient as of the next step, stands in place
    of m / (1 − β₁ᵗ).
    """

    def __init__(self, config: OptimConfig, params: Mapping[str, Tensor]) -> None:
        super().__init__(params)
        groups = [
            {
                "params": [param for name, param in self.params.items() if has_decay(name, param) is decays],
                "weight_decay": config.weight_decay if decays else 0.0,
            }
            for decays in (True, False)
        ]
        self._names = {param: name for name, param in self.params.items()}
        self._is_nesterov = config.name == "adamw" and config.nesterov
        self._is_fused = fused = all(param.device.type in FUSED_DEVICES for param in self.params.values())
        assert fused or not self._is_nesterov, "nesterov goes through the fused kernel"
        betas = (config.beta1, config.beta2)
        self._torch = torch.optim.AdamW(groups, betas=betas, eps=config.eps, fused=fused, foreach=not fused)
        self._steps: list[Tensor] = []
        for param in self.params.values():
            self._steps.append(torch.zeros((), dtype=torch.float32, device=param.device if fused else "cpu"))
            moments = {kind: torch.zeros_like(param) for kind in STATE}
            self._torch.state[param] = {"step": self._steps[-1], **moments}

    def state(self) -> dict[str, tuple[str, Tensor]]:
        return {
            f"{name}.{kind}": (name, self._torch.state[param][kind])
            for name, param in self.params.items()
            for kind in STATE
        }

    def _update(self, lr: float) -> None:
        for group in self._torch.param_groups:
            group["lr"] = lr
        if not self._steps:
            return
        counts = [float(self.steps_of(name)) for name in self.params]
        if self._is_fused:
            self._step_fused(lr, counts)
            return
        torch._foreach_zero_(self._steps)
        torch._foreach_add_(self._steps, counts)
        self._torch.step()

    def _step_fused(self, lr: float, counts: Sequence[float]) -> None:
        """Call the kernel that PyTorch's optimizer calls, without what else that does in a step, which takes as long as
        the kernel for a million elements."""
        torch._foreach_zero_(self._steps)
        torch._foreach_add_(self._steps, [count + 1 for count in counts])
        for group in self._torch.param_groups:
            alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
            for param in group["params"]:
                if param.grad is not None and param.numel():
                    alike.setdefault((param.device, param.dtype), []).append(param)
            for params in alike.values():
                if self._is_nesterov:
                    for param in params:
                        self._step_ahead(lr, group, param)
                    continue
                state = [self._torch.state[param] for param in params]
                gradients = [param.grad for param in params if param.grad is not None]
                means, squares, steps = ([one[kind] for one in state] for kind in (*STATE, "step"))
                _call_kernel(lr, group, params, gradients, means, squares, steps)

    def _step_ahead(self, lr: float, group: Mapping[str, Any], param: Tensor) -> None:
        """Update a parameter by the mean gradient of the next step, of which the kernel is given a copy: it multiplies
        it by β₁, adds (1 − β₁) g, and divides all by 1 − β₁ᵗ. Piece by piece, so that the copy is small."""
        assert param.grad is not None
        state, beta1 = self._torch.state[param], group["betas"][0]
        step = self.steps_of(self._names[param]) + 1
        factor = (1 - beta1**step) / (1 - beta1 ** (step + 1))
        tensors = param.view(-1), param.grad.reshape(-1), *(state[kind].view(-1) for kind in STATE)
        for values, gradient, mean, square in zip(*(tensor.split(PIECE) for tensor in tensors), strict=True):
            ahead = mean.lerp_(gradient, 1 - beta1) * factor
            _call_kernel(lr, group, [values], [gradient], [ahead], [square], [state["step"]])


def _call_kernel(lr: float, group: Mapping[str, Any], *tensors: list[Tensor]) -> None:
    """Update parameters with gradients, mean gradients, mean squares and counts of steps."""
    params, gradients, means, squares, steps = tensors
    beta1, beta2 = group["betas"]
    torch._fused_adamw_(
        *(params, gradients, means, squares, [], steps),
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        amsgrad=False,
        maximize=False,
    )
