"""Read plan of a rank: the chunks of a checkpoint that hold the boxes it wants; free of torch.

It follows from the manifest and the wanted boxes alone. A chunk is read as a whole or not at all, since its checksum
covers the whole; chunks that are adjacent in a file are read in one call.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from muster.checkpoint.dtypes import item_bytes
from muster.checkpoint.manifest import StoredTensor, TensorIndex
from muster.layout.tensor_layout import Box
from muster.spec.errors import MusterError

MAX_READ_BYTES = 8 << 20
"""Largest coalesced read. While its checksums are computed, the next one is under way."""


@dataclass(frozen=True, slots=True)
class ReadItem:
    """Stored chunk that overlaps a wanted box."""

    file: int
    """Index into the manifest's list of files."""
    offset: int
    nbytes: int
    crc32: int
    box: Box
    """Box of the global tensor that the chunk holds."""
    target_index: int
    """Index of the wanted box that it is read for."""


def plan_reads(manifest: TensorIndex, wanted: Sequence[tuple[str, Box]]) -> list[ReadItem]:
    """Return the chunks to read for the wanted (tensor, box) pairs, in the order of the files.

    Raises MusterError if the chunks don't cover a box. The tensors must be in the manifest.
    """
    reads: list[ReadItem] = []
    for index, (name, box) in enumerate(wanted):
        tensor = manifest.tensors[name]
        covered = 0
        for number, common in _overlapping_chunks(tensor, box):
            covered += common
            chunk = tensor.chunk_box(number)
            nbytes = chunk.numel * item_bytes(tensor.dtype)
            reads.append(
                ReadItem(tensor.files[number], tensor.offsets[number], nbytes, tensor.crc32[number], chunk, index)
            )
        if covered != box.numel:
            raise MusterError(f"the checkpoint holds only {covered} of {box.numel} wanted elements of {name}")
    return sorted(reads, key=lambda read: (read.file, read.offset))


def coalesce_reads(reads: Iterable[ReadItem]) -> list[list[ReadItem]]:
    """Group sorted reads that are adjacent in a file, each group of one read or at most MAX_READ_BYTES."""
    groups: list[list[ReadItem]] = []
    end: tuple[int, int] | None = None
    total_bytes = 0
    for read in reads:
        if end != (read.file, read.offset) or total_bytes + read.nbytes > MAX_READ_BYTES:
            groups.append([])
            total_bytes = 0
        groups[-1].append(read)
        end = (read.file, read.offset + read.nbytes)
        total_bytes += read.nbytes
    return groups


def _overlapping_chunks(tensor: StoredTensor, box: Box) -> list[tuple[int, int]]:
    """Return the chunks that overlap a box, each with the number of the box's elements that it holds."""
    start, size = np.array(box.start, dtype=np.int64), np.array(box.size, dtype=np.int64)
    begin, end = (
        np.maximum(tensor.chunk_starts, start),
        np.minimum(tensor.chunk_starts + tensor.chunk_sizes, start + size),
    )
    common = np.clip(end - begin, 0, None).prod(axis=1)
    (numbers,) = np.nonzero(common)
    return list(zip(numbers.tolist(), common[numbers].tolist(), strict=True))
