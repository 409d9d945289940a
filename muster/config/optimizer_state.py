"""What an optimizer keeps for each parameter: the one truth for its state, checkpoints and memory."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from muster.config.optim_config import OPTIMIZERS, OptimConfig
from muster.layout.tensor_layout import TensorLayout
from muster.plugins.registry import get_component

ADAMW_STATE = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, eq=False)
class PluginOptimizer:
    """An optimizer that a plugin registers."""

    name: str
    factory: Callable[..., Any]
    """Makes a `torch.optim.Optimizer` of parameters, `lr` and `optim.options`."""
    probe_state: Callable[["PluginOptimizer", Mapping[str, Any]], tuple[str, ...]]
    cache: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def state_names(self, options: Mapping[str, Any]) -> tuple[str, ...]:
        """What it keeps for each parameter. Raises ConfigError where it isn't one that ranks can share."""
        if (key := repr(sorted(options.items()))) not in self.cache:
            self.cache[key] = self.probe_state(self, options)
        return self.cache[key]


def skips_weight_decay(name: str) -> bool:
    """Whether weight decay passes over a parameter: norms, biases and embeddings."""
    module, _, leaf = name.rpartition(".")
    return leaf == "bias" or module.endswith("norm") or module.rpartition(".")[2] in ("embed", "positions")


def is_muon_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """Whether Muon updates a parameter of this (global) shape: a matrix, but neither embedding, positions nor head."""
    return len(shape) == 2 and name.rpartition(".")[0].rpartition(".")[2] not in ("embed", "positions", "head")


def optimizer_state_names(optim: OptimConfig, name: str, shape: tuple[int, ...]) -> tuple[str, ...]:
    """The state tensors of one parameter, each with the shape, layout and dtype of the parameter (its master weights).

    In a checkpoint they are called `optim/NAME.STATE`.
    """
    if optim.name == "lion":
        return ("exp_avg",)
    if optim.name == "sgd":
        return ("momentum",) if optim.momentum else ()
    if optim.name == "muon" and is_muon_matrix(name, shape):
        return ("momentum",)
    return (
        ADAMW_STATE if optim.name in OPTIMIZERS else get_component("optimizer", optim.name).state_names(optim.options)
    )


def optimizer_state_numel(optim: OptimConfig, layouts: Iterable[TensorLayout]) -> int:
    """Numbers of optimizer state that the rank with these layouts keeps."""
    return sum(layout.numel * len(optimizer_state_names(optim, layout.name, layout.shape)) for layout in layouts)
