"""Metrics beside metrics.jsonl: TensorBoard's files are read back with its own reader; what fails is said once."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from muster.cli.main import main
from muster.config.load_config import load_run_config
from muster.config.run_config import RunConfig
from muster.train import tracking
from muster.train.tracking import TENSORBOARD, WANDB, Trackers

QUICK = ("--train.steps", "2", "--train.sample_tokens", "0", "--eval.batches", "1", "--parallel", "dp1-mb8")


def config(**tracking: object) -> RunConfig:
    return load_run_config(
        "tiny", None, [(f"tracking.{key}", str(value).lower()) for key, value in tracking.items()]
    ).config


def scalars(folder: Path, name: str) -> dict[int, float]:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    return {event.step: event.value for event in accumulator.Scalars(name)}


def test_event_files_hold_the_metrics_and_what_is_done_again_replaces_what_was(tmp_path):
    pytest.importorskip("tensorboard")
    first = Trackers(config(), tmp_path, 0, is_main=True)
    for step in (1, 2, 3):
        first.log({"step": step, "train/loss": 4.0 - step, "perf/mfu": None, "skipped": "loss is NaN", "own": 3})
    first.close()
    again = Trackers(config(), tmp_path, 1, is_main=True)
    again.log({"step": 2, "train/loss": 8.0})
    again.close()
    assert scalars(tmp_path / TENSORBOARD, "train/loss") == {1: 3.0, 2: 8.0}
    assert scalars(tmp_path / TENSORBOARD, "own") == {1: 3.0}


@pytest.mark.parametrize("wanted", [{"tensorboard": False}, {}])
def test_nothing_is_written_where_it_is_not_wanted(tmp_path, wanted):
    Trackers(config(**wanted), tmp_path, 0, is_main=bool(wanted)).close()
    assert list(tmp_path.iterdir()) == []


class Failing:
    """Fails at the second of its methods."""

    def __init__(self, config: RunConfig, run_dir: Path, done: int) -> None:
        self.calls = 0

    def log(self, step: int, values: Any) -> None:
        self.calls += 1
        if self.calls > 1:
            raise OSError("no space left")

    def close(self) -> None:
        raise AssertionError("it was given up")


def test_a_tracker_that_fails_is_said_once_and_left_alone(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(tracking._KINDS, TENSORBOARD, Failing)
    trackers = Trackers(config(tensorboard=True), tmp_path, 0, is_main=True)
    for step in range(1, 5):
        trackers.log({"step": step, "train/loss": 1.0})
    trackers.close()
    said = capsys.readouterr().out
    assert said == "tensorboard gets no more metrics (OSError: no space left); training continues without it\n"


def fake_wandb(monkeypatch: pytest.MonkeyPatch) -> tuple[list[dict[str, Any]], list[Any]]:
    """A module in the place of wandb: what its runs began with, and what they were given."""
    begun, given = [], []

    class Run:
        def log(self, values: dict[str, float], step: int) -> None:
            given.append((step, values))

        def finish(self) -> None:
            given.append("finish")

    module = SimpleNamespace(init=lambda **told: (begun.append(told), Run())[1], Settings=lambda **told: told)
    monkeypatch.setitem(sys.modules, WANDB, module)  # type: ignore[arg-type]
    return begun, given


def test_weights_and_biases_is_one_run_that_stays_here(tmp_path, monkeypatch):
    begun, given = fake_wandb(monkeypatch)
    for done in (0, 1):
        trackers = Trackers(config(tensorboard=False, wandb=True), tmp_path, done, is_main=True)
        trackers.log({"step": done + 1, "train/loss": 2.0, "perf/mfu": None})
        trackers.close()
    assert given == [(1, {"train/loss": 2.0}), "finish", (2, {"train/loss": 2.0}), "finish"]
    first, second = begun
    assert (first["mode"], first["project"], first["resume"]) == ("offline", "muster", "allow")
    assert first["id"] == second["id"] == (tmp_path / WANDB / "id").read_text()
    assert first["config"]["train"]["steps"] == config().train.steps
    trackers = Trackers(config(tensorboard=False, wandb=True, wandb_mode="online"), tmp_path, 2, is_main=True)
    assert begun[-1]["mode"] == "online"


def test_a_tracker_that_is_missing_is_said_before_anything_begins(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(tracking, "find_spec", lambda name: None)
    assert main(["train", "--preset", "tiny", "--run", str(tmp_path / "run"), "--tracking.wandb", "true"]) == 2
    said = capsys.readouterr().err
    assert said == "muster: tracking.wandb needs the package wandb: pip install 'muster-llm[wandb]'\n"


@pytest.mark.soak
def test_a_run_goes_to_tensorboard_and_to_the_real_weights_and_biases(tmp_path, capfd):
    pytest.importorskip("wandb")
    run = tmp_path / "run"
    for steps in ("2", "3"):
        more = ("--train.steps", steps, "--tracking.wandb", "true", "--eval.every", "1")
        assert main(["train", "--preset", "tiny", "--run", str(run), *QUICK, *more]) == 0
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found = scalars(run / TENSORBOARD, "train/loss")
    assert found == pytest.approx({row["step"]: row["train/loss"] for row in rows})
    assert set(scalars(run / TENSORBOARD, "eval/loss")) == {1, 2, 3}
    assert len(list((run / WANDB).glob("offline-run-*"))) == 2
    assert "takes no more metrics" not in capfd.readouterr().out
