"""`muster doctor`: each check finds what is wrong and says what to do, within its limit."""

import json
import os
import resource
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace

import pytest

from muster.api.verbs import predict
from muster.cli.main import main
from muster.config.local_machine import detect_machine
from muster.probe import doctor
from muster.probe.disk_rates import measure_disk
from muster.probe.doctor import CHECKS, CheckResult, DoctorRequest, run_checks
from muster.probe.doctor_plan import PlanNeed, check_plan
from muster.spec.formatting import format_bytes


def only(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    monkeypatch.setattr(doctor, "CHECKS", {name: CHECKS[name] for name in names})


def findings(request: DoctorRequest) -> dict[str, CheckResult]:
    return {finding.check: finding for finding in run_checks(request)}


def test_a_sound_machine_has_no_problem_and_json_says_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    only(monkeypatch, "versions", "memory", "disk", "copies", "clocks", "ports", "files")
    (shared_memory := tmp_path / "shared-memory").mkdir()  # that of the machine holds copies of runs of other tests
    monkeypatch.setattr(doctor, "IN_MEMORY_CHECKPOINT_DIR", shared_memory)
    assert main(["doctor", "--run", str(tmp_path / "runs"), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["version"], said["ok"]) == (1, True)
    assert [finding["check"] for finding in said["findings"]] == list(doctor.CHECKS)
    assert set(said["findings"][0]) == {"check", "level", "sentence"}
    assert list(tmp_path.iterdir()) == [shared_memory], "it leaves nothing"
    assert main(["doctor", "--run", str(tmp_path / "runs")]) == 0
    assert capsys.readouterr().out.endswith("all is well\n")


@pytest.mark.soak  # the page docs/doctor.md starts some in the fast tests
def test_ranks_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, "ranks")
    found = findings(DoctorRequest(tmp_path))
    assert found["ranks"].sentence.startswith("2 ranks connected and all-reduced"), found
    assert found["bandwidth"].level == found["devices"].level == "ok"
    assert "links" in found


def test_without_torch_the_other_checks_are_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(doctor, "version", missing)
    found = list(run_checks(DoctorRequest(tmp_path)))
    problems = [finding.sentence for finding in found if finding.level == "problem"]
    assert problems == ["PyTorch is not installed: pip install 'muster-llm[train]'"]
    assert {finding.check for finding in found} == set(CHECKS)


def test_a_check_that_hangs_or_fails_is_a_problem_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def hang(request: DoctorRequest) -> Iterator[CheckResult]:
        time.sleep(1000)
        yield CheckResult("disk", "ok", "")

    def fail(request: DoctorRequest) -> Iterator[CheckResult]:
        raise OSError("no such thing")

    monkeypatch.setattr(doctor, "CHECKS", {"disk": hang, "memory": fail})
    assert main(["doctor", "--time-limit", "1"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("PROBLEM disk       no answer within 1 s: the file system hangs; choose another dir")
    assert lines[1] == "PROBLEM memory     the check failed (OSError: no such thing)"
    assert lines[2] == "2 problems"


def test_a_slow_disk_is_no_wrong_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, "clocks")
    utime = os.utime
    monkeypatch.setattr(doctor.os, "utime", lambda path: utime(path, (107, 107)))
    for after, level in ((110.0, "ok"), (107.0, "ok"), (104.0, "problem")):
        times = iter([100.0, after])
        monkeypatch.setattr(doctor, "time", SimpleNamespace(time=lambda times=times: next(times)))
        assert findings(DoctorRequest(tmp_path))["clocks"].level == level


def test_a_container_has_what_its_limit_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_CGROUP", tmp_path)
    only(monkeypatch, "memory")
    whole = findings(DoctorRequest(tmp_path))["memory"].sentence
    for name, text in (
        ("max", f"{2 << 30}\n"),
        ("current", f"{3 << 29}"),
        ("stat", f"anon 5\ninactive_file {1 << 29}\n"),
    ):
        (tmp_path / f"memory.{name}").write_text(text)
    assert findings(DoctorRequest(tmp_path))["memory"].sentence == "1.0 of 2.0 GiB of memory are free"
    (tmp_path / "memory.max").write_text("max\n")
    assert findings(DoctorRequest(tmp_path))["memory"].sentence.split(" of ", 1)[1] == whole.split(" of ", 1)[1]


def test_each_problem_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, "disk")
    (tmp_path / "file").write_text("")
    assert "can't write to " in findings(DoctorRequest(tmp_path / "file" / "runs"))["disk"].sentence
    only(monkeypatch, "memory", "disk", "clocks", "ports", "files")
    monkeypatch.setattr(doctor, "MIN_FREE_BYTES", 1 << 60)
    stat = os.stat

    class Off:
        st_mtime = time.time() - 100

    monkeypatch.setattr(doctor.os, "stat", lambda path, **more: Off if "doctor" in str(path) else stat(path, **more))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth99")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 256))
    found = findings(DoctorRequest(tmp_path))
    assert {finding.level for finding in found.values()} == {"problem"}
    assert "end other programs" in found["memory"].sentence
    assert "free some disk space" in found["disk"].sentence
    assert "start NTP" in found["clocks"].sentence
    assert "GLOO_SOCKET_IFNAME is eth99, but this machine's interfaces are lo" in found["ports"].sentence
    assert found["files"].sentence == "a process may open only 256 files: raise the limit with `ulimit -n 1024`"


def test_a_plan_is_held_against_memory_and_disk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What a plan keeps in memory, host memory and on disk is that of its forecast."""
    run_file = tmp_path / "run.yaml"
    run_file.write_text("model: demo\nparallel: dp2-z3-ooptd-fp32\n")
    cluster = detect_machine(2)
    forecast = predict(None, cluster, run_file).forecast
    need = PlanNeed("dp2-z3-ooptd", forecast, shares_memory=True)
    total = sum(rank.num_ranks * (rank.terms.total + rank.host_bytes) for rank in forecast.ranks)
    on_disk = sum(rank.num_ranks * rank.disk_bytes for rank in forecast.ranks)
    assert total > 0
    assert on_disk > 0
    fits = list(check_plan(need, total, tmp_path))
    assert [one.level for one in fits] == ["ok", "ok"]
    assert format_bytes(on_disk) in fits[1].sentence
    (short, _) = check_plan(need, total - 1, tmp_path)
    assert short.level == "problem"
    assert "take oopt0.5 or ooptd" in short.sentence
    request = DoctorRequest(tmp_path, plan=need)
    assert [one.check for one in run_checks(request, ["plan"])] == ["plan", "plan"]
    devices = PlanNeed("dp2-z3-ooptd", predict(None, "2xrtx4090", run_file).forecast, shares_memory=False)
    assert "on a device that has 23.6 GiB" in list(check_plan(devices, total, tmp_path))[-1].sentence
    assert main(["doctor", "--model", "demo"]) == 2
    assert "--model demo is of a plan" in capsys.readouterr().err


def test_a_disk_is_measured_where_files_can_be_written(tmp_path: Path) -> None:
    found = measure_disk(tmp_path, 1 << 22)
    assert found is not None
    assert min(found) > 0
    assert not list(tmp_path.iterdir())
    assert measure_disk(tmp_path / "missing") is None
