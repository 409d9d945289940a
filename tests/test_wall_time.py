"""Parts of a run's wall time, from what its attempts have written."""

import json
import os
from pathlib import Path

import pytest

from muster.report.wall_time import append_attempt, attempt_row, split_wall_time, wall_time_note


def write_rows(path: Path, steps: range, written: float) -> None:
    """Metrics of steps of 2 s each, the last of them at a time."""
    path.write_text("".join(json.dumps({"step": step, "time/step": 2.0}) + "\n" for step in steps))
    os.utime(path, (written, written))


def test_the_parts_add_up_whatever_ended_the_attempts(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    assert split_wall_time(tmp_path) is None
    append_attempt(tmp_path, attempt_row(started=100, begins=110, step=0, metrics=metrics))
    write_rows(metrics, range(1, 9), written=130)
    assert wall_time_note(tmp_path, 130) is None, "nothing was lost"
    # Two of eight steps weren't saved; the launcher notices the loss at 131, and training goes on at 140.
    append_attempt(tmp_path, attempt_row(started=135, begins=140, step=6, metrics=metrics))
    (tmp_path / "restarts.jsonl").write_text('{"time": 131, "step": 8}\n')
    write_rows(metrics, range(1, 11), written=150)
    # A person stops the run after step 10, and starts it again much later.
    append_attempt(tmp_path, attempt_row(started=1140, begins=1150, step=10, metrics=metrics))
    write_rows(metrics, range(1, 21), written=1171)
    time = split_wall_time(tmp_path, ended=1180)
    assert time is not None
    assert (time.total_s, time.productive_s, time.lost_s) == (1080, 40, 4)
    assert (time.recovering_s, time.stopped_s, time.restarts) == (10, 1000, 1)
    assert time.other_s == pytest.approx(1080 - 40 - 4 - 10 - 1000)
    parts = "3.7 % productive, 0.4 % lost (steps done again), 0.9 % recovering, 92.6 % stopped"
    assert (wall_time_note(tmp_path, 1180) or "").startswith(f"wall time 18 min 00 s: {parts}")
    still_running = split_wall_time(tmp_path)
    assert still_running is not None
    assert still_running.total_s == 1071, "up to the last step that is known"


def test_steps_that_were_not_logged_count_too(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    append_attempt(tmp_path, attempt_row(started=0, begins=1, step=0, metrics=metrics))
    write_rows(metrics, range(10, 51, 10), written=120)
    row = attempt_row(started=130, begins=140, step=30, metrics=metrics)
    assert (row["lost_steps"], row["lost_s"]) == (20, 40)
    time = split_wall_time(tmp_path, 120)
    assert time is not None
    assert time.productive_s == 100
