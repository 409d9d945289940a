"""Checks of GPUs by `muster doctor`: driver, CUDA and NCCL, memory, arithmetic, links, clocks and power."""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from muster.config.cluster_files import load_device
from muster.config.local_machine import catalog_device_name, nvidia_gpu_names
from muster.probe.check_result import CheckResult, note, ok, problem
from muster.spec.units import pluralize

_GPUS = "gpus"
_DRIVER = Path("/dev/nvidiactl")
_NO_GPU = "this machine has no NVIDIA GPU: ranks compute on its cores"
MIN_FREE_SHARE = 0.9
"""Share of a GPU's memory below which another program seems to hold some of it."""
MIN_RATE_SHARE = 0.4
"""Share of the catalogue's peak below which a large matmul is suspiciously slow: healthy GPUs reach 0.6 to 0.8."""
_SMI_COLUMNS = (
    "index",
    "driver_version",
    "clocks.sm",
    "clocks.max.sm",
    "power.draw",
    "power.limit",
    "power.default_limit",
    "clocks_throttle_reasons.hw_thermal_slowdown",
    "clocks_throttle_reasons.hw_power_brake_slowdown",
    "ecc.errors.uncorrected.volatile.total",
)


def check_gpus(limit_s: float) -> Iterator[CheckResult]:
    """Use each GPU in another process, and read what the driver says about it."""
    names = nvidia_gpu_names()
    if not names and not _DRIVER.exists():
        yield note(_GPUS, _NO_GPU)
        return
    try:
        version("torch")
    except PackageNotFoundError:
        yield note(_GPUS, f"{pluralize(len(names), 'NVIDIA GPU')} found, which can't be used without PyTorch")
        return
    command = [sys.executable, "-m", "muster.probe.gpu_probe"]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired:
        yield problem(_GPUS, f"the GPUs didn't answer within {limit_s:g} s: look for their errors in dmesg")
        return
    if ended.returncode:
        last = (ended.stderr.strip().splitlines() or ["no reason given"])[-1]
        yield problem(_GPUS, f"a process that used the GPUs ended with exit code {ended.returncode} ({last})")
        return
    yield from gpu_results(names, json.loads(ended.stdout.splitlines()[-1]), read_smi(limit_s))


def gpu_results(
    names: Sequence[str], found: Mapping[str, Any], driver: Sequence[Mapping[str, str]]
) -> Iterator[CheckResult]:
    """Judge what `gpu_probe` found on GPUs that the driver calls `names`, and the driver's own rows."""
    gpus = found["gpus"]
    if not gpus and not names:
        yield note(_GPUS, _NO_GPU)
        return
    if not gpus:
        reason = "this PyTorch is built without CUDA" if found["cuda"] is None else "CUDA can't be initialised"
        yield problem(
            _GPUS,
            f"{pluralize(len(names), 'GPU')} found ({names[0]}), but {reason}: install a CUDA build of PyTorch that the"
            " driver supports",
        )
        return
    versions = [f"CUDA {found['cuda']}", f"NCCL {found['nccl']}" if found["nccl"] else "no NCCL"]
    if driver:
        versions.insert(0, f"driver {driver[0]['driver_version']}")
    yield ok(_GPUS, f"{len(gpus)} × {gpus[0]['name']}, {', '.join(versions)}")
    if not found["nccl"] and len(gpus) > 1:
        yield problem(_GPUS, "this PyTorch has no NCCL, so its GPUs can't train together: install the CUDA build")
    if not found["triton"]:
        yield note(_GPUS, "Triton isn't installed for these GPUs, so plans run without compile: pip install triton")
    for index, gpu in enumerate(gpus):
        yield from _judge_gpu(index, gpu)
    for pair in found["pairs"]:
        yield _judge_pair(pair)
    for row in driver:
        yield from _judge_driver_row(row)


def _judge_gpu(index: int, gpu: Mapping[str, Any]) -> Iterator[CheckResult]:
    if "error" in gpu:
        yield problem(
            _GPUS, f"GPU {index} can't be used ({gpu['error']}): free it, or leave it out of the visible ones"
        )
        return
    if not gpu["is_right"]:
        yield problem(_GPUS, f"GPU {index} multiplies wrongly: take it out of service")
    free, total = gpu["free_bytes"], gpu["total_bytes"]
    if free < MIN_FREE_SHARE * total:
        yield problem(
            _GPUS,
            f"GPU {index} has {free / 2**30:.1f} of {total / 2**30:.1f} GiB free: another program holds the rest,"
            " which nvidia-smi names",
        )
    rate = gpu["flops_per_s"]
    text = f"GPU {index} multiplies at {rate / 1e12:,.0f} TFLOP/s in bf16"
    known = catalog_device_name(gpu["name"])
    peak = None if known is None else load_device(known).flops_per_s("bf16")
    if peak is None:
        yield ok(_GPUS, text)
    elif rate < MIN_RATE_SHARE * peak:
        yield problem(
            _GPUS,
            f"{text}, {rate / peak:.0%} of its peak, where 60% and more are usual: look at its clocks, its power limit"
            " and other programs",
        )
    else:
        yield ok(_GPUS, f"{text}, {rate / peak:.0%} of its peak")


def _judge_pair(pair: Mapping[str, Any]) -> CheckResult:
    first, second = pair["pair"]
    text = f"GPU {first} to {second}: {pair['bytes_per_s'] / 1e9:,.0f} GB/s"
    if pair["is_direct"]:
        return ok(_GPUS, text)
    return note(_GPUS, f"{text}, through the host's memory: these GPUs can't reach each other directly")


def _judge_driver_row(row: Mapping[str, str]) -> Iterator[CheckResult]:
    index = row["index"]
    for key, cause in (("hw_thermal_slowdown", "too hot"), ("hw_power_brake_slowdown", "short of power")):
        if row.get(f"clocks_throttle_reasons.{key}") == "Active":
            yield problem(_GPUS, f"GPU {index} slows its clocks because it is {cause}: check its cooling and supply")
    limit, default = _number(row, "power.limit"), _number(row, "power.default_limit")
    if limit is not None and default is not None and limit < default:
        yield note(_GPUS, f"GPU {index} is limited to {limit:g} of {default:g} W, which makes long matmuls slower")
    if _number(row, "ecc.errors.uncorrected.volatile.total"):
        yield problem(_GPUS, f"GPU {index} has uncorrected memory errors since it started: reset or replace it")


def _number(row: Mapping[str, str], column: str) -> float | None:
    try:
        return float(row[column])
    except (KeyError, ValueError):  # such as [N/A]
        return None


def read_smi(limit_s: float) -> list[dict[str, str]]:
    """Return nvidia-smi's row for each GPU; none where there is no such program, or it doesn't know the columns."""
    query = ["nvidia-smi", f"--query-gpu={','.join(_SMI_COLUMNS)}", "--format=csv,noheader,nounits"]
    try:
        ended = subprocess.run(query, capture_output=True, text=True, timeout=limit_s)
    except (OSError, subprocess.TimeoutExpired):
        return []
    rows = [[word.strip() for word in line.split(",")] for line in ended.stdout.splitlines()]
    return [dict(zip(_SMI_COLUMNS, row, strict=True)) for row in rows if len(row) == len(_SMI_COLUMNS)]
