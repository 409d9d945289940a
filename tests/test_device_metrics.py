"""Figures of the devices that a run trains on, with a GPU that exists in name only."""

import os
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from muster.config.named_model import load_model
from muster.cost.time.plan_times import host_copy_s
from muster.cost.time.rate_interpolation import RateInterpolator
from muster.parallel import world as world_module
from muster.parallel.world import pick_device
from muster.probe.all_reduce_check import time_all_reduces
from muster.probe.collectives import BYTES
from muster.probe.host_link import time_host_copies
from muster.probe.kernels import SIZES
from muster.probe.profile import cluster_from_rates
from muster.report.report_data import PredictedVsMeasured
from muster.spec.errors import ConfigError, MusterError
from muster.spec.machine_rates import KernelRates, MachineRates
from muster.spec.plan_name import parse_plan_name
from muster.train import finalize
from muster.train.device_metrics import DeviceMemory, DeviceMetrics
from muster.train.metrics import metrics_row
from muster.train.step_result import StepResult
from tests.parity import small_run

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")


def gpu_world(name: str, size: int, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    return SimpleNamespace(device=CUDA, size=size, all_gather_object=lambda value: [value] * size)


def step_result(num_tokens: int, time_s: float) -> StepResult:
    return StepResult(1, 2.0, 0.0, 1.0, 1e-3, num_tokens, time_s, 0.0, None, 0, 0, False)


def test_mfu_is_that_of_the_catalogues_device(monkeypatch: pytest.MonkeyPatch) -> None:
    model, plan = load_model("llama3-8b"), parse_plan_name("dp8-z3-bf16")
    devices = DeviceMetrics(model, plan, 8192, gpu_world("NVIDIA H100 80GB HBM3", 8, monkeypatch))
    tokens, step_s = 8 * 8192, 1.5
    attention_flops = 12 * model.num_layers * model.hidden_size * 8192
    expected = tokens * (6 * model.num_parameters + attention_flops) / step_s / (8 * 989e12)
    assert devices.mfu(step_result(tokens, step_s)) == pytest.approx(expected, rel=0.07)  # 6N counts the embedding too
    assert "7,91" in devices.note


def test_an_unknown_device_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = load_model("tiny"), parse_plan_name("dp1-bf16"), 64
    devices = DeviceMetrics(*asked, gpu_world("NVIDIA Z9000", 1, monkeypatch))
    assert devices.mfu(step_result(64, 1.0)) is None
    assert devices.note == "MFU: n/a, because the peak arithmetic rate of NVIDIA Z9000 is not in the catalogue"
    cpu: Any = SimpleNamespace(device=CPU, all_gather_object=lambda value: [value])
    assert "of this CPU is not" in DeviceMetrics(*asked, cpu).note


def test_memory_of_a_device_is_in_the_metrics_and_beside_its_forecast(monkeypatch: pytest.MonkeyPatch) -> None:
    gib = 1 << 30
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 3 * gib)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 4 * gib)
    world = gpu_world("NVIDIA H100 80GB HBM3", 1, monkeypatch)
    memory = DeviceMetrics(load_model("tiny"), parse_plan_name("dp1-bf16"), 64, world).memory()
    assert memory is not None
    assert memory == DeviceMemory(3 * gib, 4 * gib)
    row = metrics_row(step_result(64, 1.0), 64, 0.0, 0.5, memory)
    assert (row["perf/mfu"], row["memory/allocated_bytes"], row["memory/reserved_bytes"]) == (0.5, 3 * gib, 4 * gib)
    assert "memory/allocated_bytes" not in metrics_row(step_result(64, 1.0), 64, 0.0, None, None)
    config = small_run()
    trainer: Any = SimpleNamespace(config=config, plan=parse_plan_name("dp1-bf16"), world=world)
    rows = {row.label: row for row in finalize._device_memory_rows(trainer, [memory])}
    assert rows["memory: allocated"].measured == 3 * gib
    assert isinstance(rows["memory: reserved"], PredictedVsMeasured)
    assert 0 < (rows["memory: allocated"].predicted or 0) <= (rows["memory: reserved"].predicted or 0)
    assert not finalize._device_memory_rows(trainer, [])


def test_a_large_model_is_not_sampled_at_the_end_of_its_run(tmp_path: Path) -> None:
    config = small_run()
    config = config.model_copy(update={"train": config.train.model_copy(update={"sample_tokens": 8})})
    assert finalize._is_sampled(config)
    assert not finalize._sample_notes(config, tmp_path)
    large = config.model_copy(update={"model": load_model("llama3-8b")})
    assert not finalize._is_sampled(large)
    assert f"'muster generate {tmp_path}'" in finalize._sample_notes(large, tmp_path)[0]


