"""Parts of a run's wall time, from what its attempts have written."""

import json
import os
from collections.abc import Iterable
from pathlib import Path

import pytest

from muster.report.run_files import append_row, read_metrics
from muster.report.wall_time import append_attempt, attempt_row, split_wall_time, wall_time_note


def write_rows(path: Path, steps: Iterable[int], written: float) -> None:
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


def test_steps_that_were_kept_without_being_logged_are_no_pause(tmp_path: Path) -> None:
    """Of 102 steps of 2 s every fiftieth is logged; a person stops the run after step 99 and goes on at once."""
    metrics = tmp_path / "metrics.jsonl"
    append_attempt(tmp_path, attempt_row(started=0, begins=0, step=0, metrics=metrics))
    write_rows(metrics, [50], written=100)
    append_attempt(tmp_path, attempt_row(started=199, begins=200, step=99, metrics=metrics))
    write_rows(metrics, [50, 100], written=202)
    time = split_wall_time(tmp_path, 202)
    assert time is not None
    assert (time.productive_s, time.stopped_s, time.other_s, time.total_s) == (200, 2, 0, 202)


def test_a_clock_that_is_set_back_gives_no_negative_part(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    append_attempt(tmp_path, attempt_row(started=1000, begins=1001, step=0, metrics=metrics))
    write_rows(metrics, range(1, 6), written=1011)
    append_attempt(tmp_path, attempt_row(started=951, begins=952, step=5, metrics=metrics))
    write_rows(metrics, range(1, 11), written=962)
    time = split_wall_time(tmp_path, 962)
    assert time is not None
    assert min(time.to_json().values()) == 0
    assert time.total_s == time.productive_s == 20
    assert wall_time_note(tmp_path, 962) == "wall time 20.0 s: 100.0 % productive"


def test_a_restart_before_the_first_step_is_logged_is_a_recovery(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    append_attempt(tmp_path, attempt_row(started=0, begins=1, step=0, metrics=metrics))
    (tmp_path / "restarts.jsonl").write_text('{"time": 5, "step": 0}\n')
    append_attempt(tmp_path, attempt_row(started=9, begins=11, step=0, metrics=metrics))
    (tmp_path / "restarts.jsonl").open("a").write('{"time": 15, "step": 0}\n')
    append_attempt(tmp_path, attempt_row(started=19, begins=21, step=0, metrics=metrics))
    write_rows(metrics, range(1, 6), written=31)
    time = split_wall_time(tmp_path, 31)
    assert time is not None
    assert (time.recovering_s, time.stopped_s, time.total_s) == (20, 0, 31)


def test_a_pause_after_the_launcher_has_given_up_is_no_recovery(tmp_path: Path) -> None:
    """Three restarts lead to no step; people start the run again after 2 h, in vain, and after 7 h."""
    metrics, restarts = tmp_path / "metrics.jsonl", tmp_path / "restarts.jsonl"
    append_attempt(tmp_path, attempt_row(started=5, begins=10, step=0, metrics=metrics, launched=0))
    write_rows(metrics, range(1, 11), written=30)
    for time, launched in ((31, 0), (40, 0), (50, 0), (7300, 7200)):
        append_row(restarts, {"time": time, "step": 10, "launched": launched})
    draft = tmp_path / "config.next.yaml"
    draft.write_text("")
    os.utime(draft, (25200, 25200))
    waiting = split_wall_time(tmp_path, 25205)
    assert waiting is not None
    assert (waiting.recovering_s, waiting.stopped_s, waiting.other_s) == (20, 25150, 10)
    draft.unlink()
    append_attempt(tmp_path, attempt_row(started=25210, begins=25230, step=10, metrics=metrics, launched=25200))
    append_row(restarts, {"time": 25240, "step": 10, "launched": 25200})
    append_attempt(tmp_path, attempt_row(started=25245, begins=25250, step=10, metrics=metrics, launched=25200))
    write_rows(metrics, range(1, 21), written=25270)
    time = split_wall_time(tmp_path, 25270)
    assert time is not None
    assert (time.recovering_s, time.stopped_s, time.productive_s, time.other_s) == (20 + 20, 25180, 40, 5)


def test_a_rank_that_is_lost_while_a_run_starts_again_makes_its_pause_no_recovery(tmp_path: Path) -> None:
    """The first line of the second attempt is that of the generation after the loss."""
    metrics = tmp_path / "metrics.jsonl"
    append_attempt(tmp_path, attempt_row(started=5, begins=10, step=0, metrics=metrics, launched=0))
    write_rows(metrics, range(1, 11), written=30)
    own = {"step": 10, "metrics": metrics, "launched": 90030.0}
    append_attempt(tmp_path, attempt_row(started=90035, begins=90040, generation=1, **own))
    append_attempt(tmp_path, attempt_row(started=90045, begins=90047, generation=2, **own))
    write_rows(metrics, range(1, 21), written=90067)
    time = split_wall_time(tmp_path, 90067)
    assert time is not None
    assert (time.recovering_s, time.stopped_s, time.productive_s) == (7, 90010, 40)


def test_an_attempt_that_cannot_resume_follows_a_pause(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    append_attempt(tmp_path, attempt_row(started=0, begins=1, step=0, metrics=metrics))
    write_rows(metrics, range(1, 11), written=21)
    append_attempt(tmp_path, attempt_row(started=31, begins=31, step=10, metrics=metrics))
    write_rows(metrics, range(1, 21), written=51)
    draft = tmp_path / "config.next.yaml"
    draft.write_text("")
    os.utime(draft, (1051, 1051))
    time = split_wall_time(tmp_path, 1061)
    assert time is not None
    assert (time.productive_s, time.stopped_s, time.other_s) == (40, 1010, 11)


def test_a_line_that_a_kill_cut_short_does_not_take_the_next_along(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    append_row(path, {"a": 1})
    path.write_text(path.read_text() + '{"a": ')
    append_row(path, {"a": 2})
    append_row(path, {"a": 3})
    assert read_metrics(path) == [{"a": 1}, {"a": 2}, {"a": 3}]
