"""Measurement of the disk that optimizer state may lie on: long reads and writes past the page cache."""

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from statistics import median
from tempfile import TemporaryFile
from time import perf_counter

BYTES, QUICK_BYTES = 1 << 28, 1 << 25
_REPEATS = 3
_CALL_BYTES = 1 << 24
"""Bytes of one read or write, about those of a layer's part."""


def measure_disk(folder: Path, size: int = BYTES) -> tuple[float, float] | None:
    """Return the bytes a second of reads and of writes, each the median of three, in a folder; None where no file can
    be written there.

    A write ends when the data are on the disk; before a read they are dropped from the page cache, where the system
    does that.
    """
    block = os.urandom(_CALL_BYTES)
    try:
        with TemporaryFile(dir=folder) as file:
            fd = file.fileno()
            os.posix_fallocate(fd, 0, size)
            writes = [_seconds(lambda: _write(fd, block, size)) for _ in range(_REPEATS)]
            reads = []
            for _ in range(_REPEATS):
                with suppress(AttributeError):
                    os.posix_fadvise(fd, 0, size, os.POSIX_FADV_DONTNEED)
                reads.append(_seconds(lambda: _read(fd, size)))
    except OSError:
        return None
    return size / median(reads), size / median(writes)


def _write(fd: int, block: bytes, size: int) -> None:
    for start in range(0, size, len(block)):
        os.pwrite(fd, block, start)
    os.fdatasync(fd)


def _read(fd: int, size: int) -> None:
    target = bytearray(_CALL_BYTES)
    for start in range(0, size, _CALL_BYTES):
        os.preadv(fd, [target], start)


def _seconds(work: Callable[[], None]) -> float:
    begin_s = perf_counter()
    work()
    return perf_counter() - begin_s
