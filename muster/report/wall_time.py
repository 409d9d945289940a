"""Wall time of a run, split into steps that count and what attempts, failures and pauses took beside them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from muster.config.attempt_files import attempt_files
from muster.report.recoveries import recoveries_of
from muster.report.run_files import RECOVERIES_FILE, RESTARTS_FILE, append_row, read_metrics
from muster.spec.formatting import format_fraction, format_seconds

Row = Mapping[str, Any]
ATTEMPTS_FILE = "attempts.jsonl"
"""File of a run directory with a line for each attempt, written when its first step begins."""


@dataclass(frozen=True, slots=True)
class WallTime:
    """Seconds from the start of a run's first attempt to the end of its last; the parts add up to the total.

    Of a clock that is set while a run goes on nothing is known: no part is less than 0.
    """

    total_s: float
    productive_s: float
    """Steps that count, each once (goodput)."""
    lost_s: float
    """Steps that were done again, because a failure came before they were saved."""
    recovering_s: float
    """From the last step that was logged before a failure to the first after its restart by the launcher, or the
    recovery without one; to the launcher's last restart where none led to a step."""
    stopped_s: float
    """From there to the first step after a person had started the run again."""
    other_s: float
    """Start, validation, and waiting for checkpoints."""
    restarts: int
    recoveries: int
    """Recoveries, and returns of ranks, without a restart."""

    def to_json(self) -> dict[str, float]:
        """Return the parts as plain data."""
        return asdict(self)


def attempt_row(
    started: float,
    begins: float,
    step: int,
    metrics: Path,
    generation: int = 0,
    plan: str = "",
    launched: float | None = None,
) -> dict[str, Any]:
    """Return an attempt's line of attempts.jsonl; call it before the metrics of steps to be repeated are dropped.

    `started` is the time when its ranks were ready, `begins` that when its first step begins, after `step`; in seconds
    since 1970. Ranks of a later `generation` go on in the processes of the one before. Steps that were kept but not
    logged took `unlogged_s`. `plan` is the hash of its plan. `launched` is the time at which a person started its
    launcher.
    """
    rows = read_metrics(metrics)
    repeated = [row for row in rows if row["step"] > step]
    last = max((row["step"] for row in rows), default=step)
    lost_steps = max(0, last - step)
    return {
        "started": started,
        "begins": begins,
        "step": step,
        "lost_steps": lost_steps,
        "lost_s": lost_steps * _mean_step_s(repeated),
        "generation": generation,
        "plan": plan,
        "launched": launched,
        "last_logged": metrics.stat().st_mtime if metrics.exists() else None,
        "unlogged_s": max(0, step - last) * _mean_step_s(rows),
    }


def append_attempt(run_dir: Path, row: Row) -> None:
    """Append an attempt's line; raises OSError where that can't be done."""
    append_row(run_dir / ATTEMPTS_FILE, row)


def split_wall_time(run_dir: Path, ended: float | None = None) -> WallTime | None:
    """Return the parts of a run's wall time; None for runs without a step, and of versions that recorded no attempts.

    `ended` is the end of the last attempt, in seconds since 1970; None: the last step that was logged.
    """
    attempts, metrics = read_metrics(run_dir / ATTEMPTS_FILE), run_dir / "metrics.jsonl"
    rows = read_metrics(metrics)
    if not attempts or not rows:
        return None
    first = attempts[0]
    last_logged = metrics.stat().st_mtime
    end = last_logged if ended is None else ended
    productive_s = (rows[-1]["step"] - first["step"]) * _mean_step_s(rows)
    restarts = read_metrics(run_dir / RESTARTS_FILE)
    recoveries = len(recoveries_of(read_metrics(run_dir / RECOVERIES_FILE)))
    recovering_s = stopped_s = 0.0
    for before, attempt in pairwise(attempts):
        since = max(attempt["last_logged"] or 0.0, before["begins"])  # an attempt may end before it logs a step
        pause = _split_pause(since, attempt, restarts)
        recovering_s, stopped_s = recovering_s + pause[0], stopped_s + pause[1]
    if (draft := attempt_files(run_dir).config).exists():  # of an attempt that hasn't begun a step
        pending = {"begins": min(draft.stat().st_mtime, end), "launched": math.inf}
        pause = _split_pause(max(last_logged, attempts[-1]["begins"]), pending, restarts)
        recovering_s, stopped_s = recovering_s + pause[0], stopped_s + pause[1]
    lost_s = sum(attempt["lost_s"] for attempt in attempts)
    known_s = productive_s + lost_s + recovering_s + stopped_s
    total_s = max(end - first["started"], known_s)
    other_s = total_s - known_s
    return WallTime(total_s, productive_s, lost_s, recovering_s, stopped_s, other_s, len(restarts), recoveries)


def wall_time_note(run_dir: Path, ended: float | None = None) -> str | None:
    """Return a sentence about the wall time of a run with several attempts; None for others."""
    if len(read_metrics(run_dir / ATTEMPTS_FILE)) < 2 or (time := split_wall_time(run_dir, ended)) is None:
        return None
    parts = (
        (time.productive_s, "productive"),
        (time.lost_s, "lost (steps done again)"),
        (time.recovering_s, "recovering"),
        (time.stopped_s, "stopped until started again"),
        (time.other_s, "start, validation and checkpoints"),
    )
    if not time.total_s:
        return None
    told = ", ".join(f"{format_fraction(part_s / time.total_s)} {name}" for part_s, name in parts if part_s)
    return f"wall time {format_seconds(time.total_s)}: {told}"


def _split_pause(since: float, attempt: Row, restarts: Sequence[Row]) -> tuple[float, float]:
    """Return the seconds of recovery and of standing still from `since`, when the last step was logged, to the
    attempt's first step.

    A launcher that a person had started before `since` has recovered by itself. Otherwise the recovery has come to
    nothing, and the last that is known of it is a restart by the former launcher.
    """
    begins, launched = attempt["begins"], attempt.get("launched")
    times = [row["time"] for row in restarts if (row.get("launched") or 0.0) <= since <= row["time"] <= begins]
    if launched is None:  # of an earlier version
        launched = since if times or attempt.get("generation") else math.inf
    ended = begins if launched <= since else max(times, default=since)
    trained_until = since + attempt.get("unlogged_s", 0.0)
    pause_s, recovering_s = max(0.0, begins - trained_until), max(0.0, ended - trained_until)
    return recovering_s, pause_s - recovering_s


def _mean_step_s(rows: Sequence[Row]) -> float:
    return sum(row["time/step"] for row in rows) / len(rows) if rows else 0.0
