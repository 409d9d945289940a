"""Contents of a run directory, read without PyTorch."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from muster.config.load_config import load_plan
from muster.config.migrations import migrate
from muster.spec.dotted_keys import flatten
from muster.spec.errors import ConfigError
from muster.spec.plan import Plan
from muster.spec.units import pluralize

RESTARTS_FILE = "restarts.jsonl"
"""File of a run directory with a line for each restart."""
RECOVERIES_FILE = "recoveries.jsonl"
"""File of a run directory with a line for each recovery within an attempt."""
MEETINGS_FILE = "islands.jsonl"
"""File of a run directory with a line for each exchange between islands."""
STRAGGLERS_FILE = "stragglers.jsonl"
"""File of a run directory with a line for each comparison of the ranks."""
SWARM_FILE = "swarm.jsonl"
"""File of a run directory with a line for each step of a swarm: what each peer did."""
_MOST_TOLD = 5
"""Restarts whose reasons a note tells."""


@dataclass(frozen=True, slots=True)
class RunRecord:
    """Run as recorded in its directory."""

    name: str
    """Shortest end of its path that no other run of the comparison has."""
    directory: Path
    plan: Plan
    """Plan of the last attempt."""
    config: Mapping[str, Any]
    """config.yaml by dotted key, without its plan."""
    metrics: Sequence[Mapping[str, Any]]
    """Rows of metrics.jsonl, at least one."""
    result: Mapping[str, Any]
    """Contents of result.json; empty while the training has not ended."""


def read_runs(directories: Sequence[Path]) -> list[RunRecord]:
    """Read runs and give each a distinct name. Raises ConfigError for a directory that is no run, has no steps or is
    given twice."""
    names = _names([path.resolve() for path in directories])
    return [_read(path, name) for path, name in zip(directories, names, strict=True)]


def read_run_config(run_dir: Path) -> dict[str, Any]:
    """Return config.yaml by dotted key, without its plan. Raises ConfigError for a directory that is no run."""
    _require_file(run_dir, "config.yaml")
    tree = migrate("run", _yaml(run_dir / "config.yaml"), str(run_dir / "config.yaml"))
    return {key: value for key, value in flatten(tree) if not key.startswith("parallel.")}


def read_run_plan(run_dir: Path) -> Plan:
    """Return the plan of the last attempt. Raises ConfigError for a directory that is no run."""
    _require_file(run_dir, "plan.yaml")
    return load_plan(run_dir / "plan.yaml")


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file with an object a line; a line cut short by a kill is skipped."""
    rows = []
    if path.exists():
        for line in path.read_text().splitlines():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError:
                continue
    return rows


def append_row(path: Path, row: Mapping[str, Any]) -> None:
    """Append an object as a line of its own, after a last line that may be cut short by a kill. Raises OSError."""
    with path.open("ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
        file.write(json.dumps(row).encode() + b"\n")


def last_step(run_dir: Path) -> int:
    """Return the last step of which a run has written metrics; 0 without one."""
    return max((row.get("step", 0) for row in read_metrics(run_dir / "metrics.jsonl")[-1:]), default=0)


def restarts_note(run_dir: Path) -> str | None:
    """Return a sentence about the restarts of a run; None where there were none."""
    rows = read_metrics(run_dir / RESTARTS_FILE)
    if not rows:
        return None
    told = "; ".join(f"after step {row['step']}, when {row['reason']}" for row in rows[-_MOST_TOLD:])
    last = f", the last {_MOST_TOLD}" if len(rows) > _MOST_TOLD else ""
    return f"{pluralize(len(rows), 'restart')}{last}: {told}"


def _read(directory: Path, name: str) -> RunRecord:
    config, plan = read_run_config(directory), read_run_plan(directory)
    metrics = read_metrics(directory / "metrics.jsonl")
    if not metrics:
        raise ConfigError(
            f"{directory} has no steps: its metrics.jsonl is empty or missing, so nothing can be compared"
        )
    return RunRecord(name, directory, plan, config, metrics, _result(directory))


def _require_file(run_dir: Path, file: str) -> None:
    if not run_dir.is_dir():
        raise ConfigError(f"there is no run directory {run_dir}")
    if not (run_dir / file).exists():
        raise ConfigError(f"{run_dir} is no run directory: it has no {file}, which 'muster train' writes")


def _yaml(path: Path) -> Mapping[str, Any]:
    try:
        tree = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError):
        tree = None
    if not isinstance(tree, Mapping):
        raise ConfigError(f"{path} can't be read: expected the configuration that 'muster train' wrote")
    return tree


def _result(directory: Path) -> Mapping[str, Any]:
    """Read result.json: runs that have not ended, and runs of early versions, have none."""
    try:
        found = json.loads((directory / "result.json").read_text())
    except FileNotFoundError:
        return {}
    except (json.JSONDecodeError, UnicodeDecodeError):
        found = None
    if not isinstance(found, Mapping):
        raise ConfigError(f"{directory / 'result.json'} can't be read: expected the JSON that 'muster train' wrote")
    return found


def _names(paths: Sequence[Path]) -> list[str]:
    """Return the last parts of each path, as many as distinguish it from the others."""
    if twice := [path for i, path in enumerate(paths) if path in paths[:i]]:
        raise ConfigError(f"{twice[0]} is given twice; expected different runs")
    for parts in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-parts:]) for path in paths]
        if len(set(names)) == len(names):
            break
    return names
