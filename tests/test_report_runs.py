"""Comparison of several runs by `muster report`: figures and differences in one page."""

import fcntl
import json
from html import unescape
from pathlib import Path
from typing import Any

import pytest
import yaml

from muster.cli.main import main
from muster.config.load_config import load_run_config
from muster.spec.frameworks import MUSTER
from muster.validate.case import row_inputs
from muster.validate.table import parse_table
from tests.report_example import MIB, metrics, write_run


def answer(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    assert main(["report", *map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.fixture
def two(tmp_path: Path) -> list[Path]:
    short = metrics(50)
    short[9]["eval/loss"], short[49]["train/loss"] = 2.5, None
    return [
        write_run(tmp_path / "x" / "run", metrics(200)),
        write_run(tmp_path / "y" / "run", short, "pp2-mb2-fp32", "1e-3", ended=False),
    ]


def test_figures_and_differences(two: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, *two)
    whole, short = found["runs"]
    assert [whole["name"], short["name"]] == ["x/run", "y/run"]
    assert [whole["plan"], short["plan"]] == ["dp2-mb1-fp32", "pp2-mb2-fp32"]
    assert whole["loss"] == metrics(200)[-1]["train/loss"]
    assert (whole["validation_loss"], whole["memory_bytes"]) == (1.7, 6 * MIB)
    assert (short["loss"], short["validation_loss"], short["memory_bytes"]) == (None, 2.5, None)
    assert (whole["tokens"], short["tokens"], found["common_tokens"]) == (8192 * 200, 8192 * 50, 8192 * 50)
    assert (whole["steps"], whole["step_s"], whole["ranks"]) == (200, 0.2, 2)
    assert 40_000 < whole["tokens_per_s"] < 42_000
    # exp falls with the part of its own steps that a run has made: the short one is further.
    assert whole["loss_at_common_tokens"] > short["loss_at_common_tokens"] + 0.1
    differ = {one["key"]: one["values"] for one in found["differences"]}
    assert differ == {
        "optim.lr": [0.003, 0.001],
        "parallel.dp_shard": [2, 1],
        "parallel.pp": [1, 2],
        "parallel.micro_batch_size": [1, 2],
    }


def test_the_terminal_shows_both_and_the_page_is_written(
    two: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["report", *map(str, two)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines if line.startswith("optim.lr")] == [["optim.lr", "0.003", "0.001"]]
    assert lines[-1] == "report: comparison.html"
    assert "y/run" in (tmp_path / "comparison.html").read_text()


def test_a_run_is_a_row_that_validate_predicts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first two steps, which are slower, are left out of the median."""
    rows = metrics(8)
    for row in rows:
        row["time/step"] = 5.0 if row["step"] <= 2 else 0.2
    run = write_run(tmp_path / "run", rows, "pp2-mb2-szbh1-fp32")
    assert main(["report", str(run), "--as-measurement"]) == 0
    table = capsys.readouterr().out
    (tmp_path / "mine.csv").write_text(table)
    assert main(["validate", "--csv", str(tmp_path / "mine.csv"), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["rows"]
    assert (found["plan"], found["measured_s"], found["n_gpus"]) == ("pp2-mb2-szbh1-fp32", 0.2, 2)
    (inputs,) = (row_inputs(row) for row in parse_table(table, "mine.csv"))
    config = load_run_config("tiny", None, []).config
    assert inputs.model.num_parameters == config.model.num_parameters
    assert inputs.workload == config.workload
    assert inputs.cases[0].software == MUSTER


def test_a_run_without_an_end_or_of_a_plan_without_a_name_is_no_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(write_run(tmp_path / "a", metrics(3), ended=False)), "--as-measurement"]) == 2
    assert "expected a run that this version ended" in capsys.readouterr().err
    run = write_run(tmp_path / "b", metrics(3))
    plan = yaml.safe_load((run / "plan.yaml").read_text())
    layer = {"start": 0, "count": 1, "strategy": {"recompute": "full"}}
    (run / "plan.yaml").write_text(yaml.safe_dump(plan | {"overrides": [layer]}))
    assert main(["report", str(run), "--as-measurement"]) == 2
    assert "no row of a table can say all of the run's plan" in capsys.readouterr().err
    assert main(["report", str(run), str(run), "--as-measurement"]) == 2


def test_equal_runs_differ_in_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [write_run(tmp_path / name, metrics(3)) for name in "ab"]
    assert answer(capsys, *runs)["differences"] == []


def test_former_names_of_keys_are_no_difference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [write_run(tmp_path / name, metrics(3)) for name in "ab"]
    file = runs[1] / "config.yaml"
    text = file.read_text()
    assert "hang_timeout_s:" in text
    assert "version: 2" in text
    file.write_text(text.replace("hang_timeout_s:", "hang_s:").replace("version: 2", "version: 1", 1))
    assert answer(capsys, *runs)["differences"] == []


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        ("nothing there", "there is no run directory"),
        ("empty", "is no run directory: it has no config.yaml"),
        ("no steps", "has no steps"),
        ("twice", "is given twice"),
        ("bad result", "result.json can't be read"),
        ("many", "expected at most 12"),
    ],
)
def test_incomparable_runs_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], spoil: str, words: str
) -> None:
    good, other = write_run(tmp_path / "good", metrics(3)), tmp_path / "other"
    if spoil == "empty":
        other.mkdir()
    if spoil == "no steps":
        write_run(other, [])
    if spoil == "bad result":
        (write_run(other, metrics(3)) / "result.json").write_text("{")
    runs = [good, good if spoil == "twice" else other, *([other] * 11 if spoil == "many" else [])]
    assert main(["report", *map(str, runs)]) == 2
    assert words in (said := capsys.readouterr().err)
    assert said.count("\n") == 1


# --- a run that has not finished ---


@pytest.mark.parametrize(
    ("ended", "status"),
    [
        (None, "ended without a word at {}: it was killed, or its machine was lost"),
        ({"code": 75, "reason": "stopped by SIGTERM", "time": 1e9}, "stopped at {}: stopped by SIGTERM"),
        ({"code": 1, "reason": "rank 1: full", "time": 1e9}, "failed with exit code 1 at {}: rank 1: full"),
        ({"code": 0, "reason": "finished", "time": 1e9}, "finished at {}"),
    ],
)
def test_a_run_without_a_report_shows_what_there_is(
    ended: dict[str, Any] | None, status: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = metrics(50)
    rows[9]["eval/loss"] = 2.5
    run = write_run(tmp_path / "run", rows, ended=False)
    if ended is not None:
        (run / "exit.json").write_text(json.dumps(ended))
    assert main(["report", str(run)]) == 0
    page = (run / "progress.html").read_text()
    (said, path) = capsys.readouterr().out.splitlines()
    assert said == status.format(f"step 50 of {load_run_config('tiny', None, []).config.train.num_steps}")
    assert path == f"report: {run / 'progress.html'}"
    assert said in unescape(page)
    assert "validation</span>" in page
    assert "One step, predicted and measured" not in page
    assert 'http-equiv="refresh"' not in page
    assert not (run / "report.html").exists()


def test_a_run_that_trains_is_followed_to_its_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_run(tmp_path / "run", metrics(3), ended=False)
    holder = (run / ".lock").open("w")
    fcntl.flock(holder, fcntl.LOCK_EX)

    def train_on(_: float) -> None:
        assert 'http-equiv="refresh"' in (run / "progress.html").read_text()
        if len(pages) == 1:
            holder.close()
            (run / "report.html").write_text("done")
        pages.append((run / "progress.html").read_text())
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(metrics(9)[-1]) + "\n")

    pages: list[str] = []
    monkeypatch.setattr("muster.cli.report.sleep", train_on)
    assert main(["report", str(run), "--follow"]) == 0
    first, second, path = capsys.readouterr().out.splitlines()
    assert first.startswith("running: step 3")
    assert second.startswith("running: step 9")
    assert path == f"report: {run / 'report.html'}"


def test_following_is_for_one_run(two: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", *map(str, two), "--follow"]) == 2
    assert "--follow is for the page of one run" in capsys.readouterr().err
