"""Tensors on disk in any format: their names, shapes and dtypes, and any box of them, read on demand."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import FileIO
from math import prod
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from muster.layout.tensor_layout import Box
from muster.spec.errors import MusterError

MAX_BOX_BYTES = 4 << 20
"""Largest part of a tensor in memory at once: large enough for efficient reads, small beside any model."""

_MMAP_BYTES = 1 << 17


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """Shape and dtype of a tensor, known without reading it."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def whole(self) -> Box:
        return Box((0,) * len(self.shape), self.shape)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}"


class TensorSource(Protocol):
    """Named tensors that can be read box by box."""

    @property
    def metas(self) -> Mapping[str, TensorMeta]:
        """Shape and dtype of every tensor, by name."""
        ...

    def read(self, name: str, box: Box) -> Tensor:
        """Return the elements in `box` as a tensor of the box's size that owns its memory. Raises MusterError."""
        ...


def allocate(size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return an uninitialized tensor for a part of a stored one.

    Large parts are mapped from the system, and returned to it as soon as they are dropped: malloc keeps blocks of
    changing sizes, and was observed to hold ten times the memory in use.
    """
    nbytes = prod(size) * dtype.itemsize
    if nbytes < _MMAP_BYTES:
        return torch.empty(size, dtype=dtype)
    memory = mmap(-1, nbytes, flags=MAP_PRIVATE | MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(size)


def split_into_boxes(meta: TensorMeta, limit_bytes: int = MAX_BOX_BYTES) -> Iterator[Box]:
    """Yield boxes of at most `limit_bytes` (at least one element) that make up a tensor.

    They come in row-major order, so that their bytes, concatenated, are the tensor's. An empty tensor has none.
    """
    if meta.numel:
        yield from _split(meta.whole, 0, max(limit_bytes // meta.dtype.itemsize, 1))


def _split(box: Box, dim: int, limit: int) -> Iterator[Box]:
    if box.numel <= limit:
        yield box
        return
    row = prod(box.size[dim + 1 :])
    step = max(limit // row, 1)
    for start in range(0, box.size[dim], step):
        part = Box(
            (*box.start[:dim], box.start[dim] + start, *box.start[dim + 1 :]),
            (*box.size[:dim], min(step, box.size[dim] - start), *box.size[dim + 1 :]),
        )
        yield from _split(part, dim + 1, limit)


class ArrayFile:
    """File of arrays in row-major order, from which boxes are read with as few and as large reads as possible.

    It is read, not mapped: mapped pages would count as memory of this process.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def read_box(self, offset: int, meta: TensorMeta, box: Box) -> Tensor:
        """Read a box of the array that begins at byte `offset`. Raises MusterError if the file ends too early."""
        out = allocate(box.size, meta.dtype)
        strides = [prod(meta.shape[dim + 1 :]) * meta.dtype.itemsize for dim in range(len(meta.shape))]
        try:
            with open(self.path, "rb", buffering=0) as file:
                self._fill(file, offset, meta.shape, strides, box, byte_view(out))
        except OSError as error:
            raise MusterError(f"could not read {self.path}: {error.strerror}") from error
        return out

    def _fill(
        self, file: FileIO, offset: int, shape: tuple[int, ...], strides: list[int], box: Box, into: memoryview
    ) -> None:
        """Read a box into bytes, each contiguous run with one read; recursive over the leading dimensions."""
        if box.size[1:] == shape[1:] or not shape:
            self._read(file, offset + (box.start[0] * strides[0] if shape else 0), into)
            return
        size, rest = len(into) // box.size[0], Box(box.start[1:], box.size[1:])
        for row in range(box.size[0]):
            start = offset + (box.start[0] + row) * strides[0]
            self._fill(file, start, shape[1:], strides[1:], rest, into[row * size : (row + 1) * size])

    def _read(self, file: FileIO, offset: int, into: memoryview) -> None:
        file.seek(offset)
        while into:
            count = file.readinto(into)
            if not count:
                raise MusterError(f"{self.path} is damaged: it ends before its last tensor does")
            into = into[count:]


def byte_view(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor, without a copy."""
    return tensor.detach().view(-1).view(torch.uint8).numpy().data
