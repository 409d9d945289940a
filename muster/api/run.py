"""Runs in Python: a run file's contents, key by key."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from muster.api.inputs import require_positive_int, require_text
from muster.config.load_config import ResolvedConfig, config_yaml, load_config_tree, load_run_config
from muster.config.run_config import RunConfig
from muster.config.yaml_writer import yaml_text
from muster.spec.dotted_keys import flatten
from muster.spec.errors import ConfigError
from muster.spec.model import ModelSpec
from muster.spec.plan import Plan

if TYPE_CHECKING:
    from muster.api.training import RunResult


class Run:
    """A run: the model, its data and how to train it; each argument is the section of a run file of that name
    (docs/run-files.md).

    `extends` is a preset's name or a run file's path, whose values hold where no others are given; `model` and
    `parallel` may also be names, such as "llama3-8b" and "dp2-pp2", or a `ModelSpec` and a `Plan`. Raises ConfigError
    with one sentence for each problem.
    """

    def __init__(
        self,
        *unnamed: Any,
        extends: str | Path | None = None,
        model: str | Mapping[str, Any] | ModelSpec | None = None,
        data: Mapping[str, Any] | None = None,
        train: Mapping[str, Any] | None = None,
        eval: Mapping[str, Any] | None = None,
        optim: Mapping[str, Any] | None = None,
        parallel: str | Mapping[str, Any] | Plan | None = None,
        plugins: Sequence[str | Path] | None = None,
        seed: int | None = None,
        **others: Any,
    ) -> None:
        if unnamed:
            raise ConfigError(
                f"muster.Run: expected the sections of a run file by name, got {unnamed[0]!r} without one: say"
                " extends=… for a preset, or muster.load(…) for a run file"
            )
        own = {"extends": extends, "model": model, "data": data, "train": train, "optim": optim, "parallel": parallel}
        said = own | {"eval": eval, "plugins": plugins, "seed": seed} | others
        tree = {key: _as_yaml_value(value) for key, value in said.items() if value is not None}
        self._set(load_config_tree(tree, "muster.Run"), Path(str(extends or "run")).stem)

    def _set(self, resolved: ResolvedConfig, name: str) -> None:
        self.resolved = resolved
        """Configuration with the origin of each value."""
        self.name = name
        """Name of its default run directory."""

    @property
    def config(self) -> RunConfig:
        """Return all values, typed."""
        return self.resolved.config

    def plan(self, nproc: int | None = None) -> Plan:
        """Return the plan of the run; `parallel: auto` chooses one for this machine or for `nproc` processes."""
        from muster.planner.auto import resolve_plan

        return resolve_plan(self.resolved, require_positive_int("nproc", nproc))

    def train(
        self,
        directory: str | Path | None = None,
        *,
        nproc: int | None = None,
        fresh: bool = False,
        allow_changes: bool = False,
        ignore_memory: bool = False,
    ) -> "RunResult":
        """Train as `muster train` does, on processes that this one starts, or resume the run in the directory.

        `directory` is by default `runs/` and the run's name; `nproc` as many processes as the plan needs. With
        `ignore_memory` the plan's memory forecast may exceed that of this machine. A script that calls it and registers
        plugin components must do so under `if __name__ == "__main__":`, since the processes import it, too.
        Raises ConfigError and InfeasibleError for a run that can't be started, MusterError with the
        first cause if a process fails. Must be called in the main thread.
        """
        from muster.api.training import train

        if directory is not None:
            require_text("directory", directory, "a path")
        place = Path("runs") / self.name if directory is None else Path(directory)
        return train(self.resolved, place, require_positive_int("nproc", nproc), fresh, allow_changes, ignore_memory)

    def to_yaml(self) -> str:
        """Return a complete run file, each value with its origin; for `parallel: auto` the values given so far."""
        if not self.resolved.plan_is_auto:
            return config_yaml(self.resolved, self.config.parallel)
        origins = self.resolved.origins
        tree = self.config.model_dump(mode="json", exclude={"parallel"}) | {"parallel": "auto"}
        return yaml_text(tree, lambda path: origins.get(path, "default"))

    def __repr__(self) -> str:
        config = self.config
        return f"<muster.Run {self.name}: model {config.model.name}, {config.train.steps} steps>"


def load(file: str | Path | None = None, *, preset: str | None = None, **keys: Any) -> Run:
    """Return the run of a run file, of a preset, or of the file over the preset, with other values for some keys.

    For example `load("run.yaml", **{"train.steps": 10})` or `load("run.yaml", train={"steps": 10})`. Raises
    ConfigError.
    """
    if file is not None:
        require_text("file", file, "a run file's path")
    if preset is not None:
        require_text("preset", preset, "a preset's name")
    tree = {key: _as_yaml_value(value) for key, value in keys.items()}
    run = Run.__new__(Run)
    run._set(
        load_run_config(preset, None if file is None else Path(file), list(flatten(tree))),
        Path(file or preset or "run").stem,
    )
    return run


def _as_yaml_value(value: Any) -> Any:
    """Return a value as YAML would contain it."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _as_yaml_value(one) for key, one in value.items()}
    return [_as_yaml_value(one) for one in value] if isinstance(value, list | tuple) else value
