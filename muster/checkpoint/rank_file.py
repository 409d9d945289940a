"""Tensor file of one rank: the boxes that it writes, their layout in the file, and writing them; free of torch.

It is a safetensors file with a tensor for each box that the rank writes. The manifest refers to chunks of at most
MAX_CHUNK_BYTES, each with its own checksum, so that a reader of part of a box reads and verifies little more than that.
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
"""Largest chunk. A rank that needs one byte of a chunk reads all of it, for its checksum."""
WRITEBACK_BYTES = 16 << 20
"""Interval at which writeback to the disk is started, so that not everything is left to the final fsync."""
MIN_SPLIT_BYTES = 1 << 16
"""Smallest box that the ranks holding it divide among themselves; a smaller one is written whole by one of them."""
NUM_COLUMN_STRIPS = 16
"""Strips of columns that make up a matrix which tensor parallelism cuts by columns."""
MIN_STRIP_BYTES = 256 << 10
"""Smallest strip; a box is cut into fewer strips rather than smaller ones."""


@dataclass(frozen=True, slots=True)
class WriteItem:
    """Box of the global tensor `name` that a rank writes."""

    name: str
    key: str
    """Name in the safetensors file."""
    shape: tuple[int, ...]
    dtype: str
    box: Box

    @property
    def nbytes(self) -> int:
        return self.box.numel * item_bytes(self.dtype)


def local_share(layout: TensorLayout, box: Box, dtype: str) -> Box | None:
    """Return the part that this rank writes of a box held by several: some rows, all, or nothing (None).

    All ranks that hold the box arrive at the same division without communication.
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
    """Return a box as it is laid out in the file: as strips of columns where another plan may read only some columns.

    The cuts are those of the whole tensor into NUM_COLUMN_STRIPS, or every second, fourth, … of them.
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
    """Sort items by dtype, wide ones first, so that every tensor in the file is aligned and can be memory-mapped."""
    return sorted(items, key=lambda item: -item_bytes(item.dtype))


def write_rank_file(folder: Path, rank: int, items: Sequence[WriteItem], data: Iterable[memoryview]) -> None:
    """Write this rank's tensor file, durably, and its index; a rank with nothing to write has only an index.

    `items` are in file order, and `data` gives the bytes of each in turn. Checksums are computed in a thread, while the
    chunk is written.
    """
    name = rank_file_name(rank)
    tables: dict[str, _ChunkTable] = {}
    files = {}
    if items:
        header = _header(items)
        with open(folder / name, "wb", buffering=0) as out, ThreadPoolExecutor(1) as pool:
            _write_all(out.fileno(), header)
            offset = len(header)
            pushed = offset
            for item, item_data in zip(items, data, strict=True):
                table = tables.setdefault(item.name, _ChunkTable(item))
                start = 0
                for box in split_into_chunks(item):
                    chunk = item_data[start : start + box.numel * item_bytes(item.dtype)]
                    start += len(chunk)
                    table.add(offset, pool.submit(crc32, chunk), box)
                    _write_all(out.fileno(), chunk)
                    offset += len(chunk)
                    if offset - pushed >= WRITEBACK_BYTES:
                        _start_writeback(out.fileno(), pushed, offset - pushed)
                        pushed = offset
            os.fsync(out.fileno())
        files = {name: offset}
    index = TensorIndex(files=files, tensors={name: table.finish() for name, table in tables.items()})
    rank_index_path(folder, rank).write_text(dump_manifest(index))  # not durable: merged before the checkpoint appears


def rank_file_name(rank: int) -> str:
    """Return the name of a rank's tensor file."""
    return f"rank-{rank:05}.safetensors"


def rank_index_path(folder: Path, rank: int) -> Path:
    """Return the path of the index of a rank's file, which exists until it is merged in the manifest."""
    return folder / f"rank-{rank:05}.json"


def split_into_chunks(item: WriteItem) -> Iterable[Box]:
    """Yield a box cut by rows into chunks, in the order of the file.

    A chunk has as many rows as MAX_CHUNK_BYTES hold of the whole tensor. So the chunks of these rows in all strips of
    columns together are no larger than that.
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
    """Table of the chunks of one tensor as they are written."""

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
    """Return the start of a safetensors file that holds `items` in this order."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for item in items:
        start, end = end, end + item.nbytes
        entries[item.key] = {
            "dtype": SAFETENSORS_NAMES[item.dtype],
            "shape": list(item.box.size),
            "data_offsets": [start, end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write_all(fd: int, data: bytes | memoryview) -> None:
    """Write all of `data`; a single call may write less."""
    rest = memoryview(data)
    while rest:
        if not (count := os.write(fd, rest)):
            raise MusterError("a write took no byte")
        rest = rest[count:]


def _start_writeback(fd: int, start: int, count: int) -> None:
    """Start writeback of these bytes: Linux does so when advised that they are not needed in memory."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, start, count, os.POSIX_FADV_DONTNEED)
