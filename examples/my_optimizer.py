"""An optimizer: the sign of a momentum (signSGD, arXiv:1802.04434), as any `torch.optim.Optimizer`."""

import torch

import muster


@muster.register_optimizer("sign-momentum")
class SignMomentum(torch.optim.Optimizer):
    def __init__(self, params: list[torch.Tensor], lr: float, momentum: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["momentum"] = torch.zeros_like(param)
                state["momentum"].lerp_(param.grad, 1 - group["momentum"])
                param.sub_(state["momentum"].sign(), alpha=group["lr"])
