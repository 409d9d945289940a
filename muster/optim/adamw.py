"""AdamW over one rank's local tensors, with a state that exists from the start and has names."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from muster.config.optim_config import OptimConfig
from muster.config.optimizers import ADAMW_UPDATE
from muster.optim.base import Optimizer, has_decay

FUSED_DEVICES = ("cpu", "cuda")
"""Types of devices for which PyTorch has a fused kernel."""
STATE = tuple(tensor.name for tensor in ADAMW_UPDATE.state)


class AdamW(Optimizer):
    """PyTorch's AdamW (I. Loshchilov and F. Hutter, arXiv:1711.05101), fused where there is a fused kernel."""

    def __init__(self, config: OptimConfig, params: Mapping[str, Tensor]) -> None:
        super().__init__(params)
        groups = [
            {
                "params": [param for name, param in self.params.items() if has_decay(name, param) is decays],
                "weight_decay": config.weight_decay if decays else 0.0,
            }
            for decays in (True, False)
        ]
        self._is_fused = fused = all(param.device.type in FUSED_DEVICES for param in self.params.values())
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
            beta1, beta2 = group["betas"]
            for params in alike.values():
                gradients = [param.grad for param in params if param.grad is not None]
                moments = [[self._torch.state[param][kind] for param in params] for kind in STATE]
                steps = [self._torch.state[param]["step"] for param in params]
                torch._fused_adamw_(
                    *(params, gradients, moments[0], moments[1], [], steps),
                    lr=lr,
                    beta1=beta1,
                    beta2=beta2,
                    weight_decay=group["weight_decay"],
                    eps=group["eps"],
                    amsgrad=False,
                    maximize=False,
                )
