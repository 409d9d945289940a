"""One shard of a token store while it is written: tokens, document starts, and which tokens count in the loss."""

import os
from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np
from pydantic import NonNegativeInt

from muster.spec.base import Frozen
from muster.spec.checksum import crc32


class Shard(Frozen):
    """What is known of a finished shard."""

    file: str
    """Of its tokens."""
    num_tokens: NonNegativeInt
    num_documents: NonNegativeInt
    crc32: int
    counted_file: str | None = None
    """One byte per token, 1 where it is to be learnt; None: all are."""
    counted_crc32: int | None = None


class ChecksummedFile:
    """A file that counts and sums what is written to it, and can go back."""

    def __init__(self, path: Path, dtype: np.dtype) -> None:
        self.path, self.dtype, self.length, self.crc32 = path, dtype, 0, 0
        self._file: BinaryIO = path.open("wb")

    def write(self, numbers: np.ndarray | list[int]) -> None:
        data = np.ascontiguousarray(numbers, self.dtype)
        self._file.write(data.data)
        self.length += len(data)
        self.crc32 = crc32(data.data, self.crc32)

    def position(self) -> tuple[int, int]:
        """Where the file stands, for `back_to`."""
        return self.length, self.crc32

    def truncate_to(self, position: tuple[int, int]) -> None:
        self.length, self.crc32 = position
        self._file.flush()
        self._file.seek(self.length * self.dtype.itemsize)
        self._file.truncate()

    def close(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()


class DocumentWriter(Protocol):
    """What readers of files give documents to."""

    def add_documents(self, ids: np.ndarray, lengths: np.ndarray, loss_mask: np.ndarray | None) -> None:
        """Documents one after the other: their ids with their ends, the length of each, and whether each token
        counts."""

    def begin_document(self) -> list[tuple[int, int]]:
        """A document that comes piece by piece through `extend`, all of whose tokens count; gives a mark of before."""
        ...

    def extend(self, ids: np.ndarray | list[int]) -> None:
        """Tokens of the document that has begun."""

    def discard_document(self, marks: list[tuple[int, int]]) -> None:
        """Takes back what came since `begin_document`."""


class ShardWriter(DocumentWriter):
    """Writes tokens-N.bin, starts-N.bin and, once there is a token that doesn't count, counted-N.bin."""

    def __init__(self, folder: Path, index: int, dtype: np.dtype) -> None:
        self.folder, self.index = folder, index
        self._tokens = ChecksummedFile(folder / f"tokens-{index:05d}.bin", dtype)
        self._starts = ChecksummedFile(starts_path(folder, index), np.dtype("<i8"))
        self._loss_mask: ChecksummedFile | None = None

    def add_documents(self, ids: np.ndarray, lengths: np.ndarray, loss_mask: np.ndarray | None) -> None:
        if loss_mask is not None and self._loss_mask is None:
            self._loss_mask = ChecksummedFile(self.folder / f"counted-{self.index:05d}.bin", np.dtype("u1"))
            self._loss_mask.write(np.ones(self._tokens.length, np.uint8))
        if self._loss_mask is not None:
            self._loss_mask.write(np.ones(len(ids), np.uint8) if loss_mask is None else loss_mask)
        self._starts.write(self._tokens.length + np.cumsum(lengths) - lengths)
        self._tokens.write(ids)

    def begin_document(self) -> list[tuple[int, int]]:
        marks = [output.position() for output in self._outputs]
        self._starts.write([self._tokens.length])
        return marks

    def extend(self, ids: np.ndarray | list[int]) -> None:
        self._tokens.write(ids)
        if self._loss_mask is not None:
            self._loss_mask.write(np.ones(len(ids), np.uint8))

    def discard_document(self, marks: list[tuple[int, int]]) -> None:
        for output, mark in zip(self._outputs, marks, strict=True):
            output.truncate_to(mark)

    def finish(self) -> Shard:
        """Closes the files. Raises OSError."""
        for output in self._outputs:
            output.close()
        return Shard(
            file=self._tokens.path.name,
            num_tokens=self._tokens.length,
            num_documents=self._starts.length,
            crc32=self._tokens.crc32,
            counted_file=self._loss_mask.path.name if self._loss_mask else None,
            counted_crc32=self._loss_mask.crc32 if self._loss_mask else None,
        )

    @property
    def _outputs(self) -> list[ChecksummedFile]:
        return [self._tokens, self._starts, *([self._loss_mask] if self._loss_mask else [])]


def starts_path(folder: Path, index: int) -> Path:
    """Where a shard keeps where its documents begin, until all shards' become one file."""
    return folder / f"starts-{index:05d}.bin"
