"""Which bytes of a rank's tensors it writes, where in its file they lie, and how they get there; free of torch.

A rank's file is a safetensors file with a tensor for each box that the rank writes. The manifest points to pieces of
at most BLOCK_BYTES, each with a checksum of its own, so that whoever needs a part of a box reads and checks little
more than that part.
"""

import json
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from pathlib import Path

from muster.checkpoint.dtypes import SAFETENSORS_NAMES, item_bytes
from muster.checkpoint.manifest import StoredTensor, TensorIndex, dump_manifest
from muster.layout.tensor_layout import Box, TensorLayout, chunk_bounds
from muster.spec.checksum import crc32
from muster.spec.errors import MusterError

MAX_CHUNK_BYTES = 4 << 20
"""The largest piece. A rank that needs one byte of a piece reads it all, for the checksum's sake."""
WRITEBACK_BYTES = 16 << 20
"""After so many the disk is asked to begin, so that not all is left to the end."""
MIN_SPLIT_BYTES = 1 << 16
"""Boxes smaller than this are written whole by one of the ranks that hold them; larger ones are cut among them."""
NUM_COLUMN_STRIPS = 16
"""Strips of columns that make up a matrix which tensor parallelism cuts by columns."""
MIN_STRIP_BYTES = 256 << 10
"""Boxes are cut into fewer strips where they would be smaller than this."""


@dataclass(frozen=True, slots=True)
class WriteItem:
    """A box that a rank writes, of the tensor `name` of the whole model."""

    name: str
    key: str
    """In the safetensors file."""
    shape: tuple[int, ...]
    dtype: str
    box: Box

    @property
    def nbytes(self) -> int:
        return self.box.numel * item_bytes(self.dtype)


def local_share(layout: TensorLayout, box: Box, dtype: str) -> Box | None:
    """What of a box that several ranks hold this one writes: some of its rows, or all, or nothing (None).

    All ranks that hold the box come to the same division without a word.
    """
    if not box.numel or layout.copy_index >= layout.num_writers:
        return None
    if layout.num_writers == 1:
        return box
    if box.numel * item_bytes(dtype) < MIN_SPLIT_BYTES or box.size[0] < layout.num_writers:
        return box if crc32(layout.name.encode()) % layout.num_writers == layout.copy_index else None
    first, rows = chunk_bounds(box.size[0], layout.num_writers, layout.copy_index)
    if not rows:
        return None
    return Box((box.start[0] + first, *box.start[1:]), (rows, *box.size[1:]))


