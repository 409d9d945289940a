"""The token store: a directory with the tokens of a source, ready to be memory-mapped.

`store.json` says what it holds, `tokens.bin` has the ids (uint16 or uint32, little-endian), `documents.bin` the index
of each document's first token (int64, little-endian).
"""

import errno
import glob
import hashlib
import json
import os
import shutil
import sys
import time
import uuid
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np
from pydantic import PositiveInt

from muster.data.sources import documents, identity
from muster.data.tokenizer import Tokenizer
from muster.spec.base import Frozen
from muster.spec.errors import ConfigError, MusterError

VERSION = 1
_REBUILD = "delete the store's directory, and the next run builds it again"
STALE_AFTER_S = 86_400.0
"""A half-built store that nobody has written to for so long is left over from a builder that was killed."""


class Header(Frozen):
    """What `store.json` says."""

    version: int = VERSION
    source: str
    tokenizer: str
    dtype: Literal["uint16", "uint32"]
    num_tokens: PositiveInt
    num_documents: PositiveInt
    tokens_crc32: int
    documents_crc32: int

    @property
    def numpy_dtype(self) -> np.dtype:
        return np.dtype(self.dtype).newbyteorder("<")


@dataclass(frozen=True, eq=False)
class TokenStore:
    """An open store; its arrays are read-only and lie in the page cache, not in this process's own memory."""

    directory: Path
    header: Header
    tokens: np.ndarray
    """Ids, [num_tokens]."""
    document_starts: np.ndarray
    """Index of each document's first token, int64 [num_documents]."""

    @property
    def fingerprint(self) -> str:
        """Differs between stores with different tokens."""
        return f"{self.header.tokenizer}-{self.header.num_tokens}-{self.header.tokens_crc32:08x}"

    @staticmethod
    def open(directory: Path, tokenizer: Tokenizer) -> "TokenStore":
        """Raises ConfigError where the store is missing, damaged, of a later schema or another tokenizer's."""
        header = _read_header(directory)
        if header.tokenizer != tokenizer.fingerprint:
            raise ConfigError(
                f"the token store {directory} was made with tokenizer {header.tokenizer}, this run has"
                f" {tokenizer.fingerprint}; use the same tokenizer or another data.cache"
            )
        tokens = _map(directory / "tokens.bin", header.numpy_dtype, header.num_tokens)
        starts = _map(directory / "documents.bin", np.dtype("<i8"), header.num_documents)
        return TokenStore(directory, header, tokens, starts)

    def verify(self) -> None:
        """Reads everything once. Raises ConfigError where a byte is not what was written."""
        for name, array, crc32 in (
            ("tokens.bin", self.tokens, self.header.tokens_crc32),
            ("documents.bin", self.document_starts, self.header.documents_crc32),
        ):
            if zlib.crc32(array.data) != crc32:
                raise ConfigError(f"{self.directory / name} is damaged (its checksum is wrong); {_REBUILD}")


