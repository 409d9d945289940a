"""Loading under any plan: every rank reads, of whatever pieces were written, those that hold what it needs."""

import difflib
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from muster.checkpoint.checkpoint_dir import find_file_damage
from muster.checkpoint.local_shard import LocalShard, dtype_name
from muster.checkpoint.manifest import Manifest, StoredTensor, read_manifest
from muster.checkpoint.read_plan import ReadItem, coalesce_reads, plan_reads
from muster.layout.tensor_layout import Box, TensorLayout, intersect, slices_within
from muster.spec.checksum import crc32
from muster.spec.errors import ConfigError, MusterError

READ_THREADS = 2
"""Runs that are read at once: while one waits for the disk, the checksums of another are taken."""


def load(folder: Path, shards: Sequence[LocalShard], convert: bool = False) -> Manifest:
    """Fills the local tensor of every wanted piece from the checkpoint at `folder`, and returns its manifest.

    Whatever is read is checked against its crc32. Stored and wanted dtypes must be equal unless `convert`. Raises
    ConfigError when the checkpoint holds other tensors than wanted, MusterError when it is damaged; tensors may then
    be partly filled.
    """
    manifest = read_manifest(folder)
    fill_shards(folder, manifest, shards, convert)
    return manifest


def fill_shards(
    folder: Path,
    manifest: Manifest,
    shards: Sequence[LocalShard],
    convert: bool = False,
    files: "CheckpointFiles | None" = None,
) -> None:
    """As `load`, where the manifest has been read already, and the `files` may lie elsewhere."""
    for piece in shards:
        _require_matching(folder, manifest, piece, convert)
    goals = [_ReadTarget(piece.name, box, tensor) for piece in shards for box, tensor in piece.box_views()]
    reads = plan_reads(manifest, [(goal.name, goal.box) for goal in goals])
    files = files or CheckpointFiles(folder, manifest)
    with ThreadPoolExecutor(READ_THREADS) as pool:
        for _ in pool.map(lambda run: _read_contiguous(files, run, goals), coalesce_reads(reads)):
            pass


def read_full(folder: Path, name: str, manifest: Manifest | None = None) -> Tensor:
    """One whole tensor of the checkpoint at `folder`, with the dtype it was stored in."""
    manifest = manifest or read_manifest(folder)
    shape = _stored_tensor(folder, manifest, name).shape
    return read_box(folder, manifest, name, Box((0,) * len(shape), shape))


def read_box(folder: Path, manifest: Manifest, name: str, box: Box) -> Tensor:
    """One box of a tensor of the checkpoint at `folder`, with the dtype it was stored in."""
    stored = _stored_tensor(folder, manifest, name)
    tensor = torch.empty(box.size, dtype=getattr(torch, stored.dtype))
    fill_shards(folder, manifest, [LocalShard(name, TensorLayout(name, stored.shape, (box,)), tensor)])
    return tensor


class _ReadTarget:
    """A wanted box and the tensor of its size that it goes into."""

    def __init__(self, name: str, box: Box, into: Tensor) -> None:
        self.name, self.box, self._into = name, box, into

    def direct_buffer(self, read: ReadItem, dtype: str) -> Tensor | None:
        """The bytes of the tensor that a piece can be read into as it lies on disk; None where it can't."""
        if (
            intersect(read.box, self.box) != read.box
            or dtype_name(self._into) != dtype
            or self._into.device.type != "cpu"
        ):
            return None
        part = self._into[slices_within(read.box, self.box)]
        return part.view(-1).view(torch.uint8) if part.is_contiguous() else None

    def copy_from(self, read: ReadItem, data: Tensor, dtype: str) -> None:
        """Copies what is wanted of a piece's bytes."""
        common = intersect(read.box, self.box)
        assert common is not None
        piece = data.view(getattr(torch, dtype)).view(read.box.size)
        self._into[slices_within(common, self.box)].copy_(piece[slices_within(common, read.box)])


