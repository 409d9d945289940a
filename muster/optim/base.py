"""Base classes of optimizers: a step over one rank's local tensors, and a state that exists from the start."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from muster.config.optim_config import OptimConfig
from muster.config.optimizer_state import skips_weight_decay, update_state
from muster.layout.tensor_layout import TensorLayout
from muster.model.dtypes import DTYPES
from muster.model.perturbation import Direction
from muster.parallel.world import World


class StateStarts(NamedTuple):
    """Optimizer steps that had been taken when parts of the state began, where that is later than the run."""

    parameters: Mapping[str, int] = {}
    """Steps after which a parameter's state was zero, by name."""
    average: int = 1
    """Steps after which the average of the weights was the weights."""


class Slope(NamedTuple):
    """Slope of the loss along the direction of a zeroth-order step."""

    direction: Direction
    slope: float


class Optimizer(ABC):
    """Optimizer that changes leaf tensors in place; the caller sets their `.grad`, which the optimizer only reads.

    `params` are by name: a parameter of which the rank holds nothing may be given as an empty tensor or left out.
    """

    def __init__(self, params: Mapping[str, Tensor]) -> None:
        self.params = dict(params)
        self.step_count = 0
        """Steps taken so far; to be set when a state is loaded."""
        self.starts = StateStarts()
        """Beginnings of the state, the same on all ranks; to be set when a state is loaded."""
        self.slope: Slope | None = None
        """Slope of a zeroth-order step, which has no gradients; to be set before it."""
        self.delays: Mapping[str, float] = {}
        """Steps by which the gradients of parameters come late, where an asynchronous schedule makes them so, by name;
        to be set when the stages are known."""

    @classmethod
    def build(
        cls,
        config: OptimConfig,
        params: Mapping[str, Tensor],
        layouts: Mapping[str, TensorLayout],
        world: World | None,
    ) -> "Optimizer":
        """Build the optimizer that `build_optimizer` asks for; one that needs no layouts takes (config, params)."""
        return cls(config, params)  # type: ignore[call-arg, arg-type]

    def step(self, lr: float) -> None:
        """Take one step with the learning rate `lr`; where ranks share a matrix, all of them must call it."""
        with torch.no_grad():
            self._update(lr)
        self.step_count += 1

    def step_part(self, names: Collection[str], lr: float) -> None:
        """Take the step for some parameters alone, where each element's update depends on its own history; `end_step`
        ends it once all have been updated."""
        others = {name: param.grad for name, param in self.params.items() if name not in names}
        for name in others:
            self.params[name].grad = None
        with torch.no_grad():
            self._update(lr)
        for name, gradient in others.items():
            self.params[name].grad = gradient

    def end_step(self) -> None:
        """Count the step that `step_part` has taken for all parameters."""
        self.step_count += 1

    @abstractmethod
    def _update(self, lr: float) -> None: ...

    def steps_of(self, name: str) -> int:
        """Return the steps that a parameter's state has seen, by which moments are corrected for their bias to zero."""
        return self.step_count - self.starts.parameters.get(name, 0)

    def begin_state(self, parameters: Collection[str], average: bool = False) -> None:
        """Begin the state of parameters of the whole model, which is as new here, and the average of all weights."""
        counts = dict.fromkeys(sorted(parameters), self.step_count)
        self.starts = self.starts._replace(parameters={**self.starts.parameters, **counts})

    @abstractmethod
    def state(self) -> dict[str, tuple[str, Tensor]]:
        """Return by stored name (`NAME.exp_avg`) the parameter's name (NAME) and the state tensor, which loading fills.

        Each has the shape and layout of its parameter, or those in `state_layouts`.
        """

    def device_state_bytes(self) -> int:
        """Return the bytes of state that lie on the device."""
        return sum(tensor.nbytes for _, tensor in self.state().values())

    def state_layouts(self) -> dict[str, TensorLayout]:
        """Return by stored name the layouts of the state tensors that aren't laid out as their parameter."""
        return {}


class WrappingOptimizer(Optimizer):
    """Optimizer that adds something to the steps of another, and shares its state and its count of steps."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner = inner
        super().__init__(inner.params)

    @property
    def step_count(self) -> int:  # type: ignore[override]
        """Steps taken so far."""
        return self.inner.step_count

    @step_count.setter
    def step_count(self, count: int) -> None:
        self.inner.step_count = count

    @property
    def starts(self) -> StateStarts:  # type: ignore[override]
        """Beginnings of the state."""
        return self.inner.starts

    @starts.setter
    def starts(self, starts: StateStarts) -> None:
        self.inner.starts = starts

    @property
    def slope(self) -> Slope | None:  # type: ignore[override]
        """Slope of a zeroth-order step."""
        return self.inner.slope

    @slope.setter
    def slope(self, slope: Slope | None) -> None:
        self.inner.slope = slope

    @property
    def delays(self) -> Mapping[str, float]:  # type: ignore[override]
        """Steps by which gradients come late."""
        return self.inner.delays

    @delays.setter
    def delays(self, delays: Mapping[str, float]) -> None:
        self.inner.delays = delays

    def _update(self, lr: float) -> None:
        raise AssertionError("the inner optimizer updates")

    def state_layouts(self) -> dict[str, TensorLayout]:
        return self.inner.state_layouts()


class ElementwiseOptimizer(Optimizer):
    """Optimizer that updates each element from its own history alone, so that sharding can't change the result.

    Its state is the one that its entry in `muster.config.optimizers` declares. Parameters with a gradient are updated
    in at most two lists: those with weight decay and those without.
    """

    def __init__(self, config: OptimConfig, params: Mapping[str, Tensor]) -> None:
        super().__init__(params)
        self.config = config
        self._state = {
            name: {
                tensor.name: torch.zeros_like(param, dtype=tensor.dtype and DTYPES[tensor.dtype])
                for tensor in update_state(config, name, tuple(param.shape))
            }
            for name, param in self.params.items()
        }

    def state(self) -> dict[str, tuple[str, Tensor]]:
        return {f"{name}.{kind}": (name, t) for name, kinds in self._state.items() for kind, t in kinds.items()}

    def _update(self, lr: float) -> None:
        for decays in (True, False):
            names = [n for n, p in self.params.items() if p.grad is not None and has_decay(n, p) is decays]
            if not names:
                continue
            params = [self.params[name] for name in names]
            grads = [param.grad for param in params if param.grad is not None]
            if decays and self.config.weight_decay:
                torch._foreach_mul_(params, 1 - lr * self.config.weight_decay)
            kinds = self._state[names[0]]
            self._update_group(params, grads, {kind: [self._state[n][kind] for n in names] for kind in kinds}, lr)

    @abstractmethod
    def _update_group(
        self, params: list[Tensor], grads: list[Tensor], state: dict[str, list[Tensor]], lr: float
    ) -> None: ...


def has_decay(name: str, param: Tensor) -> bool:
    """Tell if weight decay applies to a parameter: to matrices other than embeddings."""
    return param.ndim >= 2 and not skips_weight_decay(name)
