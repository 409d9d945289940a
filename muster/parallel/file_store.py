"""Scratch memory on disk: one file for each rank and kind of content, in which each part has its place.

The file has no name: it is unlinked as soon as it is open, so that whatever ends the process, the system frees the
disk. It is no checkpoint: a run that was killed goes on from its last checkpoint, which has all state. Space is
allocated before it is written, so that a disk that is too small is known then. Each part is a run of tensors without
gaps, from a multiple of 4,096 bytes on, and has a CRC-32 for each block, which are compared whenever it is read.
"""

import ctypes
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import gettempdir, mkstemp

from torch import Tensor

from muster.config.attempt_files import SCRATCH_PREFIX
from muster.parallel.block_io import ALIGNMENT, BlockIo, use_direct_io
from muster.spec.errors import MusterError
from muster.spec.formatting import format_bytes


class FileStore:
    """One rank's file. A thread reads and writes, in the order of the requests, beside the rank's own."""

    def __init__(self, folder: Path | None, content: str, word: str, resumes: bool = True) -> None:
        """Open a file in a folder, which is made where it doesn't exist; None: in the system's for temporary files.

        `content` says in messages what the file holds, `word` which part of the plan's name wants it, `resumes` if a
        process that is started again goes on from a checkpoint.
        """
        self.content, self._word = content, word
        self.remedy = "and start it again: it goes on from its last checkpoint, if there is one"
        """Advice at the end of an error."""
        if not resumes:
            self.remedy = "or name another folder in TMPDIR"
        self._folder = folder or Path(gettempdir())
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._fd = _unnamed_file(self._folder)
            use_direct_io(self._fd)
        except OSError as error:
            raise self._failure("opened", error) from error
        self._thread, self._blocks = ThreadPoolExecutor(1, "file-store"), BlockIo()
        self._free: dict[int, list[FileSlot]] = {}
        self.num_bytes = 0
        """Bytes of all parts."""
        self.moved_bytes = 0
        """Bytes read and written so far."""

    def take(self, size: int) -> "FileSlot":
        """Return a place for `size` bytes that nothing uses. Raises MusterError where the disk has no room."""
        if free := self._free.get(size):
            return free.pop()
        start = -(-self.num_bytes // ALIGNMENT) * ALIGNMENT
        try:
            if size:
                os.posix_fallocate(self._fd, start, size)
        except OSError as error:
            raise self._failure(f"given {format_bytes(start + size)}", error) from error
        self.num_bytes = start + size
        return FileSlot(self, start, size)

    def give_back(self, slot: "FileSlot") -> None:
        """Let a place be used again."""
        self._free.setdefault(slot.size, []).append(slot)

    def submit(self, work: Callable[[], None]) -> Callable[[], None]:
        """Let the thread do work; the returned function waits for its end, and raises what went wrong."""
        return self._thread.submit(work).result

    def transfer(self, views: Sequence[memoryview], start: int, writes: bool) -> list[int]:
        """Read or write memory from a place in the file on; return the CRC-32 of each block. Raises MusterError."""
        try:
            found = (self._blocks.write if writes else self._blocks.read)(self._fd, views, start)
        except OSError as error:
            raise self._failure("written" if writes else "read", error) from error
        self.moved_bytes += sum(map(len, views))
        return found

    def _failure(self, what: str, error: OSError) -> MusterError:
        return MusterError(
            f"{self.content} on disk can't be {what} in {self._folder}: {error.strerror or error}; make room"
            f" there, or leave {self._word} out of the plan, {self.remedy}"
        )

    def close(self) -> None:
        """Give the disk space back."""
        self._thread.shutdown()
        self._blocks.close()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        with suppress(Exception):  # at the interpreter's end, or not fully open
            self.close()


class FileSlot:
    """A place in a file, and the checksums of what it holds."""

    def __init__(self, store: FileStore, start: int, size: int) -> None:
        self._store, self._start, self.size = store, start, size
        self._checksums: list[int] = []

    def write(self, tensors: Sequence[Tensor]) -> None:
        """Write tensors one after another. Raises MusterError."""
        self._checksums = self._store.transfer(_bytes_of(tensors), self._start, writes=True)

    def read(self, tensors: Sequence[Tensor]) -> None:
        """Fill tensors of the same sizes with what was written. Raises MusterError, also where it has changed."""
        if self._store.transfer(_bytes_of(tensors), self._start, writes=False) != self._checksums:
            raise MusterError(
                f"{self._store.content} on disk isn't what was written there (its CRC-32 differs): look for errors of"
                f" the disk, {self._store.remedy}"
            )

    def start_read(self, tensors: Sequence[Tensor]) -> Callable[[], None]:
        """Start to fill tensors beside the caller's work; the returned function waits for the end, and raises as `read`
        does."""
        return self._store.submit(partial(self.read, tensors))

    def free(self) -> None:
        """Let others have the place, once what has been submitted so far is done."""
        self._store.give_back(self)


def _bytes_of(tensors: Sequence[Tensor]) -> list[memoryview]:
    """Return the memory of contiguous tensors, which any dtype has, without those that are empty."""
    full = (tensor for tensor in tensors if tensor.nbytes)
    return [memoryview((ctypes.c_char * one.nbytes).from_address(one.data_ptr())).cast("B") for one in full]


def _unnamed_file(folder: Path) -> int:
    """Open a file without a name; on file systems that have none, a file whose name is removed at once."""
    if hasattr(os, "O_TMPFILE"):
        with suppress(OSError):
            return os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o600)
    fd, name = mkstemp(prefix=SCRATCH_PREFIX, dir=folder)
    os.unlink(name)
    return fd
