"""Token store: a directory with the tokenized text of a source, ready to be memory-mapped.

    store.json        the header: sizes, dtype, checksums, tokenizer (`StoreHeader`)
    tokens-N.bin      token ids of shard N, uint16 or uint32, little-endian
    documents.bin     index of each document's first token over all shards, int64, little-endian
    counted-N.bin     loss mask of shard N, one byte a token; only where some tokens are left out of the loss

`muster.data.prepare` writes stores.
"""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import NonNegativeInt, PositiveInt

from muster.data.shard import Shard
from muster.data.tokenizer import Tokenizer
from muster.spec.base import Frozen
from muster.spec.checksum import crc32
from muster.spec.errors import ConfigError

VERSION = 2
HEADER_FILE = "store.json"
_CHECKED_DOCUMENTS = 1_000_000
"""Most documents whose order is checked when a store is opened; 'muster data check' reads everything."""
_REBUILD_HINT = "build it again with 'muster data prepare'; one that a run has made, by deleting it"


class StoreHeader(Frozen):
    """Contents of `store.json`."""

    version: int = VERSION
    source: str
    tokenizer: str
    """Fingerprint of the tokenizer."""
    vocab_size: PositiveInt | None = None
    """Number of ids of the tokenizer; None in stores of schema 1."""
    dtype: Literal["uint16", "uint32"]
    num_tokens: PositiveInt
    num_documents: PositiveInt
    documents_crc32: int
    shards: tuple[Shard, ...]
    skipped: dict[str, NonNegativeInt] = {}
    """Invalid rows that were skipped, counted by reason."""
    key: str | None = None
    """Hash of the source, the tokenizer and the options that the tokens were made with."""

    @property
    def numpy_dtype(self) -> np.dtype:
        return np.dtype(self.dtype).newbyteorder("<")


@dataclass(frozen=True, eq=False)
class TokenStore:
    """Open store. Its arrays are read-only maps: they occupy the page cache, not this process's memory."""

    directory: Path
    header: StoreHeader
    shards: tuple[np.ndarray, ...]
    """Token ids of each shard."""
    loss_masks: tuple[np.ndarray | None, ...]
    """Loss mask of each shard, uint8, 1 for a token that contributes to the loss; None where all tokens do."""
    document_starts: np.ndarray
    """Index of each document's first token, int64 [num_documents]."""

    @property
    def fingerprint(self) -> str:
        """Identifier that differs between stores with different tokens or loss masks."""
        header = self.header
        sums = [(shard.crc32, shard.counted_crc32) for shard in header.shards]
        total = sums[0][0] if len(sums) == 1 and self.has_full_loss else crc32(json.dumps(sums).encode())
        return f"{header.tokenizer}-{header.num_tokens}-{total:08x}"

    @property
    def tokens(self) -> np.ndarray:
        """All token ids, [num_tokens]: a map of a single shard, or a copy in memory of several."""
        return self.shards[0] if len(self.shards) == 1 else np.concatenate(self.shards)

    @property
    def has_full_loss(self) -> bool:
        """True if every token contributes to the loss."""
        return all(shard is None for shard in self.loss_masks)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return the ids of tokens `start` … `stop − 1`."""
        if len(self.shards) == 1:
            return self.shards[0][start:stop]
        parts = [self.shards[shard][span] for shard, span in self._locate(start, stop)]
        return parts[0] if len(parts) == 1 else np.concatenate([np.zeros(0, self.header.numpy_dtype), *parts])

    def read_loss_mask(self, start: int, stop: int) -> np.ndarray | None:
        """Return the loss mask of tokens `start` … `stop − 1`, uint8; None: all contribute to the loss."""
        parts = [(self.loss_masks[shard], span) for shard, span in self._locate(start, stop)]
        if all(mask is None for mask, _ in parts):
            return None
        return np.concatenate(
            [np.ones(span.stop - span.start, np.uint8) if mask is None else mask[span] for mask, span in parts]
        )

    def _locate(self, start: int, stop: int) -> list[tuple[int, slice]]:
        """Return a range of tokens as (shard, slice of that shard) pairs."""
        bounds = self._shard_bounds
        spans = []
        for shard in range(int(np.searchsorted(bounds, start, side="right")) - 1, len(self.shards)):
            low, high = int(bounds[shard]), int(bounds[shard + 1])
            if low >= stop:
                break
            spans.append((shard, slice(max(start, low) - low, min(stop, high) - low)))
        return spans

    @cached_property
    def _shard_bounds(self) -> np.ndarray:
        """Index of each shard's first token, followed by the number of all tokens."""
        return np.cumsum([0, *(len(shard) for shard in self.shards)])

    @staticmethod
    def open(directory: Path, tokenizer: Tokenizer | None = None) -> "TokenStore":
        """Open the store in `directory`.

        Raises ConfigError if the store is missing, damaged, of a later schema, or made with another tokenizer.
        """
        header = read_header(directory)
        if tokenizer is not None and header.tokenizer != tokenizer.fingerprint:
            raise ConfigError(
                f"the token store {directory} was made with tokenizer {header.tokenizer}, not with"
                f" {tokenizer.fingerprint}; use the same tokenizer, data.eos_token and data.add_bos, or for a run"
                " another data.cache"
            )
        shards = tuple(_memory_map(directory / one.file, header.numpy_dtype, one.num_tokens) for one in header.shards)
        loss_masks = tuple(
            _memory_map(directory / one.counted_file, np.dtype("u1"), one.num_tokens) if one.counted_file else None
            for one in header.shards
        )
        starts = _memory_map(directory / "documents.bin", np.dtype("<i8"), header.num_documents)
        _require_rising(starts, header.num_tokens, directory)
        return TokenStore(directory, header, shards, loss_masks, starts)

    def verify(self) -> None:
        """Read all files and compare their checksums. Raises ConfigError for a damaged file."""
        parts: list[tuple[str, np.ndarray, int]] = []
        for shard, tokens, counted in zip(self.header.shards, self.shards, self.loss_masks, strict=True):
            parts.append((shard.file, tokens, shard.crc32))
            if counted is not None and shard.counted_file and shard.counted_crc32 is not None:
                parts.append((shard.counted_file, counted, shard.counted_crc32))
        parts.append(("documents.bin", self.document_starts, self.header.documents_crc32))
        for name, array, written in parts:
            if crc32(array.data) != written:
                raise ConfigError(f"{self.directory / name} is damaged (its checksum is wrong); {_REBUILD_HINT}")

    def check_ids(self, num_ids: int) -> None:
        """Read every token. Raises ConfigError for the first id that is not below `num_ids`."""
        begin = 0
        for shard, tokens in zip(self.header.shards, self.shards, strict=True):
            for at in range(0, len(tokens), 1 << 24):
                part = tokens[at : at + (1 << 24)]
                if part.max() >= num_ids:
                    place = at + int(np.argmax(part >= num_ids))
                    document = int(np.searchsorted(self.document_starts, begin + place, side="right"))
                    raise ConfigError(
                        f"{self.directory / shard.file}: token {place + 1}, in document {document}, has the id"
                        f" {tokens[place]}, expected one below {num_ids}"
                    )
            begin += len(tokens)


