"""`muster train` as a function."""

import json
import signal
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from muster.api.torch_import import import_torch_module
from muster.config.load_config import ResolvedConfig
from muster.config.run_config import RunConfig
from muster.plugins.loader import is_loading_plugin
from muster.plugins.registry import find_component
from muster.report.run_files import read_metrics
from muster.spec.errors import ConfigError, InfeasibleError, MusterError


@dataclass(frozen=True)
class RunResult:
    """A run directory after a training."""

    directory: Path
    finished: bool
    """False where the run was asked to stop, or its time was up: the same call goes on."""

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl, by step (docs/run-directory.md)."""
        return read_metrics(self.directory / "metrics.jsonl")

    @property
    def loss(self) -> float:
        """Of the last step that was written down."""
        return self.metrics[-1]["train/loss"]

    @cached_property
    def result(self) -> Mapping[str, Any]:
        """result.json: held-out losses, predicted against measured; empty before the end."""
        path = self.directory / "result.json"
        return json.loads(path.read_text()) if path.exists() else {}

    @property
    def report(self) -> Path:
        """The page about the run."""
        return self.directory / "report.html"


def train(resolved: ResolvedConfig, directory: Path, nproc: int | None, fresh: bool, allow_changes: bool) -> RunResult:
    """As `Run.train` says."""
    if is_loading_plugin():
        raise ConfigError(
            "Run.train is called where a process of a run reads this file: put it under `if __name__ == '__main__':`"
        )
    if threading.current_thread() is not threading.main_thread():
        raise ConfigError("Run.train must be called in the main thread, which gets the signals")
    _require_plugin_files(resolved.config)
    start = import_torch_module()
    former = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        code = start.train(resolved, start.TrainOptions(directory, nproc, fresh, allow_changes))
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
    if code in (0, _EXIT_STOPPED):
        return RunResult(directory, finished=code == 0)
    kind = {2: ConfigError, 3: InfeasibleError}.get(code, MusterError)
    raise kind(json.loads((directory / "exit.json").read_text())["reason"])


_EXIT_STOPPED = 75
"""The exit code of a run that stopped because it was asked to."""


def _require_plugin_files(config: RunConfig) -> None:
    """Raises ConfigError for a part that other processes can't read."""
    for kind, name in config.plugin_components:
        if (part := find_component(kind, name)) is not None and part.file is None:
            raise ConfigError(
                f"{kind} {name} is registered at a prompt or in a notebook, which the run's processes can't read:"
                " put it into a file, and the file into plugins"
            )
