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

from muster.checkpoint.folder import file_problem
from muster.checkpoint.manifest import Manifest, StoredTensor, read_manifest
from muster.checkpoint.piece import Piece, dtype_name
from muster.checkpoint.reads import Read, plan_reads, runs
from muster.spec.checksum import crc32
from muster.spec.errors import ConfigError, MusterError
from muster.spec.layout import Box, TensorLayout, overlap, within

THREADS = 2
"""Runs that are read at once: while one waits for the disk, the checksums of another are taken."""


def load(folder: Path, wanted: Sequence[Piece], convert: bool = False) -> Manifest:
    """Fills the local tensor of every wanted piece from the checkpoint at `folder`, and returns its manifest.

    Whatever is read is checked against its crc32. Stored and wanted dtypes must be equal unless `convert`. Raises
    ConfigError when the checkpoint holds other tensors than wanted, MusterError when it is damaged; tensors may then
    be partly filled.
    """
    manifest = read_manifest(folder)
    fill(folder, manifest, wanted, convert)
    return manifest


def fill(
    folder: Path, manifest: Manifest, wanted: Sequence[Piece], convert: bool = False, files: "Files | None" = None
) -> None:
    """As `load`, where the manifest has been read already, and the `files` may lie elsewhere."""
    for piece in wanted:
        _require_same(folder, manifest, piece, convert)
    goals = [_Goal(piece.name, box, tensor) for piece in wanted for box, tensor in piece.parts()]
    reads = plan_reads(manifest, [(goal.name, goal.box) for goal in goals])
    files = files or Files(folder, manifest)
    with ThreadPoolExecutor(THREADS) as pool:
        for _ in pool.map(lambda run: _read_run(files, run, goals), runs(reads)):
            pass


def read_full(folder: Path, name: str, manifest: Manifest | None = None) -> Tensor:
    """One whole tensor of the checkpoint at `folder`, with the dtype it was stored in."""
    manifest = manifest or read_manifest(folder)
    shape = _stored(folder, manifest, name).shape
    return read_box(folder, manifest, name, Box((0,) * len(shape), shape))


def read_box(folder: Path, manifest: Manifest, name: str, box: Box) -> Tensor:
    """One box of a tensor of the checkpoint at `folder`, with the dtype it was stored in."""
    stored = _stored(folder, manifest, name)
    tensor = torch.empty(box.size, dtype=getattr(torch, stored.dtype))
    fill(folder, manifest, [Piece(name, TensorLayout(name, stored.shape, (box,)), tensor)])
    return tensor


class _Goal:
    """A wanted box and the tensor of its size that it goes into."""

    def __init__(self, name: str, box: Box, into: Tensor) -> None:
        self.name, self.box, self._into = name, box, into

    def place(self, read: Read, dtype: str) -> Tensor | None:
        """The bytes of the tensor that a piece can be read into as it lies on disk; None where it can't."""
        if (
            overlap(read.box, self.box) != read.box
            or dtype_name(self._into) != dtype
            or self._into.device.type != "cpu"
        ):
            return None
        part = self._into[within(read.box, self.box)]
        return part.view(-1).view(torch.uint8) if part.is_contiguous() else None

    def take(self, read: Read, data: Tensor, dtype: str) -> None:
        """Copies what is wanted of a piece's bytes."""
        common = overlap(read.box, self.box)
        assert common is not None
        piece = data.view(getattr(torch, dtype)).view(read.box.size)
        self._into[within(common, self.box)].copy_(piece[within(common, read.box)])


class _Buffers(threading.local):
    """Memory of each thread's own for what can't be read to its place; used again from run to run."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def of(self, sizes: Sequence[int]) -> Iterator[Tensor]:
        """A buffer for each of so many bytes; the former ones are given up."""
        ends = list(accumulate((size + -size % _ALIGN for size in sizes), initial=0))
        if self._memory.numel() < ends[-1]:
            self._memory = torch.empty(ends[-1], dtype=torch.uint8)
        memory = self._memory
        return (memory[start : start + size] for start, size in zip(ends, sizes, strict=False))


_ALIGN = 16
"""Bytes at whose multiples numbers of every type may begin."""


class Files:
    """The tensor files of a checkpoint. Each is opened for a run and closed again: there may be very many."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._folder, self._manifest = folder, manifest
        self.buffers = _Buffers()
        self._checked: set[int] = set()

    def path(self, number: int) -> Path:
        return self._folder / self._manifest.file_names[number]

    def dtype(self, goal: _Goal) -> str:
        return self._manifest.tensors[goal.name].dtype

    def read(self, number: int, offset: int, buffers: list[memoryview], name: str) -> None:
        """Fills the buffers one after the other from `offset` on; `name` is what they are for."""
        path = self.path(number)
        problem = None if number in self._checked else file_problem(path, self._manifest.files[path.name])
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


def _read_run(files: Files, run: Sequence[Read], goals: Sequence[_Goal]) -> None:
    """Reads pieces that lie side by side, with one call where the system allows it, and checks them."""
    places = [(goal := goals[read.wanted]).place(read, files.dtype(goal)) for read in run]
    spare = files.buffers.of([read.nbytes for read, place in zip(run, places, strict=True) if place is None])
    buffers = [next(spare) if place is None else place for place in places]
    first = run[0]
    files.read(first.file, first.offset, [buffer.numpy().data for buffer in buffers], goals[first.wanted].name)
    for read, buffer, place in zip(run, buffers, places, strict=True):
        goal = goals[read.wanted]
        if crc32(buffer.numpy().data) != read.crc32:
            raise MusterError(f"{files.path(read.file)} is damaged: the checksum of {goal.name} is wrong")
        if place is None:
            goal.take(read, buffer, files.dtype(goal))


_MOST_BUFFERS = 512
"""Buffers in one call; POSIX allows 1,024 on Linux and may allow less elsewhere."""


def _read_into(handle: int, buffers: list[memoryview], offset: int) -> None:
    """Fills the buffers one after the other from a file's bytes at `offset`. Raises OSError when it ends before."""
    while buffers:
        count = os.preadv(handle, buffers[:_MOST_BUFFERS], offset)
        if not count:
            raise OSError("it ends too early")
        offset += count
        while buffers and count >= len(buffers[0]):
            count -= len(buffers[0])
            buffers = buffers[1:]
        if count:
            buffers = [buffers[0][count:], *buffers[1:]]


def _require_same(folder: Path, manifest: Manifest, piece: Piece, convert: bool) -> None:
    stored = _stored(folder, manifest, piece.name)
    if stored.shape != piece.layout.shape:
        raise ConfigError(
            f"{piece.name} has shape {list(stored.shape)} in {folder}, but {list(piece.layout.shape)} is wanted"
        )
    if stored.dtype != dtype_name(piece.tensor) and not convert:
        raise ConfigError(f"{piece.name} is {stored.dtype} in {folder}, but {dtype_name(piece.tensor)} is wanted")


def _stored(folder: Path, manifest: Manifest, name: str) -> StoredTensor:
    if name not in manifest.tensors:
        near = difflib.get_close_matches(name, manifest.tensors, n=1, cutoff=0.0)
        hint = f"; the nearest name there is {near[0]}" if near else ""
        raise ConfigError(f"{folder} holds no tensor {name}{hint}")
    return manifest.tensors[name]
