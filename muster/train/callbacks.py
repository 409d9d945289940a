"""Callbacks of plugins: objects whose methods are called after steps, validations and saves, on every rank."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from muster.plugins.loader import error_location
from muster.plugins.registry import find_component
from muster.spec.errors import ConfigError, MusterError

EVENTS = ("on_step", "on_eval", "on_save")
"""Methods of a callback, all of them optional."""


@dataclass(frozen=True)
class CallbackContext:
    """One event of a run on one rank. All ranks are told of the same events in the same order."""

    step: int
    """Number of the step, from 1."""
    rank: int
    run_dir: Path
    metrics: Mapping[str, Any]
    """on_step: the step's values, named as in metrics.jsonl. on_eval: the validation losses. on_save: empty."""
    checkpoint: Path | None
    """on_save: the checkpoint, which is complete; otherwise None."""
    stop: Callable[[], None]
    """Let the run save and stop after the next step, as if asked to; the same command resumes it."""


class Callbacks:
    """The callbacks of one rank, in the order of `train.callbacks`."""

    def __init__(self, names: Sequence[str], rank: int, run_dir: Path, stop: Callable[[], None]) -> None:
        self._rank, self._run_dir, self._stop = rank, run_dir, stop
        self._objects: list[tuple[str, Path | None, Any]] = []
        for name in names:
            component = find_component("callback", name)
            assert component is not None, "the configuration was checked"
            made = self._try(name, component.file, component.target)
            if not any(hasattr(made, event) for event in EVENTS):
                raise ConfigError(
                    f"train.callbacks {name}: expected an object with some of the methods {', '.join(EVENTS)}, got a"
                    f" {type(made).__name__} without any"
                )
            self._objects.append((name, component.file, made))

    def __bool__(self) -> bool:
        return bool(self._objects)

    def call(self, event: str, step: int, metrics: Mapping[str, Any] | None = None, saved: Path | None = None) -> None:
        """Tell all callbacks of an event. Raises ConfigError, with file and line, where one of them fails."""
        context = CallbackContext(step, self._rank, self._run_dir, metrics or {}, saved, self._stop)
        for name, file, made in self._objects:
            if (method := getattr(made, event, None)) is not None:
                self._try(name, file, method, context)

    def _try(self, name: str, file: Path | None, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except MusterError:
            raise
        except Exception as error:
            where = error_location(file or Path(name), error)
            raise ConfigError(f"train.callbacks {name}: {where}: {type(error).__name__}: {error}") from error
