"""Loading under any plan: each rank reads the stored chunks that overlap its own shards."""

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
"""Concurrent reads: while one waits for the disk, the checksums of another are computed."""


def load(folder: Path, shards: Sequence[LocalShard], convert: bool = False) -> Manifest:
    """Fill the local tensors of all shards from the checkpoint at `folder`, and return its manifest.

    Every chunk is checked against its crc32. Stored and local dtypes must be equal unless `convert`. Raises ConfigError
    if the checkpoint holds other tensors than these, MusterError if it is damaged; tensors may then be partly filled.
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
    """Fill shards as `load` does, with a manifest that has been read already; `files` may be elsewhere."""
    for shard in shards:
        _require_matching(folder, manifest, shard, convert)
    targets = [_ReadTarget(shard.name, box, tensor) for shard in shards for box, tensor in shard.box_views()]
    reads = plan_reads(manifest, [(target.name, target.box) for target in targets])
    files = files or CheckpointFiles(folder, manifest)
    with ThreadPoolExecutor(READ_THREADS) as pool:
        for _ in pool.map(lambda group: _read_contiguous(files, group, targets), coalesce_reads(reads)):
            pass


def read_full(folder: Path, name: str, manifest: Manifest | None = None) -> Tensor:
    """Read one whole tensor of the checkpoint at `folder`, in its stored dtype."""
    manifest = manifest or read_manifest(folder)
    shape = _stored_tensor(folder, manifest, name).shape
    return read_box(folder, manifest, name, Box((0,) * len(shape), shape))


def read_box(folder: Path, manifest: Manifest, name: str, box: Box) -> Tensor:
    """Read one box of a tensor of the checkpoint at `folder`, in its stored dtype."""
    stored = _stored_tensor(folder, manifest, name)
    tensor = torch.empty(box.size, dtype=getattr(torch, stored.dtype))
    fill_shards(folder, manifest, [LocalShard(name, TensorLayout(name, stored.shape, (box,)), tensor)])
    return tensor


class _ReadTarget:
    """Wanted box and the tensor of its size that receives it."""

    def __init__(self, name: str, box: Box, into: Tensor) -> None:
        self.name, self.box, self._into = name, box, into

    def direct_buffer(self, read: ReadItem, dtype: str) -> Tensor | None:
        """Return the bytes of the tensor into which a chunk can be read directly; None if it must be copied."""
        if (
            intersect(read.box, self.box) != read.box
            or dtype_name(self._into) != dtype
            or self._into.device.type != "cpu"
        ):
            return None
        part = self._into[slices_within(read.box, self.box)]
        return part.view(-1).view(torch.uint8) if part.is_contiguous() else None

    def copy_from(self, read: ReadItem, data: Tensor, dtype: str) -> None:
        """Copy the wanted part of a chunk's bytes."""
        common = intersect(read.box, self.box)
        assert common is not None
        chunk = data.view(getattr(torch, dtype)).view(read.box.size)
        self._into[slices_within(common, self.box)].copy_(chunk[slices_within(common, read.box)])


class _ThreadBuffers(threading.local):
    """Per-thread memory for chunks that can't be read directly, reused from read to read."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def allocate(self, sizes: Sequence[int]) -> Iterator[Tensor]:
        """Yield a buffer for each of the given sizes in bytes; earlier buffers become invalid."""
        ends = list(accumulate((size + -size % _ALIGN_BYTES for size in sizes), initial=0))
        if self._memory.numel() < ends[-1]:
            self._memory = torch.empty(ends[-1], dtype=torch.uint8)
        memory = self._memory
        return (memory[start : start + size] for start, size in zip(ends, sizes, strict=False))


_ALIGN_BYTES = 16
"""Alignment that suits every dtype."""


class CheckpointFiles:
    """Tensor files of a checkpoint. Each is opened for one read and closed again, since there may be very many."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._folder, self._manifest = folder, manifest
        self.buffers = _ThreadBuffers()
        self._checked: set[int] = set()

    def path(self, number: int) -> Path:
        return self._folder / self._manifest.file_names[number]

    def dtype_of(self, target: _ReadTarget) -> str:
        return self._manifest.tensors[target.name].dtype

    def read(self, number: int, offset: int, buffers: list[memoryview], name: str) -> None:
        """Fill the buffers in order with the bytes from `offset` on; `name` is the tensor, for messages."""
        path = self.path(number)
        problem = None if number in self._checked else find_file_damage(path, self._manifest.files[path.name])
        self._checked.add(number)
        try:
            if problem is not None:
                raise OSError(problem)
            with open(path, "rb", buffering=0) as file:
                if hasattr(os, "posix_fadvise"):  # let the kernel read all of it ahead, in parallel
                    nbytes = sum(len(buffer) for buffer in buffers)
                    os.posix_fadvise(file.fileno(), offset, nbytes, os.POSIX_FADV_WILLNEED)
                _read_into(file.fileno(), buffers, offset)
        except OSError as error:
            raise MusterError(f"could not read {name} from {path}: {error}") from error


def _read_contiguous(files: CheckpointFiles, reads: Sequence[ReadItem], targets: Sequence[_ReadTarget]) -> None:
    """Read chunks that are adjacent in a file, with one call if the system allows it, and verify their checksums."""
    direct = [(target := targets[read.target_index]).direct_buffer(read, files.dtype_of(target)) for read in reads]
    copied = [read.nbytes for read, in_place in zip(reads, direct, strict=True) if in_place is None]
    spare = files.buffers.allocate(copied)
    buffers = [next(spare) if in_place is None else in_place for in_place in direct]
    first = reads[0]
    files.read(first.file, first.offset, [buffer.numpy().data for buffer in buffers], targets[first.target_index].name)
    for read, buffer, in_place in zip(reads, buffers, direct, strict=True):
        target = targets[read.target_index]
        if crc32(buffer.numpy().data) != read.crc32:
            raise MusterError(f"{files.path(read.file)} is damaged: the checksum of {target.name} is wrong")
        if in_place is None:
            target.copy_from(read, buffer, files.dtype_of(target))


_MAX_BUFFERS_PER_READ = 512
"""Largest number of buffers in one call; Linux allows 1,024, other systems may allow less."""


def _read_into(fd: int, buffers: list[memoryview], offset: int) -> None:
    """Fill the buffers in order with a file's bytes from `offset` on. Raises OSError if the file ends too early."""
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
