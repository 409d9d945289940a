"""A training step registered by a plugin, in place of clipping the gradients and stepping the optimizer."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from muster.plugins.loader import error_location
from muster.plugins.registry import find_component
from muster.schedule.action import Action, Kind
from muster.spec.errors import ConfigError, MusterError
from muster.train.parameter_updater import ParameterUpdater


class StepContext:
    """One step on one rank, as a registered function sees it: the gradients of the global batch are complete.

    All ranks call the same methods in the same order, as some of them communicate.
    """

    def __init__(self, updater: ParameterUpdater, run_passes: Callable[[], None]) -> None:
        self._updater = updater
        self._run_passes = run_passes
        self.updates = 0
        self.step = updater.state.step
        """Number of the step, from 1."""
        self.learning_rate = updater.state.learning_rate

    @property
    def parameters(self) -> Mapping[str, Tensor]:
        """This rank's parts of the parameters, by name, with `.grad`.

        Parameters and gradients may be changed in place; where several ranks hold the same part, each has to make the
        same change.
        """
        return self._updater.parameters

    @property
    def loss(self) -> float:
        """Loss of the last passes, over the global batch."""
        return self._updater.state.loss

    @property
    def grad_norm(self) -> float:
        """Global gradient norm of the last passes, over all parameters of the model."""
        return self._updater.state.grad_norm

    def passes(self) -> float:
        """Run forward and backward over the same batch again with the present parameters; returns the loss.

        Gradients and `grad_norm` are new afterwards.
        """
        self._updater.drop_gradients()
        self._updater.sync_tied_copies()
        with torch.enable_grad():
            self._run_passes()
        return self.loss

    def clip(self) -> None:
        """Clip the gradients to the global norm `optim.clip_norm`."""
        self._updater.clip()

    def update(self) -> None:
        """Step the optimizer, exactly once in each step; without effect where the gradients are not finite."""
        self.updates += 1
        if math.isfinite(self.grad_norm):
            self._updater.optimizer_step()


class CustomStep:
    """Calls the registered function in each step that isn't skipped."""

    def __init__(self, updater: ParameterUpdater, name: str) -> None:
        component = find_component("step", name)
        assert component is not None, "the configuration was checked"
        self._updater = updater
        self._component = component
        self._is_repeated_pass = False
        self.handlers = {Kind.GRAD_NORM: self._reduce_norm, Kind.STEP: lambda action: None}
        """Handlers that an executor uses in place of the trainer's own."""

    def run(self, run_passes: Callable[[], object]) -> None:
        """Finish a step whose passes have ended; `run_passes` runs them again.

        Raises ConfigError where the function fails or doesn't update the parameters exactly once.
        """

        def repeat_passes() -> None:
            self._is_repeated_pass = True
            run_passes()
            self._is_repeated_pass = False

        if self._updater.state.skip_reason is None:
            context = StepContext(self._updater, repeat_passes)
            self._updater.hooks.before_update()  # the function may change parameters at any time
            name = self._component.name
            try:
                self._component.target(context)
            except MusterError:
                raise
            except Exception as error:
                where = error_location(self._component.file or Path(name), error)
                raise ConfigError(f"train.training_step {name}: {where}: {type(error).__name__}: {error}") from error
            if context.updates != 1:
                raise ConfigError(
                    f"train.training_step {name} called update() {context.updates} times in a step: expected once, as"
                    " checkpoints count steps"
                )
        self._updater.drop_gradients()

    def _reduce_norm(self, action: Action) -> None:
        self._updater.reduce_norm(decides=not self._is_repeated_pass)
