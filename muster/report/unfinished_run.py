"""Report of a run that is training, was stopped or failed: what its directory holds so far."""

import fcntl
import json
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from muster.report.islands import meetings_note
from muster.report.recoveries import recoveries_note
from muster.report.report_data import ReportData, RunInfo
from muster.report.run_files import (
    MEETINGS_FILE,
    STRAGGLERS_FILE,
    SWARM_FILE,
    read_metrics,
    read_run_config,
    read_run_plan,
    restarts_note,
)
from muster.report.stragglers import straggler_note
from muster.report.swarm import swarm_note
from muster.report.wall_time import wall_time_note
from muster.spec.formatting import format_count
from muster.spec.plan_name import format_plan_name
from muster.version import __version__

LOCK_FILE = ".lock"
"""File that a job holds locked while it trains in a run directory."""
_EXIT_STOPPED = 75


@dataclass(frozen=True, slots=True)
class UnfinishedRun:
    """The state of a run, and its report so far."""

    is_running: bool
    status: str
    """Sentence about its state."""
    report: ReportData


def unfinished_run(run_dir: Path) -> UnfinishedRun:
    """Read a run that has written no report of its own. Raises ConfigError for a directory that is no run."""
    config, plan = read_run_config(run_dir), read_run_plan(run_dir)
    metrics = read_metrics(run_dir / "metrics.jsonl")
    meetings = read_metrics(run_dir / MEETINGS_FILE)
    swarm_rows = read_metrics(run_dir / SWARM_FILE)
    is_running = _is_locked(run_dir)
    ended = {} if is_running else _exit_status(run_dir)
    last = metrics[-1] if metrics else {}
    status = _status(is_running, ended, last.get("step", 0), config.get("train.steps"))
    losses = [row["eval/loss"] for row in metrics if row.get("eval/loss") is not None]
    when = ended.get("time")
    facts = RunInfo(
        num_ranks=plan.world_size,
        num_tokens=last.get("train/tokens"),
        num_epochs=last.get("train/epoch"),
        seed=config.get("seed"),
        finished=None if when is None else f"{datetime.fromtimestamp(when, UTC):%Y-%m-%d %H:%M} UTC",
        muster_version=__version__,
    )
    checks = read_metrics(run_dir / STRAGGLERS_FILE)
    notes = (
        meetings_note(meetings),
        swarm_note(swarm_rows),
        straggler_note(checks),
        restarts_note(run_dir),
        recoveries_note(run_dir),
        wall_time_note(run_dir, when),
    )
    report = ReportData(
        title=run_dir.resolve().name,
        plan_name=format_plan_name(plan),
        facts=facts,
        metrics=metrics,
        validation_loss=losses[-1] if losses else None,
        notes=list(filter(None, notes)),
        meetings=meetings,
        swarm=swarm_rows,
        straggler_checks=checks,
        status=status,
    )
    return UnfinishedRun(is_running, status, report)


def _status(is_running: bool, ended: dict[str, Any], step: int, steps: int | None) -> str:
    """Return `running: step 20 of 100`, or how the run ended and after which step."""
    place = f"step {format_count(step)}" + (f" of {format_count(steps)}" if steps else "")
    if is_running:
        return f"running: {place}"
    if not ended:
        return f"ended without a word at {place}: it was killed, or its machine was lost"
    code = ended.get("code")
    if code == 0:
        return f"finished at {place}"
    kind = "stopped" if code == _EXIT_STOPPED else f"failed with exit code {code}"
    return f"{kind} at {place}: {ended.get('reason')}"


def _is_locked(run_dir: Path) -> bool:
    """Return True while a job holds the run directory."""
    try:
        with (run_dir / LOCK_FILE).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _exit_status(run_dir: Path) -> dict[str, Any]:
    """Return the contents of exit.json; empty where there is none."""
    try:
        found = json.loads((run_dir / "exit.json").read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
