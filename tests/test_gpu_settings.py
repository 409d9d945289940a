"""Settings of a rank's GPU: the allocator, float32, and the recorder of collectives."""

import json
import os
from collections.abc import Iterator
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from muster.launch.flight_records import read_records
from muster.parallel import flight_recorder
from muster.parallel.flight_recorder import enable_flight_recorder, flight_record
from muster.parallel.gpu_settings import EXPANDABLE_SEGMENTS, use_expandable_segments
from muster.parallel.world import pick_device


@pytest.fixture
def environment() -> Iterator[None]:
    with patch.dict(os.environ, clear=True):
        yield


def test_a_rank_on_a_gpu_sets_it_before_anything_is_allocated(
    environment: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: asked.append(device.index))
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", asked.append, raising=False)
    monkeypatch.setattr(torch, "set_float32_matmul_precision", asked.append)
    assert pick_device(0, 1) == torch.device("cuda", 0)
    assert asked == [0, EXPANDABLE_SEGMENTS, "highest"]
    assert os.environ["TORCH_FR_BUFFER_SIZE"] == "2000"


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_settings_of_the_environment_stand(name: str, environment: None, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", asked.append, raising=False)
    monkeypatch.setenv(name, "max_split_size_mb:64")
    use_expandable_segments()
    assert not asked


@pytest.mark.parametrize("name", ["TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"])
def test_the_recorders_size_of_the_environment_stands(
    name: str, environment: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "0")
    enable_flight_recorder()
    assert {key: value for key, value in os.environ.items() if "BUFFER_SIZE" in key} == {name: "0"}


def test_an_older_pytorch_has_another_name_for_the_allocators_settings(
    environment: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.delattr(torch._C, "_accelerator_setAllocatorSettings", raising=False)
    monkeypatch.setattr(torch.cuda.memory, "_set_allocator_settings", asked.append)
    use_expandable_segments()
    assert asked == [EXPANDABLE_SEGMENTS]


def test_a_record_is_read_by_whichever_name_pytorch_has_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = {"process_group": ["0", "tp"], "collective_seq_id": 2, "state": "started", "profiling_name": "nccl:barrier"}
    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):
        with patch.object(flight_recorder, "_DUMPS", (name,)), monkeypatch.context() as patched:
            dump = json.dumps({"entries": [entry]}).encode()
            patched.setattr(torch._C._distributed_c10d, name, lambda dump=dump: dump, raising=False)
            (record,) = read_records(flight_record())
            assert (record.entered, record.operation, record.started) == (2, "barrier", True)
    monkeypatch.setattr(flight_recorder, "_DUMPS", ("no_such_dump",))
    assert flight_record() == ""


def test_pytorchs_own_dump_is_read() -> None:
    """Gloo records, too, where its name for the dump is there; without entries, since they weren't asked for."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        dist.all_reduce(torch.ones(4))
        assert "no flight record" not in flight_record()
    finally:
        dist.destroy_process_group()
