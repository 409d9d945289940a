"""Judgement of GPUs by `muster doctor`, on findings of machines that exist in name only."""

from pathlib import Path
from typing import Any

import pytest

from muster.probe import doctor_gpus
from muster.probe.doctor_gpus import check_gpus, gpu_results, read_smi

NAME = "NVIDIA H100 80GB HBM3"
HEALTHY = {
    "name": NAME,
    "free_bytes": 79 << 30,
    "total_bytes": 80 << 30,
    "is_right": True,
    "flops_per_s": 6.5e14,
}


def judged(gpus: list[dict[str, Any]], driver: tuple[dict[str, str], ...] = (), **found: Any) -> list[tuple[str, str]]:
    probe = {"cuda": "13.0", "nccl": "2.28.9", "triton": True, "pairs": [], **found, "gpus": gpus}
    return [(one.level, one.sentence) for one in gpu_results([NAME] * len(gpus), probe, driver)]


def test_healthy_gpus_are_described() -> None:
    pair = {"pair": [0, 1], "is_direct": True, "bytes_per_s": 3.6e11}
    rows = judged([HEALTHY, HEALTHY], ({"index": "0", "driver_version": "580.1"},), pairs=[pair])
    assert {level for level, _ in rows} == {"ok"}
    assert rows[0][1] == f"2 × {NAME}, driver 580.1, CUDA 13.0, NCCL 2.28.9"
    assert rows[1][1] == "GPU 0 multiplies at 650 TFLOP/s in bf16, 66% of its peak"
    assert rows[3][1] == "GPU 0 to 1: 360 GB/s"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"free_bytes": 40 << 30}, "40.0 of 80.0 GiB free: another program"),
        ({"flops_per_s": 2e14}, "20% of its peak, where 60%"),
        ({"is_right": False}, "multiplies wrongly"),
        ({"error": "CUDA error: out of memory"}, "can't be used (CUDA error: out of memory)"),
    ],
)
def test_a_gpu_that_is_not_well_is_a_problem(change: dict[str, Any], words: str) -> None:
    sentences = [sentence for level, sentence in judged([HEALTHY | change]) if level == "problem"]
    assert len(sentences) == 1
    assert words in sentences[0]


def test_a_missing_triton_is_said_since_plans_then_run_without_compile() -> None:
    notes = [sentence for level, sentence in judged([HEALTHY], triton=False) if level == "note"]
    assert notes == ["Triton isn't installed for these GPUs, so plans run without compile: pip install triton"]


@pytest.mark.parametrize(
    ("row", "level", "words"),
    [
        ({"clocks_throttle_reasons.hw_thermal_slowdown": "Active"}, "problem", "too hot"),
        ({"power.limit": "400.00", "power.default_limit": "700.00"}, "note", "limited to 400 of 700 W"),
        ({"ecc.errors.uncorrected.volatile.total": "3"}, "problem", "memory errors"),
    ],
)
def test_what_the_driver_says_is_judged(row: dict[str, str], level: str, words: str) -> None:
    found = judged([HEALTHY], ({"index": "0", "driver_version": "580.1", **row},))
    assert [words in sentence for one, sentence in found if one == level] == [True]


def test_gpus_that_pytorch_can_not_use_are_a_problem() -> None:
    found = list(gpu_results([NAME], {"cuda": None, "nccl": None, "gpus": [], "pairs": []}, ()))
    assert [one.level for one in found] == ["problem"]
    assert "built without CUDA" in found[0].sentence


def test_a_machine_without_a_gpu_starts_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor_gpus, "nvidia_gpu_names", list)
    monkeypatch.setattr(doctor_gpus, "_DRIVER", tmp_path / "none")
    monkeypatch.setattr(doctor_gpus.subprocess, "run", lambda *_, **__: pytest.fail("a process was started"))
    assert [one.level for one in check_gpus(9.0)] == ["note"]


def test_the_drivers_rows_are_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    row = "0, 580.1, 1980, 1980, 100.0, 700.0, 700.0, Not Active, Not Active, [N/A]"
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\necho '{row}'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    rows = read_smi(30.0)
    assert (rows[0]["driver_version"], rows[0]["power.limit"]) == ("580.1", "700.0")
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    assert read_smi(30.0) == []
