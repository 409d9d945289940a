"""A training step: sharpness-aware minimization (arXiv:2010.01412), which uses the gradient a little uphill."""

import torch

import muster

RHO = 0.05


@muster.register_step("sam")
def sam(now: muster.StepContext) -> None:
    with torch.no_grad():
        uphill = {
            name: part.grad * (RHO / (now.grad_norm + 1e-12))
            for name, part in now.parameters.items()
            if part.grad is not None
        }
        for name, step in uphill.items():
            now.parameters[name].add_(step)
        now.passes()
        for name, step in uphill.items():
            now.parameters[name].sub_(step)
    now.clip()
    now.update()
