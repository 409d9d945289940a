"""The tensors of a Muster checkpoint, read and written box by box."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from muster.checkpoint.folder import file_problem
from muster.checkpoint.manifest import StoredPiece, read_manifest
from muster.checkpoint.piece import dtype_name
from muster.checkpoint.reads import Read, plan_reads
from muster.checkpoint.save import write_manifest
from muster.checkpoint.tensors import ByteFile, Kind, Tensors, bytes_of, chunks, empty
from muster.checkpoint.write import BLOCK_BYTES, Part, write_file
from muster.spec.checksum import crc32
from muster.spec.errors import MusterError
from muster.spec.layout import Box, overlap, within

KEPT_BYTES = BLOCK_BYTES
"""Of the pieces that were read last: all strips of some rows."""


class StoredTensors:
    """The tensors of the checkpoint at `folder` (`Tensors`); whatever is read is checked against its checksum.

    Raises ConfigError where there is no checkpoint.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.manifest = folder, read_manifest(folder)
        self.kinds: Mapping[str, Kind] = {
            name: Kind(tensor.shape, getattr(torch, tensor.dtype)) for name, tensor in self.manifest.tensors.items()
        }

        self._last: dict[tuple[int, int], Tensor] = {}

    def read(self, name: str, box: Box) -> Tensor:
        # One piece at a time, and the last ones kept: boxes that don't end where pieces do mostly follow one another.
        out = empty(box.size, self.kinds[name].dtype)
        for read in plan_reads(self.manifest, [(name, box)]):
            common = overlap(read.box, box)
            assert common is not None
            out[within(common, box)] = self._piece(name, read)[within(common, read.box)]
        return out

    def _piece(self, name: str, read: Read) -> Tensor:
        place = (read.file, read.offset)
        if place not in self._last:
            while sum(kept.nbytes for kept in self._last.values()) + read.nbytes > KEPT_BYTES and self._last:
                del self._last[next(iter(self._last))]
            path, kind = self.folder / self.manifest.file_names[read.file], self.kinds[name]
            if problem := file_problem(path, self.manifest.files[path.name]):
                raise MusterError(problem)
            data = ByteFile(path).read_box(read.offset, kind := Kind(read.box.size, kind.dtype), kind.whole)
            if crc32(bytes_of(data)) != read.crc32:
                raise MusterError(f"{path} is damaged: the checksum of {name} is wrong")
            self._last[place] = data
        return self._last[place]

    def piece_problem(self, name: str, piece: StoredPiece) -> str | None:
        """Why the bytes of a piece aren't those that were written; None when its checksum is right."""
        try:
            self.read(name, piece.box)
        except MusterError as error:
            return str(error)
        return None


def write_checkpoint(
    folder: Path,
    tensors: Tensors,
    step: int,
    info: Mapping[str, Any],
    max_file_bytes: int,
    progress: Callable[[int], None],
) -> None:
    """Writes a checkpoint of all tensors into `folder`, in files of about `max_file_bytes`.

    `info` is that of `muster.checkpoint.save.save`. A box of BLOCK_BYTES is in memory at a time; `progress` receives
    the bytes of each. Raises OSError, or what reading a tensor raises.
    """
    number = 0
    for number, parts in enumerate(_files(tensors.kinds, max_file_bytes), start=1):
        write_file(folder, number - 1, parts, _numbers(tensors, parts, progress))
    write_manifest(folder, step, info, number)


def _numbers(tensors: Tensors, parts: list[Part], progress: Callable[[int], None]) -> Iterator[memoryview]:
    for part in parts:
        found = tensors.read(part.name, part.box).contiguous()
        yield bytes_of(found)
        progress(found.nbytes)


def _files(kinds: Mapping[str, Kind], max_bytes: int) -> Iterator[list[Part]]:
    """What goes into each file; wide types first, so that every box is aligned."""
    parts: list[Part] = []
    held = 0
    for name, kind in sorted(kinds.items(), key=lambda item: -item[1].dtype.itemsize):
        dtype = dtype_name(torch.empty(0, dtype=kind.dtype))
        for index, box in enumerate(chunks(kind, BLOCK_BYTES)):
            if held > max_bytes:
                yield parts
                parts, held = [], 0
            parts.append(Part(name, f"{name}#{index}" if index else name, kind.shape, dtype, box))
            held += parts[-1].nbytes
    yield parts