def column_strips(layout: TensorLayout, box: Box, dtype: str) -> list[Box]:
    """A box as it is laid out in the file: by columns first where other plans would want some of its columns only.

    The cuts are those of the whole tensor into STRIPS, or every second, fourth, … of them.
    """
    if layout.tp_dim != 1 or len(box.size) != 2:
        return [box]
    columns, first, end = layout.shape[1], box.start[1], box.start[1] + box.size[1]
    strips = NUM_COLUMN_STRIPS
    while strips > 1 and box.numel * item_bytes(dtype) * columns < MIN_STRIP_BYTES * strips * box.size[1]:
        strips //= 2
    inner = {columns * i // strips for i in range(1, strips)}
    cuts = [first, *sorted(at for at in inner if first < at < end), end]
    pairs = zip(cuts, cuts[1:], strict=False)
    return [Box((box.start[0], a), (box.size[0], b - a)) for a, b in pairs]


def sort_for_file(items: Iterable[WriteItem]) -> list[WriteItem]:
    """Wide types first, so that every tensor in the file is aligned and can be mapped into memory."""
    return sorted(items, key=lambda part: -item_bytes(part.dtype))


def write_rank_file(folder: Path, rank: int, items: Sequence[WriteItem], data: Iterable[memoryview]) -> None:
    """Writes this rank's tensor file (none when it has nothing to write), durably, and the list of what is in it.

    `parts` are in file order, and `data` gives the bytes of each in turn.
    """
    name = rank_file_name(rank)
    rows: dict[str, _ChunkTable] = {}
    files = {}
    if items:
        head = _header(items)
        with open(folder / name, "wb", buffering=0) as out, ThreadPoolExecutor(1) as pool:
            _write_all(out.fileno(), head)
            offset = pushed = len(head)
            for part, numbers in zip(items, data, strict=True):
                columns = rows.setdefault(part.name, _ChunkTable(part))
                for piece in split_into_chunks(part):
                    block = numbers[: piece.numel * item_bytes(part.dtype)]
                    numbers = numbers[len(block) :]
                    columns.add(offset, pool.submit(crc32, block), piece)
                    _write_all(out.fileno(), block)
                    offset += len(block)
                    if offset - pushed >= WRITEBACK_BYTES:
                        _start_writeback(out.fileno(), pushed, offset - pushed)
                        pushed = offset
            os.fsync(out.fileno())
        files = {name: offset}
    listed = TensorIndex(files=files, tensors={name: columns.finish() for name, columns in rows.items()})
    rank_index_path(folder, rank).write_text(dump_manifest(listed))  # read once, and gone when the checkpoint is


def rank_file_name(rank: int) -> str:
    """Of a rank's tensors."""
    return f"rank-{rank:05}.safetensors"


def rank_index_path(folder: Path, rank: int) -> Path:
    """Where a rank says what it wrote, until the manifest does."""
    return folder / f"rank-{rank:05}.json"


def split_into_chunks(item: WriteItem) -> Iterable[Box]:
    """A box cut by rows into pieces, in the order in which they lie in the file.

    So many rows go into one as BLOCK_BYTES hold of the whole tensor: the pieces of all strips of these rows together
    aren't larger.
    """
    box, row_bytes = item.box, prod(item.shape[1:]) * item_bytes(item.dtype)
    if not box.size or box.size[0] * row_bytes <= MAX_CHUNK_BYTES:
        yield box
        return
    step = max(1, MAX_CHUNK_BYTES // row_bytes)
    for first in range(0, box.size[0], step):
        yield Box(
            (box.start[0] + first, *box.start[1:]),
            (min(step, box.size[0] - first), *box.size[1:]),
        )


class _ChunkTable:
    """The pieces of one tensor as they are written."""

    def __init__(self, item: WriteItem) -> None:
        self._item = item
        self._rows: list[tuple[int, Future[int], Box]] = []

    def add(self, offset: int, crc32: "Future[int]", box: Box) -> None:
        self._rows.append((offset, crc32, box))

    def finish(self) -> StoredTensor:
        dims = range(len(self._item.shape))
        return StoredTensor(
            shape=self._item.shape,
            dtype=self._item.dtype,
            files=(0,) * len(self._rows),
            offsets=tuple(offset for offset, _, _ in self._rows),
            crc32=tuple(crc32.result() for _, crc32, _ in self._rows),
            starts=tuple(tuple(box.start[dim] for _, _, box in self._rows) for dim in dims),
            sizes=tuple(tuple(box.size[dim] for _, _, box in self._rows) for dim in dims),
        )


def _header(items: Sequence[WriteItem]) -> bytes:
    """The start of a safetensors file that holds `parts` in this order."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for part in items:
        start, end = end, end + part.nbytes
        entries[part.key] = {
            "dtype": SAFETENSORS_NAMES[part.dtype],
            "shape": list(part.box.size),
            "data_offsets": [start, end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write_all(fd: int, data: bytes | memoryview) -> None:
    """Writes all of `data`: one call may take less."""
    rest = memoryview(data)
    while rest:
        if not (count := os.write(fd, rest)):
            raise MusterError("a write took no byte")
        rest = rest[count:]


def _start_writeback(fd: int, start: int, count: int) -> None:
    """Lets the kernel write these bytes to the disk while others are made: Linux does so when told that they are not
    needed in memory."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, start, count, os.POSIX_FADV_DONTNEED)