class _ThreadBuffers(threading.local):
    """Memory of each thread's own for what can't be read to its place; used again from run to run."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def allocate(self, sizes: Sequence[int]) -> Iterator[Tensor]:
        """A buffer for each of so many bytes; the former ones are given up."""
        ends = list(accumulate((size + -size % _ALIGN_BYTES for size in sizes), initial=0))
        if self._memory.numel() < ends[-1]:
            self._memory = torch.empty(ends[-1], dtype=torch.uint8)
        memory = self._memory
        return (memory[start : start + size] for start, size in zip(ends, sizes, strict=False))


_ALIGN_BYTES = 16
"""Bytes at whose multiples numbers of every type may begin."""


class CheckpointFiles:
    """The tensor files of a checkpoint. Each is opened for a run and closed again: there may be very many."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._folder, self._manifest = folder, manifest
        self.buffers = _ThreadBuffers()
        self._checked: set[int] = set()

    def path(self, number: int) -> Path:
        return self._folder / self._manifest.file_names[number]

    def dtype_of(self, goal: _ReadTarget) -> str:
        return self._manifest.tensors[goal.name].dtype

    def read(self, number: int, offset: int, buffers: list[memoryview], name: str) -> None:
        """Fills the buffers one after the other from `offset` on; `name` is what they are for."""
        path = self.path(number)
        problem = None if number in self._checked else find_file_damage(path, self._manifest.files[path.name])
        self._checked.add(number)
        try:
            if problem is not None:
                raise OSError(problem)
            with open(path, "rb", buffering=0) as file:
                if hasattr(os, "posix_fadvise"):  # read all of it ahead, in parallel
                    nbytes = sum(len(buffer) for buffer in buffers)
                    os.posix_fadvise(file.fileno(), offset, nbytes, os.POSIX_FADV_WILLNEED)
                _read_into(file.fileno(), buffers, offset)
        except OSError as error:
            raise MusterError(f"could not read {name} from {path}: {error}") from error


def _read_contiguous(files: CheckpointFiles, reads: Sequence[ReadItem], targets: Sequence[_ReadTarget]) -> None:
    """Reads pieces that lie side by side, with one call where the system allows it, and checks them."""
    places = [(goal := targets[read.target_index]).direct_buffer(read, files.dtype_of(goal)) for read in reads]
    spare = files.buffers.allocate([read.nbytes for read, place in zip(reads, places, strict=True) if place is None])
    buffers = [next(spare) if place is None else place for place in places]
    first = reads[0]
    files.read(first.file, first.offset, [buffer.numpy().data for buffer in buffers], targets[first.target_index].name)
    for read, buffer, place in zip(reads, buffers, places, strict=True):
        goal = targets[read.target_index]
        if crc32(buffer.numpy().data) != read.crc32:
            raise MusterError(f"{files.path(read.file)} is damaged: the checksum of {goal.name} is wrong")
        if place is None:
            goal.copy_from(read, buffer, files.dtype_of(goal))


_MAX_BUFFERS_PER_READ = 512
"""Buffers in one call; POSIX allows 1,024 on Linux and may allow less elsewhere."""


def _read_into(fd: int, buffers: list[memoryview], offset: int) -> None:
    """Fills the buffers one after the other from a file's bytes at `offset`. Raises OSError when it ends before."""
    while buffers:
        count = os.preadv(fd, buffers[:_MAX_BUFFERS_PER_READ], offset)
        if not count:
            raise OSError("it ends too early")
        offset += count
        while buffers and count >= len(buffers[0]):
            count -= len(buffers[0])
            buffers = buffers[1:]
        if count:
            buffers = [buffers[0][count:], *buffers[1:]]


def _require_matching(folder: Path, manifest: Manifest, shard: LocalShard, convert: bool) -> None:
    stored = _stored_tensor(folder, manifest, shard.name)
    if stored.shape != shard.layout.shape:
        raise ConfigError(
            f"{shard.name} has shape {list(stored.shape)} in {folder}, but {list(shard.layout.shape)} is wanted"
        )
    if stored.dtype != dtype_name(shard.tensor) and not convert:
        raise ConfigError(f"{shard.name} is {stored.dtype} in {folder}, but {dtype_name(shard.tensor)} is wanted")


def _stored_tensor(folder: Path, manifest: Manifest, name: str) -> StoredTensor:
    if name not in manifest.tensors:
        near = difflib.get_close_matches(name, manifest.tensors, n=1, cutoff=0.0)
        hint = f"; the nearest name there is {near[0]}" if near else ""
        raise ConfigError(f"{folder} holds no tensor {name}{hint}")
    return manifest.tensors[name]
