"""Writer of one shard of a token store: token ids, document starts and the loss mask."""

import os
from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np
from pydantic import NonNegativeInt

from muster.spec.base import Frozen
from muster.spec.checksum import crc32


class Shard(Frozen):
    """Description of a finished shard in `store.json`."""

    file: str
    """Name of the file with its token ids."""
    num_tokens: NonNegativeInt
    num_documents: NonNegativeInt
    crc32: int
    counted_file: str | None = None
    """Name of the file with its loss mask; None: all tokens contribute to the loss."""
    counted_crc32: int | None = None


class ChecksummedFile:
    """File of one dtype that keeps its length and checksum while it is written, and can be truncated."""

    def __init__(self, path: Path, dtype: np.dtype) -> None:
        self.path, self.dtype, self.length, self.crc32 = path, dtype, 0, 0
        self._file: BinaryIO = path.open("wb")

    def write(self, values: np.ndarray | list[int]) -> None:
        """Append values. Raises OSError."""
        data = np.ascontiguousarray(values, self.dtype)
        self._file.write(data.data)
        self.length += len(data)
        self.crc32 = crc32(data.data, self.crc32)

    def position(self) -> tuple[int, int]:
        """Return the current length and checksum, for `truncate_to`."""
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
    """Receiver of tokenized documents."""

    def add_documents(self, ids: np.ndarray, lengths: np.ndarray, loss_mask: np.ndarray | None) -> None:
        """Add whole documents.

        `ids` are those of all documents with their end-of-document tokens, `lengths` the tokens of each document, and
        `loss_mask` is 1 for each token that contributes to the loss (None: all do).
        """

    def begin_document(self) -> list[tuple[int, int]]:
        """Begin a document that arrives in pieces through `extend`; return the position for `discard_document`.

        All of its tokens contribute to the loss.
        """
        ...

    def extend(self, ids: np.ndarray | list[int]) -> None:
        """Append tokens to the document that `begin_document` began."""

    def discard_document(self, marks: list[tuple[int, int]]) -> None:
        """Roll back to the position that `begin_document` returned."""


class ShardWriter(DocumentWriter):
    """Writer of tokens-N.bin, starts-N.bin and, from the first masked token on, counted-N.bin."""

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
        """Close the files and return the shard's description. Raises OSError."""
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
    """Return the path of a shard's document starts, which exist until all shards' are joined in documents.bin."""
    return folder / f"starts-{index:05d}.bin"