# ----------------------------------------------------------------------------------------------------------------------
# Which device a rank takes


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """A machine with `count` visible GPUs, the first of which is `uuid`."""
    found = SimpleNamespace(count=1, uuid="a")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: found.count)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=found.uuid))
    monkeypatch.setattr(world_module, "COLLECTIVE_TIMEOUT", world_module.timedelta(seconds=30))
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with patch.dict(os.environ):  # a rank with a GPU sets variables of its own
        yield found


def test_each_rank_takes_a_gpu_of_its_own(gpus: SimpleNamespace) -> None:
    gpus.count = 4
    assert [pick_device(rank, 4) for rank in range(4)] == [torch.device("cuda", rank) for rank in range(4)]


def test_a_process_that_sees_one_gpu_takes_that(gpus: SimpleNamespace) -> None:
    store = dist.HashStore()
    for rank in range(2):
        store.set(f"gpu of rank {rank}", f"gpu-{rank}")
    gpus.uuid = "gpu-1"
    assert pick_device(1, 2, store) == CUDA


def test_ranks_that_would_share_a_gpu_compute_on_the_cpu_and_say_so(gpus: SimpleNamespace, capsys) -> None:
    store = dist.HashStore()
    store.set("gpu of rank 1", "a")
    assert pick_device(0, 2, store) == CPU
    said = "this machine has 1 GPU for 2 ranks, and each rank needs one of its own; --nproc 1 uses it"
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", f"ranks compute on the CPU: {said}\n"), "JSON on stdout stays whole"


# ----------------------------------------------------------------------------------------------------------------------
# The check of all-reduces


@pytest.mark.parametrize("size", [2, 17, 136, 1000])
def test_the_sum_over_any_number_of_ranks_is_right(size: int) -> None:
    world: Any = SimpleNamespace(device=CPU, size=size, barrier=lambda: None, all_reduce=lambda x: x.mul_(size))
    assert len(time_all_reduces(world)) > 1


def test_a_wrong_sum_is_found() -> None:
    world: Any = SimpleNamespace(device=CPU, size=4, barrier=lambda: None, all_reduce=lambda x: x.mul_(3))
    with pytest.raises(MusterError, match="over 4 ranks gave 3 in 4,194,304 of 4,194,304 places: expected 4"):
        time_all_reduces(world)

    def reduce_wrongly(x: torch.Tensor) -> None:
        x.mul_(4)[12_345] = 5

    world.all_reduce = reduce_wrongly
    with pytest.raises(MusterError, match="over 4 ranks gave 5 in 1 of 4,194,304 places: expected 4"):
        time_all_reduces(world)


# ----------------------------------------------------------------------------------------------------------------------
# What a profile measures


def test_a_profile_of_a_gpu_reaches_what_fills_it() -> None:
    """An H100 does 1e12 FLOPs in a millisecond, and its L2 cache holds 50 MB."""
    sizes = SIZES["cuda"]
    flops = [2 * t * k * n for t, k, n in product(sizes.tokens, sizes.widths, sizes.widths)]
    assert max(one for one in flops if one <= sizes.max_flops) > 5e12
    assert 2 * max(sizes.elements) > 4 * 126e6, "bytes in bf16"
    assert 2 * sizes.pool_elements > 126e6
    assert max(BYTES["cuda"]) >= 1 << 28
    assert (max(sizes.head_widths), max(sizes.positions), sizes.heads) >= (128, 8192, 32)


def test_the_measured_host_link_is_what_offload_is_costed_with(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(name="GPU", total_memory=80 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    kernels = KernelRates(matmuls={"forward": ((1, 1, 1, 1.0),)}, curves={"copy": ((1024, 1e-6),)})
    rates = MachineRates(ranks=1, cores=0, kernels={"bf16": kernels}, collectives={}, host_bytes_per_s=40e9)
    assert host_copy_s(cluster_from_rates(rates).device, 40e9) == pytest.approx(1.0)
    assert time_host_copies(CPU) is None


def test_a_profile_by_one_rank_says_that_it_knows_no_collectives() -> None:
    rates = MachineRates(ranks=1, cores=2, kernels={"fp32": KernelRates()}, collectives={})
    with pytest.raises(ConfigError, match="no time of all_reduce, because 1 rank measured it: run 'muster profile'"):
        RateInterpolator(rates, "fp32").collective("all_reduce", 2, 1024)
