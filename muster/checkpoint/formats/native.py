"""Muster's own checkpoint format, read and written box by box without a run."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from muster.checkpoint.checkpoint_dir import find_file_damage
from muster.checkpoint.local_shard import dtype_name
from muster.checkpoint.manifest import StoredChunk, read_manifest
from muster.checkpoint.rank_file import MAX_CHUNK_BYTES, WriteItem, write_rank_file
from muster.checkpoint.read_plan import ReadItem, plan_reads
from muster.checkpoint.save import write_manifest
from muster.checkpoint.tensors import ArrayFile, TensorMeta, TensorSource, allocate, byte_view, split_into_boxes
from muster.layout.tensor_layout import Box, intersect, slices_within
from muster.spec.checksum import crc32
from muster.spec.errors import MusterError

CACHE_BYTES = MAX_CHUNK_BYTES
"""Size of the cache of chunks that were read last: enough for all strips of some rows."""


class NativeTensors:
    """Tensors of the checkpoint at `folder` (a `TensorSource`); every chunk is checked against its checksum.

    Raises ConfigError if there is no checkpoint.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest = read_manifest(folder)
        self.metas: Mapping[str, TensorMeta] = {
            name: TensorMeta(tensor.shape, getattr(torch, tensor.dtype))
            for name, tensor in self.manifest.tensors.items()
        }

        self._cache: dict[tuple[int, int], Tensor] = {}

    def read(self, name: str, box: Box) -> Tensor:
        # The last chunks are cached, since consecutive boxes often share a chunk.
        out = allocate(box.size, self.metas[name].dtype)
        for read in plan_reads(self.manifest, [(name, box)]):
            common = intersect(read.box, box)
            assert common is not None
            out[slices_within(common, box)] = self._read_chunk(name, read)[slices_within(common, read.box)]
        return out

    def _read_chunk(self, name: str, read: ReadItem) -> Tensor:
        key = (read.file, read.offset)
        if key not in self._cache:
            while sum(cached.nbytes for cached in self._cache.values()) + read.nbytes > CACHE_BYTES and self._cache:
                del self._cache[next(iter(self._cache))]
            path = self.folder / self.manifest.file_names[read.file]
            if problem := find_file_damage(path, self.manifest.files[path.name]):
                raise MusterError(problem)
            meta = TensorMeta(read.box.size, self.metas[name].dtype)
            data = ArrayFile(path).read_box(read.offset, meta, meta.whole)
            if crc32(byte_view(data)) != read.crc32:
                raise MusterError(f"{path} is damaged: the checksum of {name} is wrong")
            self._cache[key] = data
        return self._cache[key]

    def find_chunk_damage(self, name: str, chunk: StoredChunk) -> str | None:
        """Return a message about a damaged chunk; None if its checksum is right."""
        try:
            self.read(name, chunk.box)
        except MusterError as error:
            return str(error)
        return None


def write_checkpoint(
    folder: Path,
    tensors: TensorSource,
    step: int,
    info: Mapping[str, Any],
    max_file_bytes: int,
    progress: Callable[[int], None],
) -> None:
    """Write a checkpoint of all tensors into `folder`, in files of about `max_file_bytes`.

    `info` is that of `muster.checkpoint.save.save`. One box of at most MAX_CHUNK_BYTES is in memory at a time;
    `progress` receives the bytes of each. Raises OSError, or what reading a tensor raises.
    """
    number = 0
    for number, parts in enumerate(_plan_files(tensors.metas, max_file_bytes), start=1):
        write_rank_file(folder, number - 1, parts, _item_buffers(tensors, parts, progress))
    write_manifest(folder, step, info, number)


def _item_buffers(
    tensors: TensorSource, items: list[WriteItem], progress: Callable[[int], None]
) -> Iterator[memoryview]:
    for part in items:
        found = tensors.read(part.name, part.box).contiguous()
        yield byte_view(found)
        progress(found.nbytes)


def _plan_files(metas: Mapping[str, TensorMeta], max_bytes: int) -> Iterator[list[WriteItem]]:
    """Yield the items of each file, wide dtypes first, so that every box is aligned."""
    parts: list[WriteItem] = []
    held = 0
    for name, meta in sorted(metas.items(), key=lambda item: -item[1].dtype.itemsize):
        dtype = dtype_name(torch.empty(0, dtype=meta.dtype))
        for index, box in enumerate(split_into_boxes(meta, MAX_CHUNK_BYTES)):
            if held > max_bytes:
                yield parts
                parts, held = [], 0
            parts.append(WriteItem(name, f"{name}#{index}" if index else name, meta.shape, dtype, box))
            held += parts[-1].nbytes
    yield parts
