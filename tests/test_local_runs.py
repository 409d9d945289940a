"""Runs of one's own, which sharpen predictions on their machine."""

from pathlib import Path

import pytest

from muster.cli.main import main
from muster.config.local_machine import cluster_text, profiled_machine, with_num_ranks
from muster.config.named_model import load_model
from muster.cost.uncertainty import MIN_CONFIGURATIONS, PROFILED_ERRORS, step_time_interval
from muster.simulate.predict import predict
from muster.spec.cluster import ClusterSpec
from muster.spec.plan_name import parse_plan_name
from muster.validate.case import row_inputs
from muster.validate.table import read_table
from tests.report_example import metrics, write_run
from tests.test_profiled_times import here, machine

PLAN = "pp2-mb2-szbh1-fp32"


@pytest.fixture(autouse=True)
def profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("machine.yaml").write_text(cluster_text(here(machine())))


def interval(cluster: ClusterSpec):
    found = step_time_interval(load_model("tiny"), parse_plan_name(PLAN), cluster)
    assert found is not None
    return found


def table(capsys: pytest.CaptureFixture[str], *seconds: float) -> None:
    """Write runs.csv, with a run of each of these median times."""
    lines: list[str] = []
    for number, time_s in enumerate(seconds):
        rows = metrics(8)
        for row in rows:
            row["time/step"] = time_s
        assert main(["report", str(write_run(Path(f"run{number}"), rows, PLAN)), "--as-measurement"]) == 0
        lines += capsys.readouterr().out.splitlines()[bool(lines) :]
    Path("runs.csv").write_text("\n".join(lines) + "\n")


def test_runs_that_took_longer_than_predicted_move_the_interval(capsys: pytest.CaptureFixture[str]) -> None:
    """All of 20 runs took twice the predicted time: so does the interval say."""
    table(capsys, 1.0)
    (row,) = read_table(Path("runs.csv"))
    inputs = row_inputs(row)
    cluster = with_num_ranks(profiled_machine(), 2)
    predicted_s = predict(inputs.model, inputs.cases[0].plan, inputs.workload, cluster).step_time_s
    table(capsys, *[2 * predicted_s] * MIN_CONFIGURATIONS)
    assert main(["profile", "--runs", "runs.csv"]) == 0
    assert "predictions of 20 runs on this machine err by 50 % on average, 50 % too fast" in capsys.readouterr().out
    after = interval(profiled_machine())
    assert (after.low, after.high) == pytest.approx((2.0, 2.0), rel=0.01)
    assert after.source == "20 runs on this machine err by 50 % on average"


def test_few_runs_weigh_as_much_as_the_shipped_ones(capsys: pytest.CaptureFixture[str]) -> None:
    table(capsys, 1e3)
    assert main(["profile", "--runs", "runs.csv"]) == 0
    found = interval(profiled_machine())
    assert f"1 run on this machine and {len(PROFILED_ERRORS)} plans on profiled machines" in found.source
    assert found.high > 10


def test_a_run_that_cannot_be_predicted_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    table(capsys, 1.0, 2.0)
    lines = Path("runs.csv").read_text().splitlines()
    Path("runs.csv").write_text("\n".join([*lines, lines[1].replace(PLAN, "dp7-fp32")]) + "\n")
    assert main(["profile", "--runs", "runs.csv"]) == 0
    told = capsys.readouterr().out
    assert "predictions of 2 runs" in told
    assert "left out     runs.csv:4: plan 'dp7-fp32' is for 7 devices" in told
    Path("runs.csv").write_text("\n".join([lines[0], lines[1].replace(PLAN, "dp7-fp32")]) + "\n")
    assert main(["profile", "--runs", "runs.csv"]) == 2
    assert "runs.csv: none of the 1 run can be predicted: runs.csv:2: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--quick"], "--runs measures nothing: leave out --quick and --ranks"),
        (["-o", "other.yaml"], "--runs needs a profile of this machine: run 'muster profile' first, it writes other"),
        (["--nodes", "2", "--node-rank", "0", "--rendezvous", "localhost"], "--runs is for the runs of one machine"),
    ],
)
def test_runs_are_refused_without_a_profile(arguments, sentence, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "--runs", "runs.csv", *arguments]) == 2
    assert sentence in capsys.readouterr().err
