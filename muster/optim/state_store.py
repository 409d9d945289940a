"""Store of optimizer state on disk: one file for each rank, in which each part of the state has its place.

The file has no name: it is unlinked as soon as it is open, so that whatever ends the process, the system frees the
disk. It is scratch memory, not a checkpoint: a run that was killed goes on from its last checkpoint, which has all
state. Space is allocated before training, so that a disk that is too small is known then. Each part is a run of tensors
without gaps, from a multiple of 4,096 bytes on, and has a CRC-32 that is compared whenever it is read.
"""

import ctypes
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from tempfile import gettempdir, mkstemp

from torch import Tensor

from muster.spec.checksum import crc32
from muster.spec.errors import MusterError
from muster.spec.formatting import format_bytes

_ALIGNMENT = 4096


class StateStore:
    """One rank's file. A thread reads and writes, in the order of the requests, beside the rank's own."""

    def __init__(self, folder: Path | None) -> None:
        """Open a file in a folder, which is made where it doesn't exist; None: in the system's for temporary files."""
        self._folder = folder or Path(gettempdir())
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._fd = _unnamed_file(self._folder)
        except OSError as error:
            raise self._failure("opened", error) from error
        self._thread = ThreadPoolExecutor(1, "state-store")
        self.num_bytes = 0
        """Bytes of all parts."""
        self.moved_bytes = 0
        """Bytes read and written so far."""

    def allocate(self, tensors: Sequence[Tensor]) -> "StoredPart":
        """Make a place for a part. Raises MusterError where the disk has no room."""
        size = sum(tensor.nbytes for tensor in tensors)
        start = -(-self.num_bytes // _ALIGNMENT) * _ALIGNMENT
        try:
            if size:
                os.posix_fallocate(self._fd, start, size)
        except OSError as error:
            raise self._failure(f"given {format_bytes(start + size)}", error) from error
        self.num_bytes = start + size
        return StoredPart(self, start, tensors)

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
            f"the optimizer's state on disk can't be {what} in {self._folder}: {error.strerror or error}; make room"
            " there, or leave ooptd out of the plan, and the run goes on from its last checkpoint"
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


class StoredPart:
    """Tensors that lie either in memory or in the store.

    Each keeps its identity and gets other memory: a storage that numpy has seen can't be resized.
    """

    def __init__(self, store: StateStore, start: int, tensors: Sequence[Tensor]) -> None:
        self._store, self._start, self._tensors = store, start, tensors
        self._shapes = [tensor.shape for tensor in tensors]
        self._crc = 0
        self._is_in_memory = True
        self.is_changed = True
        """True if memory holds other values than the file."""

    def read(self) -> Callable[[], None]:
        """Start to bring the tensors into memory; the returned function waits for the end."""
        if self._is_in_memory:
            return lambda: None
        for tensor, shape in zip(self._tensors, self._shapes, strict=True):
            tensor.data = tensor.new_empty(shape)
        self._is_in_memory, self.is_changed = True, False
        return self._store.submit(self._read)

    def write(self) -> Callable[[], None]:
        """Start to write the tensors where they have changed; the returned function waits for the end and frees their
        memory."""
        wait = self._store.submit(self._write) if self.is_changed else lambda: None

        def finish() -> None:
            wait()
            for tensor in self._tensors:
                tensor.data = tensor.new_empty(0)
            self._is_in_memory = self.is_changed = False

        return finish

    def _read(self) -> None:
        views = [_bytes_of(tensor) for tensor in self._tensors]
        self._store.transfer(views, self._start, writes=False)
        if _checksum(views) != self._crc:
            raise MusterError(
                "the optimizer's state on disk isn't what was written there (its CRC-32 differs): look for errors of"
                " the disk, and let the run go on from its last checkpoint"
            )

    def _write(self) -> None:
        views = [_bytes_of(tensor) for tensor in self._tensors]
        self._crc = _checksum(views)
        self._store.transfer(views, self._start, writes=True)


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
    fd, name = mkstemp(prefix="optimizer-state-", dir=folder)
    os.unlink(name)
    return fd
