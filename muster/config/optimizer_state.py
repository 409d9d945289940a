"""Optimizer state of a run and the work of its updates, from what `muster.config.optimizers` or a plugin declares."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, TypeGuard

from muster.config.freezing import is_frozen
from muster.config.optim_config import OptimConfig
from muster.config.optimizers import ADAMW_UPDATE, OPTIMIZERS, StateTensor, UpdateRule
from muster.layout.tensor_layout import TensorLayout
from muster.plugins.registry import get_component
from muster.spec.plan import Precision

EMA_STATE = "ema"
"""Name of the moving average among a parameter's state tensors (`optim.ema_decay`)."""


@dataclass(frozen=True, eq=False)
class PluginOptimizer:
    """An optimizer that a plugin registers."""

    name: str
    factory: Callable[..., Any]
    """Makes a `torch.optim.Optimizer` of parameters, `lr` and `optim.options`."""
    probe_state: Callable[["PluginOptimizer", Mapping[str, Any]], tuple[str, ...]]
    cache: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def state_names(self, options: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the names of its state tensors per parameter. Raises ConfigError where the state can't be sharded."""
        if (key := repr(sorted(options.items()))) not in self.cache:
            self.cache[key] = self.probe_state(self, options)
        return self.cache[key]


def skips_weight_decay(name: str) -> bool:
    """Return True for parameters without weight decay: norms, biases, attention sinks and embeddings."""
    module, _, leaf = name.rpartition(".")
    return leaf in ("bias", "sinks") or module.endswith("norm") or module.rpartition(".")[2] in ("embed", "positions")


def update_rule(optim: OptimConfig | None, name: str, shape: tuple[int, ...]) -> UpdateRule:
    """Return the rule by which the run's optimizer updates a parameter of this name and global shape.

    None stands for AdamW here and below. Raises ConfigError for a plugin's optimizer that ranks can't share.
    """
    if optim is None:
        return ADAMW_UPDATE
    if (entry := OPTIMIZERS.get(optim.name)) is not None:
        return entry.rule_of(name, shape)
    names = get_component("optimizer", optim.name).state_names(optim.options)
    return UpdateRule(tuple(StateTensor(state) for state in names))


def update_state(optim: OptimConfig | None, name: str, shape: tuple[int, ...]) -> tuple[StateTensor, ...]:
    """Return the state tensors that updates of a parameter of this name and global shape need; a frozen one has
    none."""
    if is_frozen(optim, name):
        return ()
    tensors = update_rule(optim, name, shape).state
    return tuple(one for one in tensors if one.required_key is None or getattr(optim, one.required_key))


def optimizer_state(optim: OptimConfig | None, name: str, shape: tuple[int, ...]) -> tuple[StateTensor, ...]:
    """Return all state tensors that a run stores for a parameter: those of updates, and its moving average."""
    tensors = update_state(optim, name, shape)
    if optim is None or not optim.ema_decay or is_frozen(optim, name):
        return tensors
    return (*tensors, StateTensor(EMA_STATE))


def optimizer_state_names(optim: OptimConfig | None, name: str, shape: tuple[int, ...]) -> tuple[str, ...]:
    """Return the names of a parameter's state tensors; in a checkpoint they are called `optim/NAME.STATE`."""
    return tuple(tensor.name for tensor in optimizer_state(optim, name, shape))


def optimizer_state_numel(optim: OptimConfig | None, layouts: Iterable[TensorLayout]) -> int:
    """Return the number of elements of optimizer state that a rank with these layouts stores."""
    return sum(layout.numel * len(optimizer_state(optim, layout.name, layout.shape)) for layout in layouts)


def optimizer_state_bytes(optim: OptimConfig | None, layouts: Iterable[TensorLayout], master_bytes: int) -> int:
    """Return the bytes of optimizer state that a rank with these layouts stores, without states of whole matrices.

    `master_bytes` is the size of an element of the master weights.
    """
    return sum(
        layout.numel * tensor.element_bytes(master_bytes)
        for layout in layouts
        for tensor in optimizer_state(optim, layout.name, layout.shape)
        if tensor.owned_shape is None
    )


def owned_state_bytes(optim: OptimConfig | None, name: str, shape: tuple[int, ...], master_bytes: int) -> int:
    """Return the bytes of the states that the owner of a whole matrix stores for it."""
    return sum(
        prod(tensor.owned_shape(shape, optim)) * tensor.element_bytes(master_bytes)
        for tensor in update_state(optim, name, shape)
        if tensor.owned_shape is not None
    )


def is_zeroth_order(optim: OptimConfig | None) -> TypeGuard[OptimConfig]:
    """Return True if steps compare the losses at two perturbations instead of running a backward."""
    entry = None if optim is None else OPTIMIZERS.get(optim.name)
    return entry is not None and entry.is_zeroth_order


def has_owned_state(optim: OptimConfig | None) -> bool:
    """Return True if owners of matrices store states of these."""
    entry = None if optim is None else OPTIMIZERS.get(optim.name)
    return entry is not None and entry.matrix_rule is not None and entry.matrix_rule.has_owned_state


def mean_state_bytes(optim: OptimConfig | None, shapes: Mapping[str, tuple[int, ...]], master_bytes: int) -> float:
    """Return the bytes of optimizer state per element of these parameters (by name and global shape), on average.

    AdamW with fp32 master weights stores 8.
    """
    sizes = {name: _state_bytes_per_element(optim, name, shape, master_bytes) for name, shape in shapes.items()}
    return _mean_per_element(sizes, shapes)


def _state_bytes_per_element(optim: OptimConfig | None, name: str, shape: tuple[int, ...], master_bytes: int) -> float:
    """Return the bytes of all state tensors of a parameter, divided by its elements."""
    tensors = optimizer_state(optim, name, shape)
    alike = sum(tensor.element_bytes(master_bytes) for tensor in tensors if tensor.owned_shape is None)
    return alike + owned_state_bytes(optim, name, shape, master_bytes) / max(1, prod(shape))


def mean_update_bytes(
    optim: OptimConfig | None, shapes: Mapping[str, tuple[int, ...]], master_bytes: int, compute_bytes: int
) -> float:
    """Return the bytes that an optimizer step reads and writes per element of these parameters, on average; a moving
    average of the weights reads them once more.

    `compute_bytes` is the size of an element of the weights that the passes use. AdamW with fp32 master weights and
    bf16 passes moves 30.
    """
    sizes = {
        name: 0
        if is_frozen(optim, name)
        else update_rule(optim, name, shape).bytes_per_element(
            _state_bytes_per_element(optim, name, shape, master_bytes), master_bytes, compute_bytes
        )
        + master_bytes * bool(optim and optim.ema_decay)
        for name, shape in shapes.items()
    }
    return _mean_per_element(sizes, shapes)


def _mean_per_element(sizes: Mapping[str, float], shapes: Mapping[str, tuple[int, ...]]) -> float:
    numels = {name: prod(shape) for name, shape in shapes.items()}
    return sum(sizes[name] * numel for name, numel in numels.items()) / sum(numels.values())


def update_flops(optim: OptimConfig | None, shapes: Mapping[str, tuple[int, ...]]) -> float:
    """Return the FLOPs of the matmuls in an optimizer step over whole parameters of these names and global shapes.

    Elementwise work is left out: it is bound by memory traffic (`mean_update_bytes`).
    """
    total = 0.0
    for name, shape in shapes.items():
        matrix_flops = None if is_frozen(optim, name) else update_rule(optim, name, shape).matrix_flops
        total += 0.0 if matrix_flops is None else matrix_flops(shape, optim)
    return total


def whole_matrix_shapes(optim: OptimConfig | None, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Return the parameters, by name and global shape, that the optimizer can only update as whole matrices."""
    return {
        name: shape
        for name, shape in shapes.items()
        if not is_frozen(optim, name) and update_rule(optim, name, shape).matrix_flops is not None
    }


def whole_matrix_precision(optim: OptimConfig | None) -> Precision | None:
    """Return the precision in which whole matrices are exchanged and computed on; None: that of the master weights."""
    entry = None if optim is None else OPTIMIZERS.get(optim.name)
    key = entry.matrix_rule.matrix_precision_key if entry is not None and entry.matrix_rule is not None else None
    precision = "fp32" if key is None else getattr(optim, key)
    return None if precision == "fp32" else precision
