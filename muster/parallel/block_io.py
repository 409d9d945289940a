"""Reads and writes of long runs of bytes, past the page cache, by several threads.

A drive reaches its rate only with several requests at once, and copies through the page cache cost as much of a core as
the drive's transfer. So each thread moves blocks between a file opened with O_DIRECT and an aligned buffer of its own,
and copies and checks them there, while they are in the core's cache and other blocks are under way. Where a file
system has no direct I/O the same goes through the page cache.
"""

import ctypes
import fcntl
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from mmap import mmap
from queue import SimpleQueue

from muster.spec.checksum import crc32
from muster.spec.formatting import format_bytes

ALIGNMENT = 4096
"""Bytes of which places, lengths and addresses of direct I/O are multiples."""
BLOCK_BYTES = 1 << 22
NUM_THREADS = 4
"""Requests under way at once."""

_Piece = tuple[memoryview, int, int]
"""Memory, with the begin and the end of a part of it."""


def use_direct_io(fd: int) -> None:
    """Let reads and writes of a file bypass the page cache, where its file system can."""
    with suppress(AttributeError, OSError):
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)


class BlockIo:
    """Threads with a buffer each."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(NUM_THREADS, "block-io")
        self._buffers: SimpleQueue[mmap] = SimpleQueue()
        self._num_buffers = 0

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown()

    def write(self, fd: int, views: Sequence[memoryview], start: int) -> list[int]:
        """Write memory one after another from a place in a file on, a multiple of `ALIGNMENT`, and up to the next one;
        return the CRC-32 of each block. Raises OSError."""

        def write(buffer: mmap, pieces: Sequence[_Piece], place: int) -> int:
            done = 0
            for view, begin, end in pieces:
                _copy(buffer, done, view, begin, end - begin)
                done += end - begin
            size = _padded(done)
            with memoryview(buffer) as own:
                moved = 0
                while moved < size:
                    moved += os.pwrite(fd, own[moved:size], place + moved)
                return crc32(own[:done])

        return self._for_each_block(views, start, write)

    def read(self, fd: int, views: Sequence[memoryview], start: int) -> list[int]:
        """Fill memory with what `write` has put there; return the CRC-32 of each block as it is now. Raises OSError."""

        def read(buffer: mmap, pieces: Sequence[_Piece], place: int) -> int:
            size = sum(end - begin for _, begin, end in pieces)
            with memoryview(buffer) as own:
                moved = 0
                while moved < size:
                    got = os.preadv(fd, [own[moved : _padded(size)]], place + moved)
                    if not got:
                        raise OSError(f"the file ends after {format_bytes(place + moved)}")
                    moved += got
                found = crc32(own[:size])
            done = 0
            for view, begin, end in pieces:
                _copy(view, begin, buffer, done, end - begin)
                done += end - begin
            return found

        return self._for_each_block(views, start, read)

    def _for_each_block(
        self, views: Sequence[memoryview], start: int, move: Callable[[mmap, Sequence[_Piece], int], int]
    ) -> list[int]:
        blocks = list(_blocks(views))

        def work(number: int) -> int:
            buffer = self._buffers.get()
            try:
                return move(buffer, blocks[number], start + number * BLOCK_BYTES)
            finally:
                self._buffers.put(buffer)

        while self._num_buffers < min(len(blocks), NUM_THREADS):
            self._buffers.put(mmap(-1, BLOCK_BYTES))
            self._num_buffers += 1
        if len(blocks) == 1:
            return [work(0)]
        return list(self._threads.map(work, range(len(blocks))))


def _blocks(views: Sequence[memoryview]) -> Iterator[list[_Piece]]:
    """Yield the pieces of memory that make up each block."""
    block: list[_Piece] = []
    room = BLOCK_BYTES
    for view in views:
        begin = 0
        while begin < len(view):
            end = min(len(view), begin + room)
            block.append((view, begin, end))
            room -= end - begin
            begin = end
            if not room:
                yield block
                block, room = [], BLOCK_BYTES
    if block:
        yield block


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _copy(target: memoryview | mmap, at: int, source: memoryview | mmap, begin: int, size: int) -> None:
    """Copy bytes while other threads run, which they don't beside an assignment of slices."""
    ctypes.memmove(_address(target) + at, _address(source) + begin, size)


def _address(memory: memoryview | mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
