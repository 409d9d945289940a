"""Runs of one's own, which sharpen predictions on their machine."""

import csv
import json
from pathlib import Path

import pytest

from muster.cli.main import main
from muster.config.local_machine import cluster_text, profiled_machine, with_num_ranks
from muster.config.named_model import load_model
from muster.cost.uncertainty import MIN_CONFIGURATIONS, PROFILED_ERRORS, step_time_interval
from muster.simulate.predict import predict
from muster.spec.cluster import ClusterSpec
from muster.spec.device import DeviceSpec
from muster.spec.plan_name import parse_plan_name
from muster.validate.case import row_inputs
from muster.validate.errors import UnpredictableRowError
from muster.validate.local_runs import MAX_RATIO, require_own_run
from muster.validate.table import parse_table, read_table
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


def test_steps_under_another_plan_are_no_measurement_of_the_last_one(capsys: pytest.CaptureFixture[str]) -> None:
    rows = metrics(16)
    for row in rows:
        row["time/step"] = 7.0 if 6 < row["step"] <= 11 else 9.0 if row["step"] in (1, 2, 12, 13) else 2.0
    run = write_run(Path("run"), rows, PLAN)
    attempts = [{"step": 0, "plan": "a"}, {"step": 6, "plan": "b"}, {"step": 11, "plan": "a"}]
    (run / "attempts.jsonl").write_text("".join(json.dumps(one) + "\n" for one in attempts))
    assert main(["report", str(run), "--as-measurement"]) == 0
    (row,) = csv.DictReader(capsys.readouterr().out.splitlines())
    assert (row["metric"], row["value"]) == ("iteration_time_s", "2")
    assert "median of 7 steps" in ",".join(row.values())
    back = [{"step": 0, "plan": "a"}, {"step": 11, "plan": "b"}, {"step": 4, "plan": "b"}, {"step": 11, "plan": "a"}]
    (run / "attempts.jsonl").write_text("".join(json.dumps(one) + "\n" for one in back))
    assert main(["report", str(run), "--as-measurement"]) == 0
    assert "median of 5 steps" in capsys.readouterr().out, "3 and 4, 14 to 16: others were made anew under b"
    (run / "attempts.jsonl").write_text(json.dumps({"step": 0}) + "\n" + json.dumps({"step": 16}) + "\n")
    assert main(["report", str(run), "--as-measurement"]) == 2
    assert "made no step under its last plan" in capsys.readouterr().err
    (run / "attempts.jsonl").write_text("".join(json.dumps({"step": one["step"]}) + "\n" for one in attempts))
    assert main(["report", str(run), "--as-measurement"]) == 0
    assert "median of 3 steps" in capsys.readouterr().out, "of the last attempt, where plans were not written down"


def test_runs_that_took_longer_than_predicted_move_the_interval(capsys: pytest.CaptureFixture[str]) -> None:
    """All of 20 runs took twice the predicted time: so does the interval say."""
    table(capsys, 1.0)
    table(capsys, *[2 * predicted_s()] * MIN_CONFIGURATIONS)
    assert main(["profile", "--runs", "runs.csv"]) == 0
    assert "predictions of 20 runs on this machine err by 50 % on average, 50 % too fast" in capsys.readouterr().out
    after = interval(profiled_machine())
    assert (after.low, after.high) == pytest.approx((2.0, 2.0), rel=0.01)
    assert after.source == "20 runs on this machine err by 50 % on average"


def predicted_s() -> float:
    """Predicted seconds of a step of the runs."""
    (row,) = read_table(Path("runs.csv"))
    inputs = row_inputs(row)
    own = inputs.model, inputs.cases[0].plan, inputs.workload, with_num_ranks(profiled_machine(), 2)
    return predict(*own).step_time_s


def test_few_runs_weigh_as_much_as_the_shipped_ones(capsys: pytest.CaptureFixture[str]) -> None:
    table(capsys, 1.0)
    table(capsys, 0.9 * MAX_RATIO * predicted_s())
    assert main(["profile", "--runs", "runs.csv"]) == 0
    found = interval(profiled_machine())
    assert f"1 run on this machine and {len(PROFILED_ERRORS)} plans on profiled machines" in found.source
    assert found.high > 0.8 * MAX_RATIO


@pytest.mark.parametrize(
    ("column", "cell", "sentence"),
    [
        ("gpu", "H100", "gpu 'H100' isn't here, on which the machine's profile was measured"),
        ("software", "Megatron-LM", "software 'Megatron-LM' isn't Muster, whose predictions are held to runs"),
        ("value", "1e4", "expected a run whose time is within a factor of 10"),
        ("value", "1e-9", "expected a run whose time is within a factor of 10"),
    ],
)
def test_runs_of_other_machines_and_programs_and_impossible_times_are_left_out(
    column: str, cell: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    table(capsys, 1.0)
    table(capsys, predicted_s())
    with Path("runs.csv").open(newline="") as file:
        (row,) = csv.DictReader(file)
    with Path("runs.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(row), lineterminator="\n")
        writer.writeheader()
        writer.writerows([row, row | {column: cell}])
    assert main(["profile", "--runs", "runs.csv"]) == 0
    told = capsys.readouterr().out
    assert "predictions of 1 run on this machine err by 0 % on average" in told
    assert "left out     runs.csv:3: " in told
    assert sentence in told


def test_a_gpu_is_known_by_the_drivers_name_and_by_its_usual_one() -> None:
    """The profile has the driver's name, a row that name or the one that people write."""
    own = DeviceSpec(name="NVIDIA H100 80GB HBM3", kind="gpu")
    lines = ["model,gpu,n_gpus,step_time_s"]
    lines += [f"tiny,{gpu},1,1" for gpu in ("NVIDIA H100 80GB HBM3", "H100", "NVIDIA H200", "cpu")]
    told = []
    for row in parse_table("\n".join(lines), "runs.csv"):
        try:
            require_own_run(row, own)
            told.append("")
        except UnpredictableRowError as error:
            told.append(str(error))
    assert told[:2] == ["", ""]
    assert "gpu 'NVIDIA H200' isn't NVIDIA H100 80GB HBM3" in told[2]
    assert "gpu 'cpu' isn't" in told[3]


def test_a_run_that_cannot_be_predicted_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    table(capsys, 1.0)
    table(capsys, predicted_s(), 2 * predicted_s())
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
