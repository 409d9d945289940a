"""What a rank has to read: derived from the manifest and the boxes it wants, nothing else; free of torch.

A piece is read whole or not at all, since its checksum is that of the whole; pieces that follow each other in a file
are read together.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from muster.checkpoint.dtypes import item_bytes
from muster.checkpoint.manifest import StoredTensor, TensorIndex
from muster.layout.tensor_layout import Box
from muster.spec.errors import MusterError

MAX_READ_BYTES = 8 << 20
"""The largest single read: while it is checked, the next is on its way."""


@dataclass(frozen=True, slots=True)
class ReadItem:
    """A stored piece that holds some of what is wanted."""

    file: int
    """Its place in the manifest's list of files."""
    offset: int
    nbytes: int
    crc32: int
    box: Box
    """Of the whole tensor."""
    target_index: int
    """Which of the wanted boxes it is for."""


def plan_reads(manifest: TensorIndex, wanted: Sequence[tuple[str, Box]]) -> list[ReadItem]:
    """What to read for the wanted (tensor, box) pairs, in the order in which it lies in the files.

    Raises MusterError when the pieces don't hold all of a box. The tensors must be in the manifest.
    """
    reads: list[ReadItem] = []
    for index, (name, box) in enumerate(wanted):
        tensor = manifest.tensors[name]
        size, held = item_bytes(tensor.dtype), 0
        for number, common in _overlapping_chunks(tensor, box):
            held += common
            piece = tensor.chunk_box(number)
            place = (tensor.files[number], tensor.offsets[number], piece.numel * size, tensor.crc32[number])
            reads.append(ReadItem(*place, piece, index))
        if held != box.numel:
            raise MusterError(f"the checkpoint holds only {held} of {box.numel} wanted numbers of {name}")
    return sorted(reads, key=lambda read: (read.file, read.offset))


def coalesce_reads(reads: Iterable[ReadItem]) -> list[list[ReadItem]]:
    """Reads, sorted by place, in groups that lie side by side in one file, RUN_BYTES at most or one read each."""
    found: list[list[ReadItem]] = []
    end, total = None, 0
    for read in reads:
        if end != (read.file, read.offset) or total + read.nbytes > MAX_READ_BYTES:
            found.append([])
            total = 0
        found[-1].append(read)
        end, total = (read.file, read.offset + read.nbytes), total + read.nbytes
    return found


def _overlapping_chunks(tensor: StoredTensor, box: Box) -> list[tuple[int, int]]:
    """The pieces that overlap a box, each with how many numbers of the box it holds."""
    start, size = np.array(box.start, dtype=np.int64), np.array(box.size, dtype=np.int64)
    begin, end = (
        np.maximum(tensor.chunk_starts, start),
        np.minimum(tensor.chunk_starts + tensor.chunk_sizes, start + size),
    )
    common = np.clip(end - begin, 0, None).prod(axis=1)
    (numbers,) = np.nonzero(common)
    return list(zip(numbers.tolist(), common[numbers].tolist(), strict=True))
