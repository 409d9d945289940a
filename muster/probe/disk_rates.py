"""Measurement of the disk that tiers may lie on: long reads and writes past the page cache, several at once."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from mmap import mmap
from pathlib import Path
from statistics import median
from tempfile import TemporaryFile
from time import perf_counter

from muster.parallel.block_io import BLOCK_BYTES, NUM_THREADS, use_direct_io

BYTES, QUICK_BYTES = 1 << 28, 1 << 25
_REPEATS = 3


def measure_disk(folder: Path, size: int = BYTES) -> tuple[float, float] | None:
    """Return the bytes a second of reads and of writes, each the median of three, in a folder; None where no file can
    be written there.

    Requests are as large, and as many are under way, as those of the files of tiers. A write ends when the data are on
    the disk; before a read they are dropped from the page cache, where the system does that.
    """
    buffers = [mmap(-1, BLOCK_BYTES) for _ in range(NUM_THREADS)]
    for buffer in buffers:
        buffer.write(os.urandom(BLOCK_BYTES))
    try:
        with TemporaryFile(dir=folder) as file, ThreadPoolExecutor(NUM_THREADS) as threads:
            fd = file.fileno()
            use_direct_io(fd)
            os.posix_fallocate(fd, 0, size)

            def each_block(move: Callable[[mmap, int], int]) -> None:
                def work(number: int) -> None:
                    for start in range(number * BLOCK_BYTES, size, NUM_THREADS * BLOCK_BYTES):
                        if not move(buffers[number], start):
                            raise OSError("the file has ended")

                list(threads.map(work, range(NUM_THREADS)))

            def write() -> None:
                each_block(lambda buffer, start: os.pwrite(fd, buffer, start))
                os.fdatasync(fd)

            writes = [_seconds(write) for _ in range(_REPEATS)]
            reads = []
            for _ in range(_REPEATS):
                with suppress(AttributeError):
                    os.posix_fadvise(fd, 0, size, os.POSIX_FADV_DONTNEED)
                reads.append(_seconds(lambda: each_block(lambda buffer, start: os.preadv(fd, [buffer], start))))
    except OSError:
        return None
    return size / median(reads), size / median(writes)


def _seconds(work: Callable[[], None]) -> float:
    begin_s = perf_counter()
    work()
    return perf_counter() - begin_s