def open_or_build(
    source: str,
    cache: Path,
    tokenizer: Tokenizer,
    max_bytes: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> TokenStore:
    """The store of a source under `cache`, built when there is none of the source as it is now.

    Raises as `build_store` and `TokenStore.open` do.
    """
    key = hashlib.sha256(f"{VERSION}\0{identity(source)}\0{tokenizer.fingerprint}\0{max_bytes}".encode()).hexdigest()
    directory = cache / f"{Path(source).resolve().name[:40]}-{key[:16]}"
    if directory.exists():
        return TokenStore.open(directory, tokenizer)
    return build_store(source, directory, tokenizer, max_bytes, progress)


def build_store(
    source: str,
    directory: Path,
    tokenizer: Tokenizer,
    max_bytes: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> TokenStore:
    """Writes the store of a source, of its first `max_bytes` bytes if given; all of it appears in `directory` at once.

    Of several builders of one directory the first to finish wins, and the others open what it made. `progress` is
    called with the bytes read so far. Raises ConfigError where the source can't be read or the directory holds another
    store, MusterError where the store can't be written; nothing is left behind then.
    """
    partial = directory.with_name(f"{directory.name}.{uuid.uuid4().hex[:12]}.partial")
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        _remove_stale(directory)
        partial.mkdir()
        header = _write(source, partial, tokenizer, max_bytes, progress)
        _publish(partial, directory)
    except OSError as error:
        raise MusterError(
            f"the token store {directory} can't be written: {error.strerror}; free space there or set data.cache to"
            " another directory"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    store = TokenStore.open(directory, tokenizer)
    if store.header != header:
        raise ConfigError(f"{directory} already holds a store of other text; delete it or choose another directory")
    return store


class _Output:
    """A file that counts and sums what is written to it."""

    def __init__(self, file: BinaryIO, dtype: np.dtype) -> None:
        self.file, self.dtype, self.length, self.crc32 = file, dtype, 0, 0

    def write(self, numbers: np.ndarray | list[int]) -> None:
        data = np.asarray(numbers, self.dtype).data
        self.file.write(data)
        self.length += len(data)
        self.crc32 = zlib.crc32(data, self.crc32)


def _write(
    source: str,
    directory: Path,
    tokenizer: Tokenizer,
    max_bytes: int | None,
    progress: Callable[[int], None] | None,
) -> Header:
    dtype: Literal["uint16", "uint32"] = "uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32"
    with open(directory / "tokens.bin", "wb") as tokens_file, open(directory / "documents.bin", "wb") as starts_file:
        tokens = _Output(tokens_file, np.dtype(dtype).newbyteorder("<"))
        starts = _Output(starts_file, np.dtype("<i8"))
        _write_documents(source, tokens, starts, tokenizer, max_bytes, progress or (lambda _: None))
        header = Header(
            source=source if max_bytes is None else f"{source}, first {max_bytes} bytes",
            tokenizer=tokenizer.fingerprint,
            dtype=dtype,
            num_tokens=tokens.length,
            num_documents=starts.length,
            tokens_crc32=tokens.crc32,
            documents_crc32=starts.crc32,
        )
        for file in (tokens_file, starts_file):
            _sync(file)
    with open(directory / "store.json", "wb") as file:
        file.write(json.dumps(header.model_dump(), indent=1).encode())
        _sync(file)
    return header


def _write_documents(
    source: str,
    tokens: _Output,
    starts: _Output,
    tokenizer: Tokenizer,
    max_bytes: int | None,
    progress: Callable[[int], None],
) -> None:
    limit, read = sys.maxsize if max_bytes is None else max_bytes, 0
    for document in documents(source):
        if read >= limit:
            break
        starts.write([tokens.length])
        for chunk in document.chunks:
            kept = chunk[: limit - read]
            tokens.write(tokenizer.encode(kept))
            read += len(kept)
            progress(read)
            if read >= limit:
                break
        tokens.write([tokenizer.end])
    if not tokens.length:
        raise ConfigError(f"data.source: {source} has no text within max_bytes {max_bytes}; give at least 1")


def _publish(partial: Path, directory: Path) -> None:
    """Gives a finished store its name, unless another builder was faster."""
    _sync_directory(partial)
    try:
        partial.rename(directory)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
    _sync_directory(directory.parent)


def _remove_stale(directory: Path) -> None:
    for partial in directory.parent.glob(f"{glob.escape(directory.name)}.*.partial"):
        written = partial / "tokens.bin"
        if written.exists() and time.time() - written.stat().st_mtime > STALE_AFTER_S:
            shutil.rmtree(partial, ignore_errors=True)


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _sync_directory(directory: Path) -> None:
    """Makes the names in a directory outlive a power cut."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read_header(directory: Path) -> Header:
    path = directory / "store.json"
    if not path.is_file():
        raise ConfigError(f"{directory} is no token store, for store.json is missing; {_REBUILD}")
    try:
        data = json.loads(path.read_bytes())
        version = int(data["version"])
        if version > VERSION:
            raise ConfigError(
                f"the token store {directory} has schema {version}, this Muster reads schemas up to {VERSION};"
                " use a later Muster or another data.cache"
            )
        return Header.model_validate(data)
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{path} is damaged; {_REBUILD}") from error


def _map(path: Path, dtype: np.dtype, length: int) -> np.ndarray:
    expected, found = length * dtype.itemsize, path.stat().st_size if path.is_file() else 0
    if found != expected:
        raise ConfigError(f"{path} has {found:,} bytes where store.json says {expected:,}; {_REBUILD}")
    return np.memmap(path, dtype, "r", shape=(length,)).view(np.ndarray)
