"""Construction of the optimizer that a run asks for."""

from collections.abc import Mapping
from importlib import import_module

from torch import Tensor

from muster.config.optim_config import OptimConfig
from muster.config.optimizers import OPTIMIZERS
from muster.layout.tensor_layout import TensorLayout
from muster.optim.base import Optimizer
from muster.optim.plugin_optimizer import TorchOptimizerAdapter
from muster.optim.weight_average import AveragingOptimizer
from muster.parallel.world import World


def build_optimizer(
    config: OptimConfig, params: Mapping[str, Tensor], layouts: Mapping[str, TensorLayout], world: World | None = None
) -> Optimizer:
    """Build the optimizer over a rank's local leaf tensors, its state at zero; all ranks of the world must call it.

    `layouts` gives the rank's boxes of every parameter of its stages, also of parameters of which it holds nothing
    and which `params` may leave out. `world` is None for a single process.
    """
    optimizer = _build_update(config, params, layouts, world)
    return AveragingOptimizer(optimizer, config.ema_decay) if config.ema_decay else optimizer


def _build_update(
    config: OptimConfig, params: Mapping[str, Tensor], layouts: Mapping[str, TensorLayout], world: World | None
) -> Optimizer:
    entry = OPTIMIZERS.get(config.name)
    if entry is None:
        return TorchOptimizerAdapter(config, params)
    module, _, class_name = entry.implementation.partition(":")
    optimizer_class: type[Optimizer] = getattr(import_module(module), class_name)
    return optimizer_class.build(config, params, layouts, world)
