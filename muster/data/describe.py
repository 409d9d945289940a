"""Facts of token stores, and checks of stores and sources."""

from pathlib import Path
from typing import Any

import numpy as np

from muster.data.invalid_rows import InvalidRowLog
from muster.data.prepare import PrepareOptions, make_encoding
from muster.data.readers import split_file, tokenize_span
from muster.data.shard import DocumentWriter
from muster.data.sources import source_files
from muster.data.store import TokenStore
from muster.data.tokenizer import Tokenizer
from muster.spec.errors import ConfigError

_WHOLE_FILE = 1 << 62


def describe(store: TokenStore) -> dict[str, Any]:
    """Return the facts of a store as JSON; lengths are in tokens, with each document's end-of-document token."""
    header = store.header
    lengths = document_lengths(store)
    num_masked = sum(int((mask == 0).sum()) for mask in store.loss_masks if mask is not None)
    return {
        "store": str(store.directory),
        "source": header.source,
        "tokenizer": header.tokenizer,
        "vocab_size": header.vocab_size,
        "dtype": header.dtype,
        "tokens": header.num_tokens,
        "counted_tokens": header.num_tokens - num_masked,
        "documents": header.num_documents,
        "shards": len(header.shards),
        "document_tokens": {
            "mean": float(lengths.mean()),
            "median": float(np.median(lengths)),
            "p90": float(np.quantile(lengths, 0.9)),
            "max": int(lengths.max()),
        },
        "skipped": dict(header.skipped),
    }


def document_lengths(store: TokenStore) -> np.ndarray:
    """Return the tokens of each document, int64."""
    return np.diff(store.document_starts, append=store.header.num_tokens)


def first_documents(store: TokenStore, count: int, tokenizer: Tokenizer, max_tokens: int = 400) -> list[str]:
    """Return the beginnings of the first documents as text."""
    texts = []
    for start, length in zip(store.document_starts[:count].tolist(), document_lengths(store).tolist(), strict=False):
        texts.append(tokenizer.decode(store.read(start, start + min(length, max_tokens)).tolist()))
    return texts


def learned_parts(store: TokenStore, document: int, tokenizer: Tokenizer, max_tokens: int) -> list[tuple[str, bool]]:
    """Return the beginning of a document as (text with special tokens, True if its tokens contribute to the loss)."""
    start = int(store.document_starts[document])
    stop = min(start + max_tokens, [*store.document_starts.tolist(), store.header.num_tokens][document + 1])
    ids, mask = store.read(start, stop).tolist(), store.read_loss_mask(start, stop)
    if mask is None:
        return [(tokenizer.decode_all(ids), True)]
    bounds = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(ids)]
    return [(tokenizer.decode_all(ids[a:b]), bool(mask[a])) for a, b in zip(bounds[:-1], bounds[1:], strict=True)]


def check_store(store: TokenStore) -> dict[str, Any]:
    """Read all of a store and check checksums, ids and document bounds. Raises ConfigError."""
    store.verify()
    store.check_ids(store.header.vocab_size or 1 << 32)
    starts = store.document_starts
    if starts[0] != 0 or (np.diff(starts, append=store.header.num_tokens) <= 0).any():
        raise ConfigError(f"{store.directory / 'documents.bin'}: its document starts are not rising from 0")
    return {"store": str(store.directory), "tokens": store.header.num_tokens, "documents": store.header.num_documents}


def check_source(options: PrepareOptions) -> dict[str, Any]:
    """Read all of a source as `prepare` would, without writing; return its size and its invalid rows as JSON."""
    invalid = InvalidRowLog("skip")
    counter = _CountingWriter()
    encoding = make_encoding(options)
    for file in source_files(options.source):
        for span in split_file(file, _WHOLE_FILE):
            tokenize_span(span, encoding, invalid, counter, lambda _: None)
    return {
        "source": options.source,
        "tokens": counter.tokens,
        "documents": counter.documents,
        "bad": dict(invalid.counts),
        "examples": invalid.examples,
    }


class _CountingWriter(DocumentWriter):
    """Writer that counts tokens and documents and keeps nothing."""

    def __init__(self) -> None:
        self.tokens = self.documents = 0

    def add_documents(self, ids: np.ndarray, lengths: np.ndarray, loss_mask: np.ndarray | None) -> None:
        self.tokens, self.documents = self.tokens + len(ids), self.documents + len(lengths)

    def begin_document(self) -> list[tuple[int, int]]:
        self.documents += 1
        return [(self.tokens, 0)]

    def extend(self, ids: np.ndarray | list[int]) -> None:
        self.tokens += len(ids)

    def discard_document(self, marks: list[tuple[int, int]]) -> None:
        self.tokens, self.documents = marks[0][0], self.documents - 1


def export_indexed(store: TokenStore, prefix: Path) -> None:
    """Write a store as Megatron-LM's PREFIX.bin and PREFIX.idx. Raises ConfigError, OSError."""
    from muster.data.megatron import write_indexed

    if not store.has_full_loss:
        raise ConfigError(f"{store.directory} has a loss mask, which Megatron-LM's files can't hold")
    write_indexed(prefix, store.shards, document_lengths(store), store.header.numpy_dtype)
