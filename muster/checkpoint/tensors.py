"""Tensors on disk, whatever the format: what there is, and any box of it, read when it is asked for."""

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
"""What is held of a tensor at once: large enough for a disk, small beside any model."""

_MMAP_BYTES = 1 << 17


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """What is known of a tensor without reading it."""

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
    """Named tensors, each of which can be read box by box."""

    @property
    def metas(self) -> Mapping[str, TensorMeta]:
        """All there are, by name."""
        ...

    def read(self, name: str, box: Box) -> Tensor:
        """The numbers in `box` as a tensor of the box's size with memory of its own. Raises MusterError."""
        ...


def allocate(size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Memory for a part of a tensor. A large part's comes from the system and goes back as soon as it is dropped: C's
    allocator keeps blocks of changing sizes, and was seen to hold ten times what was in use."""
    nbytes = prod(size) * dtype.itemsize
    if nbytes < _MMAP_BYTES:
        return torch.empty(size, dtype=dtype)
    memory = mmap(-1, nbytes, flags=MAP_PRIVATE | MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(size)


def split_into_boxes(meta: TensorMeta, limit_bytes: int = MAX_BOX_BYTES) -> Iterator[Box]:
    """Boxes of at most `limit_bytes` (at least one number) that make up a tensor, in the order of its numbers in
    memory: their bytes one after another are the tensor's. An empty tensor has none."""
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
    """A file that holds arrays in row-major order, read with as few and as large reads as a box allows.

    Read, not mapped into memory: mapped pages would count as this process's memory.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def read_box(self, offset: int, meta: TensorMeta, box: Box) -> Tensor:
        """A box of the array of `kind` whose first byte is at `offset`. Raises MusterError where the file ends."""
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
        """Reads the box into bytes; what lies in one run in the file is read at once."""
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
                raise MusterError(f"{self.path} is damaged: it ends before its tensors do")
            into = into[count:]


def byte_view(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor in this machine's memory; writing to them writes to it."""
    return tensor.detach().view(-1).view(torch.uint8).numpy().data
