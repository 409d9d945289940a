"""Optimizer state on disk: it comes back as it was, leaves nothing behind, and says what is wrong with the disk."""

import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from muster.optim.state_store import StateStore
from muster.parallel.executor import Executor
from muster.schedule.action import Action, Kind
from muster.schedule.check import check
from muster.schedule.lower import LoweringOptions, lower
from muster.schedule.registry import make_schedule
from muster.schedule.schedule_spec import ScheduleSpec
from muster.spec.errors import MusterError


def test_state_comes_back_and_no_file_has_a_name(tmp_path: Path) -> None:
    store = StateStore(tmp_path / "run")
    values = [torch.randn(3, 5), torch.randn(7, dtype=torch.float64), torch.zeros(0)]
    expected = [value.clone() for value in values]
    values[0].numpy()  # as a checkpoint does that is loaded; torch resizes no storage that numpy has seen
    first, second = store.allocate(values), store.allocate([torch.ones(2)])
    for part in (first, second):
        part.write()()
    assert sum(value.nbytes for value in values) == 0
    assert os.listdir(tmp_path / "run") == []
    first.read()()
    assert all(torch.equal(*pair) for pair in zip(values, expected, strict=True))
    values[0] += 1
    first.is_changed = True
    first.write()()
    first.read()()
    assert torch.equal(values[0], expected[0] + 1)
    moved = store.moved_bytes
    first.write()()
    assert store.moved_bytes == moved, "what hasn't changed isn't written again"


def test_a_full_or_lost_disk_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    store = StateStore(tmp_path)
    part = store.allocate([torch.ones(4)])
    monkeypatch.setattr(os, "pwrite", fails)
    with pytest.raises(MusterError, match=r"can\'t be written in .*: No space left on device; make room there"):
        part.write()()
    monkeypatch.setattr(os, "posix_fallocate", fails)
    with pytest.raises(MusterError, match=r"can\'t be given 4\.\d+ KiB in .*No space left"):
        store.allocate([torch.ones(4)])
    (tmp_path / "file").write_text("")
    with pytest.raises(MusterError, match="can't be opened in .*file"):
        StateStore(tmp_path / "file")


def test_changed_bytes_are_noticed(tmp_path: Path) -> None:
    store = StateStore(tmp_path)
    part = store.allocate([torch.ones(4)])
    part.write()()
    fcntl.fcntl(store._fd, fcntl.F_SETFL, 0)  # no direct I/O, which takes whole blocks alone
    os.pwrite(store._fd, b"x", 3)
    with pytest.raises(MusterError, match="CRC-32 differs"):
        part.read()()


class PassingStage:
    """A stage whose passes compute nothing."""

    def forward(self, micro_batch: int, x: torch.Tensor | None) -> torch.Tensor:
        return torch.zeros(1)

    def backward(self, micro_batch: int, gradient: torch.Tensor | None) -> None: ...


@pytest.mark.parametrize("delayed", [False, True])
def test_host_memory_holds_the_state_of_three_parts_at_most(tmp_path: Path, delayed: bool) -> None:
    """Whatever has been written is freed before more is read, and each update finds what the one before it wrote."""
    store, num_parts = StateStore(tmp_path), 8
    values = [torch.zeros(1000) for _ in range(num_parts)]
    parts = [store.allocate([value]) for value in values]
    for part in parts:
        part.write()()
    options = LoweringOptions(host_updates=(("disk",) * num_parts,), delayed_update=delayed)
    check(program := lower(make_schedule("1f1b", ScheduleSpec(1, 2)), options))
    held = []

    def update(action: Action) -> None:
        part, value = parts[action.slice], values[action.slice]
        if delayed:
            part.read()()
        held.append(sum(other.numel() > 0 for other in values))
        value += 1
        part.is_changed = True

    def nothing(action: Action) -> Callable[[], None]:
        return lambda: None

    handlers: dict = dict.fromkeys((Kind.GRAD_NORM, Kind.CLIP, Kind.STEP), lambda action: None)
    handlers |= dict.fromkeys((Kind.UPDATE, Kind.DELAYED_UPDATE), update)
    copies = dict.fromkeys((Kind.OFFLOAD_GRAD, Kind.RELOAD_PARAM), nothing)
    copies |= {
        Kind.READ_STATE: lambda action: parts[action.slice].read(),
        Kind.WRITE_STATE: lambda action: parts[action.slice].write(),
    }
    stages: dict = {0: PassingStage()}
    executor = Executor(program, 0, 0, stages, {}, handlers, copies=copies)
    for _ in range(3):
        executor.run()
    assert max(held) <= 3, held
    assert sum(value.numel() > 0 for value in values) == (2 if delayed else 0)
    for part in parts:
        part.read()()
    assert all(value.eq(3).all() for value in values)
