"""Tracking of metrics beside metrics.jsonl: TensorBoard's event files, and Weights & Biases.

Packages are imported where they are used. A tracker that fails is reported once and closed; the training continues.
"""

import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from muster.config.run_config import RunConfig, TrackingConfig
from muster.spec.errors import ConfigError

TENSORBOARD, WANDB = "tensorboard", "wandb"
"""Folders in the run directory, and names of the packages."""
INIT_TIMEOUT_S = 60
"""Longest time that Weights & Biases may take to start a run."""


class Tracker(Protocol):
    """Receiver of metrics by name."""

    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """An event file in the run directory. Events of an earlier attempt after step `done` are marked as superseded."""

    def __init__(self, config: RunConfig, run_dir: Path, done: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(str(run_dir / TENSORBOARD))
        if done:
            start = SessionLog(status=SessionLog.START)
            self._writer.add_event(Event(wall_time=time.time(), step=done + 1, session_log=start))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]

        numbers = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=numbers)))

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run of Weights & Biases, with its files in the run directory; a resumed run continues the same one."""

    def __init__(self, config: RunConfig, run_dir: Path, done: int) -> None:
        wandb: Any = import_module(WANDB)
        identity = run_dir / WANDB / "id"
        identity.parent.mkdir(parents=True, exist_ok=True)
        if not identity.exists():
            identity.write_text(uuid.uuid4().hex[:12])
        self._run = wandb.init(
            dir=str(run_dir),
            id=identity.read_text(),
            name=run_dir.resolve().name,
            project=config.tracking.wandb_project,
            mode=config.tracking.wandb_mode,
            resume="allow",
            config=config.model_dump(mode="json"),
            settings=wandb.Settings(init_timeout=INIT_TIMEOUT_S, silent=True, console="off"),
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


_KINDS: dict[str, Callable[[RunConfig, Path, int], Tracker]] = {TENSORBOARD: TensorBoard, WANDB: WeightsAndBiases}


def require_trackers(tracking: TrackingConfig) -> None:
    """Raise ConfigError where the package of a requested tracker is missing."""
    for name in _KINDS:
        if getattr(tracking, name) and find_spec(name) is None:
            raise ConfigError(f"tracking.{name} needs the package {name}: pip install 'muster-llm[{name}]'")


class Trackers:
    """All trackers of a run that starts after `done` steps, on its main rank; none on the others."""

    def __init__(self, config: RunConfig, run_dir: Path, done: int, is_main: bool) -> None:
        self._open: dict[str, Tracker] = {}
        for name in _requested_trackers(config.tracking) if is_main else ():
            self._try(name, lambda name=name: self._open.update({name: _KINDS[name](config, run_dir, done)}))

    def log(self, row: Mapping[str, Any]) -> None:
        """Pass on the numbers of a line of metrics.jsonl."""
        values = {key: float(value) for key, value in row.items() if isinstance(value, int | float) and key != "step"}
        for name, tracker in list(self._open.items()):
            self._try(name, lambda tracker=tracker: tracker.log(row["step"], values))

    def close(self) -> None:
        for name, tracker in list(self._open.items()):
            self._try(name, tracker.close)
        self._open.clear()

    def _try(self, name: str, do: Callable[[], object]) -> None:
        try:
            do()
        except Exception as error:  # whatever another package may raise
            self._open.pop(name, None)
            reason = f"{type(error).__name__}: {error}"
            print(f"{name} gets no more metrics ({reason}); training continues without it", flush=True)


def _requested_trackers(tracking: TrackingConfig) -> Iterator[str]:
    if tracking.tensorboard or (tracking.tensorboard is None and find_spec(TENSORBOARD) is not None):
        yield TENSORBOARD
    if tracking.wandb:
        yield WANDB
