"""Python form of `muster train`."""

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
    """A run directory after training."""

    directory: Path
    finished: bool
    """False if the run was asked to stop or its time was up; the same call resumes it."""

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """Rows of metrics.jsonl, by step (docs/run-directory.md)."""
        return read_metrics(self.directory / "metrics.jsonl")

    @property
    def loss(self) -> float:
        """Loss of the last step that was logged."""
        return self.metrics[-1]["train/loss"]

    @cached_property
    def result(self) -> Mapping[str, Any]:
        """Contents of result.json: validation losses, predicted against measured times and memory; empty before the
        end."""
        path = self.directory / "result.json"
        return json.loads(path.read_text()) if path.exists() else {}

    @property
    def report(self) -> Path:
        """Path of the HTML report of the run."""
        return self.directory / "report.html"


def train(
    resolved: ResolvedConfig,
    directory: Path,
    nproc: int | None,
    fresh: bool,
    allow_changes: bool,
    ignore_memory: bool = False,
) -> RunResult:
    """Train a run; see `Run.train`."""
    if is_loading_plugin():
        raise ConfigError(
            "Run.train was called while a process of a run imports this file: move the call under"
            " `if __name__ == '__main__':`"
        )
    if threading.current_thread() is not threading.main_thread():
        raise ConfigError("Run.train must be called in the main thread, which receives signals")
    _require_plugin_files(resolved.config)
    start = import_torch_module()
    former = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        code = start.train(
            resolved, start.TrainOptions(directory, nproc, fresh, allow_changes, ignore_memory=ignore_memory)
        )
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
    if code in (0, _EXIT_STOPPED):
        return RunResult(directory, finished=code == 0)
    kind = {2: ConfigError, 3: InfeasibleError}.get(code, MusterError)
    raise kind(json.loads((directory / "exit.json").read_text())["reason"])


_EXIT_STOPPED = 75
"""Exit code of a run that stopped because it was asked to."""


def _require_plugin_files(config: RunConfig) -> None:
    """Check that every plugin component lies in a file. Raises ConfigError for one that other processes can't read."""
    for kind, name in config.plugin_components:
        if (part := find_component(kind, name)) is not None and part.file is None:
            raise ConfigError(
                f"{kind} {name} is registered at a prompt or in a notebook, which the run's processes can't read:"
                " move it to a file, and add the file to plugins"
            )
