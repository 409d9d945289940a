"""The benchmark for GPUs: its table, and that it goes on where it was cut off."""

from pathlib import Path

import pytest

from benchmarks import gpu
from benchmarks.gpu_step import PackedTrainer


def step(step_s: float, **more: object) -> dict:
    return {
        "measured": {"step_s": step_s, "reserved_bytes": 1 << 30},
        "predicted": {},
        "tokens_per_s": 1 / step_s,
        **more,
    }


def test_the_table_sets_each_step_beside_the_plain_loop_and_its_predictions() -> None:
    found = {
        "doctor": [],
        "step 1B, compiled": step(0.5, mfu=0.52)
        | {"predicted": {"catalogue": {"step_s": 0.45, "memory_bytes": 2 << 30}}},
        "step 1B, plain compiled": step(0.6),
        "step 1B, eager": {"error": "Traceback\nRuntimeError: no kernel"},
        "step 1B, nanochat compiled": {"skipped": "nanochat can't be imported (No module named 'nanochat')"},
    }
    rows = gpu.table(found).splitlines()
    assert rows[2] == "| 1B, compiled | 500.0 ms | 2 | 52.0% | 450.0 ms (-10%) | – | 1.0 GiB | 2.0 GiB | 1.20 |"
    assert rows[4].startswith("| 1B, eager | failed: RuntimeError: no kernel |")
    assert rows[5].startswith("| 1B, nanochat compiled | skipped: nanochat can't be imported")


def test_each_other_part_is_a_line() -> None:
    found = {
        "doctor": [{"check": "disk", "level": "ok", "sentence": "fine"}, {"level": "warn", "sentence": "no NVLink"}],
        "verify": {
            "fp32": {"agree": {"dp1": True, "dp1-rfull": True}, "says": ""},
            "bf16": {"agree": {}, "says": "no"},
        },
        "profile": {"error": "Traceback\nRuntimeError: out of memory"},
        "kill and resume": {"killed_after_step": 8, "largest_difference": 0.0},
        "out of memory": {"exit_code": 3, "says": "muster: plan dp1 needs 2 TiB (on rank 0), but has 80 GiB"},
        "verify on many": {"fp32": {"agree": {"dp8-z3": False, "pp8": True}, "says": ""}},
        "run pp8": {"predicted": {"step_s": 0.9}, "measured": {"step_s": 1.0}, "losses": 5.5},
        "step 1B": step(1.0),
    }
    assert gpu.summary(found) == [
        "doctor: 2 checks, no NVLink",
        "verify: fp32: 2 plans agree with the reference; bf16: no",
        "profile: failed: RuntimeError: out of memory",
        "kill and resume: killed after step 8; losses differ from a whole run's by at most 0",
        "out of memory: exit code 3; muster: plan dp1 needs 2 TiB",
        "verify on many: fp32: dp8-z3",
        "run pp8: 1000.0 ms a step, predicted 900.0 ms (-10%)",
    ]


def test_packed_documents_lie_otherwise_in_every_step() -> None:
    trainer = object.__new__(PackedTrainer)
    trainer.mean_document = 8
    first, second = (trainer.positions((2, 64)) for _ in range(2))
    assert first is not None
    assert second is not None
    assert (first[:, 0] == 0).all()
    assert (first != second).any()
    assert set((first[:, 1:] - first[:, :-1])[first[:, 1:] != 0]) == {1}


def test_a_part_that_has_a_result_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    runs: list[str] = []

    def note(name: str) -> gpu.Part:
        return gpu.Part(name, lambda out: runs.append(name) or {"name": name})

    def fail(out: Path) -> None:
        runs.append("two")
        raise RuntimeError("out of memory")

    monkeypatch.setattr(gpu, "parts", lambda out: [note("one"), gpu.Part("two", fail), note("three, four")])
    found = gpu.run_parts(tmp_path, 60, again=False)
    assert found == {"one": {"name": "one"}, "two": {"error": "out of memory"}, "three, four": {"name": "three, four"}}
    assert gpu.run_parts(tmp_path, 60, again=False) == found
    assert runs == ["one", "two", "three, four", "two"], "what failed is tried again"
    (tmp_path / "one.json").unlink()
    assert "one" not in gpu.run_parts(tmp_path, -1, again=False)
    assert "the same command goes on here" in capsys.readouterr().out


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_everything_runs_to_its_end_on_a_cpu(tmp_path: Path) -> None:
    found = gpu.run_parts(tmp_path, 1200, again=False)
    assert set(found) == {part.name for part in gpu.parts(tmp_path)}
    assert not [name for name, row in found.items() if "error" in row]
    for part in ("verify", "verify on many"):
        agree = [ok for row in found[part].values() for ok in row["agree"].values()]
        assert agree
        assert all(agree)
    assert "skipped" in found["step toy, torchtitan"], "which has no backward on a CPU"
    assert gpu.table(found)
    assert gpu.summary(found)
