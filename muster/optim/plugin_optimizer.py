"""Plugins' optimizers: `torch.optim.Optimizer`s over one rank's local tensors."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from muster.config.optim_config import OptimConfig
from muster.config.optimizer_state import PluginOptimizer
from muster.optim.base import Optimizer, has_decay
from muster.plugins.loader import error_location
from muster.plugins.registry import get_component
from muster.spec.errors import ConfigError, MusterError

STEP_COUNT = "step"
"""Name of the only state that isn't a tensor of the parameter's shape: the number of steps taken."""


class TorchOptimizerAdapter(Optimizer):
    """Adapter of a plugin's optimizer, with a state that exists from the start.

    That state is the one after a step of zero gradients at a learning rate of zero. Weight decay is Muster's, decoupled
    (arXiv:1711.05101), so that it means the same for all optimizers.
    """

    def __init__(self, config: OptimConfig, params: Mapping[str, Tensor]) -> None:
        super().__init__(params)
        own: PluginOptimizer = get_component("optimizer", config.name)
        self._plugin, self._names, self._weight_decay = own, own.state_names(config.options), config.weight_decay
        self._torch = _make(own, config.options, self.params.values()) if self.params else None
        grads = {name: param.grad for name, param in self.params.items()}
        for param in self.params.values():
            param.grad = torch.zeros_like(param)
        self._step(0.0)
        for name, param in self.params.items():
            param.grad = grads[name]

    def state(self) -> dict[str, tuple[str, Tensor]]:
        if self._torch is None:
            return {}
        return {
            f"{name}.{kind}": (name, self._torch.state[param][kind])
            for name, param in self.params.items()
            for kind in self._names
        }

    def _update(self, lr: float) -> None:
        if self._torch is None:
            return
        decaying = [p for name, p in self.params.items() if p.grad is not None and has_decay(name, p)]
        if decaying and self._weight_decay:
            torch._foreach_mul_(decaying, 1 - lr * self._weight_decay)
        for name, param in self.params.items():
            state = self._torch.state[param]
            if isinstance(count := state.get(STEP_COUNT), Tensor):
                count.fill_(self.steps_of(name))
            elif count is not None:
                state[STEP_COUNT] = self.steps_of(name)
        self._step(lr)

    def _step(self, lr: float) -> None:
        if self._torch is not None:
            _step(self._plugin, self._torch, lr)


def _make(plugin: PluginOptimizer, options: Mapping[str, Any], params: Iterable[Tensor]) -> torch.optim.Optimizer:
    try:
        made = plugin.factory(list(params), lr=0.0, **options)
    except MusterError:
        raise
    except Exception as error:
        why = str(error) if isinstance(error, TypeError | ValueError) else f"{type(error).__name__}: {error}"
        raise ConfigError(
            f"optim.options: optimizer {plugin.name} can't be made with {dict(options)}: {why}"
        ) from error
    if not isinstance(made, torch.optim.Optimizer):
        raise ConfigError(f"optimizer {plugin.name}: expected a torch.optim.Optimizer, got a {type(made).__name__}")
    for group in made.param_groups:
        if "weight_decay" in group:
            group["weight_decay"] = 0.0
    return made


def _step(plugin: PluginOptimizer, optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Take one step. Raises ConfigError, with file and line, if the optimizer fails, as one does that needs a
    closure."""
    for group in optimizer.param_groups:
        group["lr"] = lr
    try:
        optimizer.step()
    except MusterError:
        raise
    except Exception as error:
        code = getattr(getattr(type(optimizer).step, "__wrapped__", type(optimizer).step), "__code__", None)
        where = error_location(Path(code.co_filename), error) if code is not None else plugin.name
        raise ConfigError(
            f"optimizer {plugin.name}: step(), which is called without a closure, fails: {where}:"
            f" {type(error).__name__}: {error}"
        ) from error


# ----------------------------------------------------------------------------------------------------------------------
# Check that ranks may hold shards


def probe_state(plugin: PluginOptimizer, options: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the optimizer's state tensors, found by stepping on a small matrix.

    Raises ConfigError if a sharded matrix changes differently from the whole one, if the state holds something that is
    neither of the parameter's shape nor the number of steps, or if parameters move at a learning rate of 0.
    """
    generator = torch.Generator().manual_seed(0)
    matrix, *gradients = (torch.randn(6, 4, dtype=torch.float64, generator=generator) for _ in range(4))
    whole, state = _run_steps(plugin, options, matrix, gradients)
    for dim, dim_name in ((0, "rows"), (1, "columns")):
        parts = zip(matrix.chunk(2, dim), *(gradient.chunk(2, dim) for gradient in gradients), strict=True)
        cut = torch.cat([_run_steps(plugin, options, part, grads)[0] for part, *grads in parts], dim)
        if not torch.allclose(cut, whole, rtol=1e-6, atol=1e-12):
            raise ConfigError(
                f"optimizer {plugin.name} changes a matrix that is sharded by {dim_name} differently from the whole"
                " one, but ranks hold shards of matrices: expected an elementwise update, where each element depends on"
                " its own gradients alone (Muster's muon updates whole matrices)"
            )
    still, _ = _run_steps(plugin, options, matrix, [torch.zeros_like(matrix)], lr=0.0)
    if not torch.equal(still, matrix):
        raise ConfigError(f"optimizer {plugin.name} changes parameters at a learning rate of 0, which it must not")
    for name, value in state.items():
        if isinstance(value, Tensor) and value.shape == matrix.shape:
            continue
        if name != STEP_COUNT or float(value) != len(gradients):
            shape = f"of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"{value!r}"
            raise ConfigError(
                f"optimizer {plugin.name} keeps {name} {shape} for a parameter of shape {tuple(matrix.shape)}: expected"
                f" tensors of the parameter's shape, which ranks can shard, and the number of steps as"
                f" '{STEP_COUNT}'"
            )
    return tuple(name for name in state if name != STEP_COUNT)


def _run_steps(
    plugin: PluginOptimizer, options: Mapping[str, Any], matrix: Tensor, gradients: Iterable[Tensor], lr: float = 0.1
) -> tuple[Tensor, dict[str, Any]]:
    """Return a matrix after steps with these gradients, and the optimizer's state."""
    param = matrix.clone().requires_grad_()
    optimizer = _make(plugin, options, [param])
    for gradient in gradients:
        param.grad = gradient.clone()
        _step(plugin, optimizer, lr)
    return param.detach(), dict(optimizer.state[param])
