"""Python forms of `muster data`: each returns the facts that the verb prints with `--json`."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from muster.api.inputs import require_positive_int, require_text
from muster.spec.errors import ConfigError, MusterError

if TYPE_CHECKING:
    from muster.data.prepare import PrepareOptions

SHOWN_TOKENS = 2000
"""Largest number of tokens of a document that is shown."""


def prepare_data(
    source: str | Path,
    out: str | Path,
    *,
    tokenizer: str | None = None,
    eos_token: str | None = None,
    add_bos: bool | None = None,
    chat_template: str | Path | None = None,
    text_key: str | None = None,
    on_invalid_row: Literal["stop", "skip"] = "stop",
    max_bytes: int | None = None,
    workers: int | None = None,
    megatron: str | Path | None = None,
    progress: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """Make a token store in the directory `out`, or resume an interrupted preparation, and return its facts; the
    arguments are the flags of `muster data prepare`.

    `progress` receives the bytes of the source done so far. Raises ConfigError for data that can't be read, MusterError
    where the store can't be written.
    """
    from muster.data.describe import describe, export_indexed
    from muster.data.prepare import prepare
    from muster.data.store import HEADER_FILE

    require_text("out", out, "a directory")
    directory = Path(out)
    options = _options(
        source, tokenizer, eos_token, add_bos, chat_template, text_key, on_invalid_row, max_bytes, workers
    )
    if directory.exists() and not (directory / HEADER_FILE).exists():
        raise ConfigError(f"{directory} exists and is not a token store: choose another directory")
    store = prepare(options, directory, progress)
    if megatron is not None:
        try:
            export_indexed(store, Path(megatron))
        except OSError as error:
            raise MusterError(f"{megatron}.bin can't be written: {error.strerror}") from error
    return describe(store)


def train_tokenizer(
    sources: str | Path | Sequence[str | Path],
    out: str | Path,
    *,
    vocab_size: int,
    max_bytes: int | None = None,
    on_invalid_row: Literal["stop", "skip"] = "stop",
) -> dict[str, Any]:
    """Train a byte-level BPE tokenizer on one or several sources and write it to the directory `out`; returns the facts
    about it. The arguments are the flags of `muster data tokenizer`.

    Raises ConfigError for sources that can't be read, MusterError where `out` can't be written.
    """
    from muster.data.train_tokenizer import train_tokenizer as train

    require_text("out", out, "a directory")
    several = [sources] if isinstance(sources, str | Path) else sources
    return train([str(source) for source in several], Path(out), vocab_size, max_bytes, on_invalid_row)


def inspect_data(
    store: str | Path,
    *,
    documents: int | None = None,
    show: int | None = None,
    tokenizer: str | None = None,
    eos_token: str | None = None,
    add_bos: bool | None = None,
) -> dict[str, Any]:
    """Return the facts of a token store, with the beginnings of its first `documents` as `texts`, and the parts of its
    first `show` documents as `learned`: each with its text, and whether the loss counts it.

    Raises ConfigError.
    """
    from muster.config.run_paths import BYTES
    from muster.data.describe import describe, first_documents, learned_parts
    from muster.data.store import TokenStore
    from muster.data.tokenizer import load_tokenizer

    require_text("store", store, "a token store's directory")
    require_positive_int("documents", documents)
    require_positive_int("show", show)
    found = load_tokenizer(tokenizer or BYTES, eos_token, add_bos) if documents or show else None
    opened = TokenStore.open(Path(store), found)
    facts = describe(opened)
    if found is not None and show:
        facts["learned"] = [
            [{"text": text, "learned": learned} for text, learned in learned_parts(opened, number, found, SHOWN_TOKENS)]
            for number in range(min(show, opened.header.num_documents))
        ]
    if found is not None and documents:
        facts["texts"] = first_documents(opened, documents, found)
    return facts


def check_data(
    source: str | Path,
    *,
    tokenizer: str | None = None,
    eos_token: str | None = None,
    add_bos: bool | None = None,
    chat_template: str | Path | None = None,
    text_key: str | None = None,
) -> dict[str, Any]:
    """Read a whole token store or source, and return its size and its invalid rows. Raises ConfigError for a damaged
    store."""
    from muster.data.describe import check_source, check_store
    from muster.data.store import TokenStore, is_store
    from muster.data.tokenizer import load_tokenizer

    require_text("source", source, "a token store, or a file or directory of texts")
    if is_store(Path(source)):
        found = load_tokenizer(tokenizer, eos_token, add_bos) if tokenizer is not None else None
        return check_store(TokenStore.open(Path(source), found))
    return check_source(_options(source, tokenizer, eos_token, add_bos, chat_template, text_key))


def _options(
    source: str | Path,
    tokenizer: str | None,
    eos_token: str | None,
    add_bos: bool | None,
    chat_template: str | Path | None,
    text_key: str | None,
    on_invalid_row: Literal["stop", "skip"] = "stop",
    max_bytes: int | None = None,
    workers: int | None = None,
) -> "PrepareOptions":
    """Return how a source is read."""
    from muster.config.run_paths import BYTES
    from muster.data.chat import read_template
    from muster.data.prepare import PrepareOptions
    from muster.data.tokenizer import load_tokenizer

    require_text("source", source, "a file, a directory or python-stdlib")
    if on_invalid_row not in ("stop", "skip"):
        raise ConfigError(f"on_invalid_row: expected stop or skip, got {on_invalid_row!r}")
    found = load_tokenizer(str(tokenizer or BYTES), eos_token, add_bos)
    if chat_template is not None:
        found.chat_template = read_template(Path(chat_template), found.chat_template.special_tokens)
    count = require_positive_int("workers", workers) or len(os.sched_getaffinity(0))
    limit = require_positive_int("max_bytes", max_bytes)
    return PrepareOptions(str(source), found, limit, text_key, on_invalid_row, count)
