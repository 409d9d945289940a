"""Optimizer state on disk: it comes back as it was, leaves nothing behind, and says what is wrong with the disk."""

import errno
import os
from pathlib import Path

import pytest
import torch

from muster.optim.state_store import StateStore
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
    os.pwrite(store._fd, b"x", 3)
    with pytest.raises(MusterError, match="CRC-32 differs"):
        part.read()()
