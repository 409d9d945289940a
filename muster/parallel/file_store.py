"""Scratch memory on disk: one file for each rank and kind of content, in which each part has its place.

The file has no name: it is unlinked as soon as it is open, so that whatever ends the process, the system frees the
disk. It is no checkpoint: a run that was killed goes on from its last checkpoint, which has all state. Space is
allocated before it is written, so that a disk that is too small is known then. Each part is a run of tensors without
gaps, from a multiple of 4,096 bytes on, and has a CRC-32 that is compared whenever it is read.
"""

import ctypes
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from tempfile import gettempdir, mkstemp

from torch import Tensor

from muster.config.attempt_files import SCRATCH_PREFIX
from muster.spec.checksum import crc32
from muster.spec.errors import MusterError
from muster.spec.formatting import format_bytes

_ALIGNMENT = 4096


class FileStore:
    """One rank's file. A thread reads and writes, in the order of the requests, beside the rank's own."""

    def __init__(self, folder: Path | None, content: str, word: str) -> None:
        """Open a file in a folder, which is made where it doesn't exist; None: in the system's for temporary files.

        `content` says in messages what the file holds, `word` which part of the plan's name wants it.
        """
        self.content, self._word = content, word
        self._folder = folder or Path(gettempdir())
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._fd = _unnamed_file(self._folder)
        except OSError as error:
            raise self._failure("opened", error) from error
        self._thread = ThreadPoolExecutor(1, "file-store")
        self._free: dict[int, list[FileSlot]] = {}
        self.num_bytes = 0
        """Bytes of all parts."""
        self.moved_bytes = 0
        """Bytes read and written so far."""

    def take(self, size: int) -> "FileSlot":
        """Return a place for `size` bytes that nothing uses. Raises MusterError where the disk has no room."""
        if free := self._free.get(size):
            return free.pop()
        start = -(-self.num_bytes // _ALIGNMENT) * _ALIGNMENT
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

    def transfer(self, views: Sequence[memoryview], start: int, writes: bool) -> None:
        """Read or write memory from a place in the file on. Raises MusterError."""
        call = os.pwrite if writes else _read_into
        try:
            for view in views:
                done = 0
                while done < len(view):
                    moved = call(self._fd, view[done:], start + done)
                    if not moved:
                        raise OSError(f"the file ends after {format_bytes(start + done)}")
                    done += moved
                start += len(view)
                self.moved_bytes += len(view)
        except OSError as error:
            raise self._failure("written" if writes else "read", error) from error

    def _failure(self, what: str, error: OSError) -> MusterError:
        return MusterError(
            f"{self.content} on disk can't be {what} in {self._folder}: {error.strerror or error}; make room"
            f" there, or leave {self._word} out of the plan, and the run goes on from its last checkpoint"
        )

    def close(self) -> None:
        """Give the disk space back."""
        self._thread.shutdown()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        with suppress(Exception):  # at the interpreter's end, or not fully open
            self.close()


class FileSlot:
    """A place in a file, and the checksum of what it holds."""

    def __init__(self, store: FileStore, start: int, size: int) -> None:
        self._store, self._start, self.size = store, start, size
        self._crc = 0

    def write(self, tensors: Sequence[Tensor]) -> None:
        """Write tensors one after another. Raises MusterError."""
        views = [_bytes_of(tensor) for tensor in tensors]
        self._crc = _checksum(views)
        self._store.transfer(views, self._start, writes=True)

    def read(self, tensors: Sequence[Tensor]) -> None:
        """Fill tensors of the same sizes with what was written. Raises MusterError, also where it has changed."""
        views = [_bytes_of(tensor) for tensor in tensors]
        self._store.transfer(views, self._start, writes=False)
        if _checksum(views) != self._crc:
            raise MusterError(
                f"{self._store.content} on disk isn't what was written there (its CRC-32 differs): look for errors of"
                " the disk, and let the run go on from its last checkpoint"
            )

    def free(self) -> None:
        """Let others have the place, once what has been submitted so far is done."""
        self._store.give_back(self)


def _checksum(views: Sequence[memoryview]) -> int:
    found = 0
    for view in views:
        found = crc32(view, found)
    return found


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor, which any dtype has."""
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def _read_into(fd: int, view: memoryview, start: int) -> int:
    return os.preadv(fd, [view], start)


def _unnamed_file(folder: Path) -> int:
    """Open a file without a name; on file systems that have none, a file whose name is removed at once."""
    if hasattr(os, "O_TMPFILE"):
        with suppress(OSError):
            return os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o600)
    fd, name = mkstemp(prefix=SCRATCH_PREFIX, dir=folder)
    os.unlink(name)
    return fd