def is_store(path: Path) -> bool:
    """Return True if there is a token store at `path`."""
    return (path / HEADER_FILE).is_file()


def read_header(directory: Path) -> StoreHeader:
    """Return the header of a store. Raises ConfigError if it is missing, damaged or of a later schema."""
    path = directory / HEADER_FILE
    if not path.is_file():
        raise ConfigError(
            f"{directory} is not a token store: expected a directory with {HEADER_FILE}, which 'muster data prepare'"
            " writes"
        )
    try:
        data = json.loads(path.read_bytes())
        version = int(data["version"])
        if version > VERSION:
            raise ConfigError(
                f"the token store {directory} has schema {version}, but this Muster reads schemas up to {VERSION};"
                " use a newer Muster or another data.cache"
            )
        return StoreHeader.model_validate(_migrate_version_1(data) if version == 1 else data)
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{path} is damaged; {_REBUILD_HINT}") from error


def _migrate_version_1(data: dict[str, Any]) -> dict[str, Any]:
    """Convert a header of schema 1, whose stores have a single shard, to the current schema."""
    data = dict(data)
    shard = Shard(
        file="tokens.bin",
        num_tokens=data["num_tokens"],
        num_documents=data["num_documents"],
        crc32=data.pop("tokens_crc32"),
    )
    return data | {"version": VERSION, "shards": [shard]}


def _memory_map(path: Path, dtype: np.dtype, length: int) -> np.ndarray:
    expected, found = length * dtype.itemsize, path.stat().st_size if path.is_file() else 0
    if found != expected:
        raise ConfigError(f"{path} has {found:,} bytes, but store.json says {expected:,}; {_REBUILD_HINT}")
    return np.memmap(path, dtype, "r", shape=(length,)).view(np.ndarray)


def _require_rising(starts: np.ndarray, num_tokens: int, directory: Path) -> None:
    """Raise ConfigError where the first documents don't begin one after another within the tokens."""
    first = starts[:_CHECKED_DOCUMENTS]
    if len(first) and not (first[0] == 0 and first[-1] < num_tokens and bool((np.diff(first) >= 0).all())):
        raise ConfigError(f"{directory / 'documents.bin'} is damaged; {_REBUILD_HINT}")
