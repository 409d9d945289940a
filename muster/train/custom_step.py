"""A training step that a plugin registers: what is done with the gradients of a global batch."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from muster.plugins.loader import error_location
from muster.plugins.registry import find_component
from muster.schedule.action import Action
from muster.spec.errors import ConfigError, MusterError

if TYPE_CHECKING:
    from muster.train.trainer import Trainer


class StepContext:
    """One step, as a registered function sees it on one rank: the gradients of the global batch are complete.

    All ranks call the same methods in the same order, as some of them communicate.
    """

    def __init__(self, trainer: "Trainer", run_passes: Callable[[], None]) -> None:
        self._trainer, self._run_passes = trainer, run_passes
        self.updates = 0
        self.step = trainer.step_count + 1
        """Counted from 1."""
        self.learning_rate = trainer.learning_rate

    @property
    def parameters(self) -> Mapping[str, Tensor]:
        """This rank's parts, by the parameter's name, with `.grad`; both may be changed in place, but for gradients
        of parts that ranks hold copies of: change those alike."""
        return self._trainer.parameters

    @property
    def loss(self) -> float:
        """Of the last passes, over the global batch."""
        return self._trainer.loss

    @property
    def grad_norm(self) -> float:
        """Of the last passes, over all parameters of the model."""
        return self._trainer.grad_norm

    def passes(self) -> float:
        """Forwards and backwards over the same batch again, with the parameters as they are now: new gradients, new
        `grad_norm`. Returns the loss."""
        self._trainer.drop_gradients()
        self._trainer.sync_tied_copies()
        with torch.enable_grad():
            self._run_passes()
        return self.loss

    def clip(self) -> None:
        """Cuts the gradients down to `optim.clip_norm`."""
        self._trainer.clip()

    def update(self) -> None:
        """Lets the optimizer step, once in each step. It does nothing where the gradients are not finite."""
        self.updates += 1
        if math.isfinite(self.grad_norm):
            self._trainer.optimizer_step()


class CustomStep:
    """Calls the registered function in each step of a trainer that isn't skipped."""

    def __init__(self, trainer: "Trainer", name: str) -> None:
        part = find_component("step", name)
        assert part is not None, "the configuration was checked"
        self._trainer, self._part, self._is_repeated_pass = trainer, part, False
        self.handlers = {"NORM": self._norm, "STEP": lambda action: None}
        """What an executor does in place of judging and stepping."""

    def run(self, run_passes: Callable[[], object]) -> None:
        """Goes on where the passes have ended; `run` makes them again. Raises ConfigError where the function fails."""

        def again() -> None:
            self._is_repeated_pass = True
            run_passes()
            self._is_repeated_pass = False

        if not self._trainer.is_skipped:
            now = StepContext(self._trainer, again)
            self._trainer.before_change()  # what follows may change parameters at any time
            try:
                self._part.target(now)
            except MusterError:
                raise
            except Exception as error:
                where = error_location(self._part.file or Path(self._part.name), error)
                raise ConfigError(
                    f"train.training_step {self._part.name}: {where}: {type(error).__name__}: {error}"
                ) from error
            if now.updates != 1:
                raise ConfigError(
                    f"train.training_step {self._part.name} called update() {now.updates} times in a step: expected"
                    " once, as checkpoints count steps"
                )
        self._trainer.drop_gradients()

    def _norm(self, action: Action) -> None:
        self._trainer.reduce_norm(decides=not self._is_repeated_pass)
