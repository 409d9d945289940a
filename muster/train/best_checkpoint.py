"""Validation losses that decide: the best checkpoint, and when training stops early. All ranks decide alike."""

from collections.abc import Mapping
from typing import Any

from muster.config.run_config import TrainConfig
from muster.spec.units import pluralize


class ValidationTracker:
    """History of a run's validation losses, as far as `train.keep_best` and early stopping need it.

    Every rank has the same losses, from one all-reduce, and so the same history.
    """

    def __init__(self, train: TrainConfig) -> None:
        self._train = train
        self.best_loss: float | None = None
        self.best_step = 0
        self._reference: float | None = None
        """Last loss that was lower than the one before by more than `train.early_stopping_min_delta`."""
        self._num_without_improvement = 0
        """Validations since."""

    @property
    def is_used(self) -> bool:
        """True where the run's configuration asks for it."""
        return self._train.keep_best or self._train.early_stopping_patience > 0

    @property
    def should_stop(self) -> bool:
        """True when the last validations were without improvement, as many as `train.early_stopping_patience`."""
        return stops_early(self.state(), self._train)

    def update(self, step: int, loss: float) -> None:
        """Add the validation loss after a step."""
        if self.best_loss is None or loss < self.best_loss:
            self.best_loss, self.best_step = loss, step
        if self._reference is None or loss < self._reference - self._train.early_stopping_min_delta:
            self._reference, self._num_without_improvement = loss, 0
        else:
            self._num_without_improvement += 1

    def metrics(self) -> dict[str, Any]:
        """Return the metrics of a validation."""
        return {"eval/best_loss": self.best_loss, "eval/best_step": self.best_step} if self.is_used else {}

    def describe_last(self, step: int) -> str:
        """Return the end of a sentence about the validation after a step."""
        if not self.is_used or self.best_loss is None:
            return ""
        text = (
            ", the best so far"
            if step == self.best_step
            else f"; best {self.best_loss:.4f} after step {self.best_step}"
        )
        if (patience := self._train.early_stopping_patience) and self._num_without_improvement:
            text += f", {self._num_without_improvement} of {pluralize(patience, 'validation')} without improvement"
        return text

    def describe(self, is_last: bool, kept_step: int | None) -> list[str]:
        """Return lines about the whole run, for its end; `is_last`: all steps were made, `kept_step`: that of the
        checkpoint that is kept as the best one."""
        if not self.is_used or self.best_loss is None:
            return []
        kept = ""
        if self._train.keep_best:
            kept = ", kept as checkpoints/best"
            if kept_step != self.best_step:  # ranks were lost while it was written
                place = "" if kept_step is None else f"; checkpoints/best is that of step {kept_step}"
                kept = f", whose checkpoint was not completed{place}"
        lines = [f"best validation loss {self.best_loss:.4f} after step {self.best_step}{kept}"]
        if not is_last and self.should_stop:
            count = pluralize(self._num_without_improvement, "validation")
            lines.append(f"stopped early: {count} without improvement (train.early_stopping_patience)")
        return lines

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint's manifest keeps of it."""
        return {
            "best_loss": self.best_loss,
            "best_step": self.best_step,
            "reference": self._reference,
            "num_without_improvement": self._num_without_improvement,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Take up the state of a checkpoint."""
        self.best_loss, self.best_step = state["best_loss"], state["best_step"]
        self._reference, self._num_without_improvement = state["reference"], state["num_without_improvement"]


def stops_early(state: Mapping[str, Any], train: TrainConfig) -> bool:
    """Return whether a run in this state of its validations ends before its last step."""
    patience = train.early_stopping_patience
    return 0 < patience <= state.get("num_without_improvement", 0)
