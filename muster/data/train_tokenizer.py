"""Training of a tokenizer: byte-level BPE on the texts of a source, by the `tokenizers` library."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from muster.data.invalid_rows import InvalidRowPolicy
from muster.data.prepare import PrepareOptions, prepare
from muster.data.tokenizer import load_tokenizer
from muster.spec.errors import ConfigError, MusterError

END_OF_TEXT = "<|endoftext|>"
CHAT_TOKENS = ("<|im_start|>", "<|im_end|>")
"""Tokens of ChatML, the template of dialogues where a tokenizer has none."""
MAX_VOCAB_SIZE = 10_000_000
"""More than any model has; the library takes memory for all of them at once."""
MIN_VOCAB_SIZE = 256 + 1 + len(CHAT_TOKENS)
"""Ids of the 256 bytes and of the special tokens."""
PIECE_BYTES = 1 << 20
"""Longest piece of a document that is held in memory."""
_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Pieces that no token crosses: words with the space before them, up to three digits, punctuation, spaces."""


def train_tokenizer(
    sources: Sequence[str],
    out: Path,
    vocab_size: int,
    max_bytes: int | None = None,
    on_invalid_row: InvalidRowPolicy = "stop",
) -> dict[str, Any]:
    """Train a byte-level BPE tokenizer on texts and write it to the directory `out`; returns the facts about it.

    Raises ConfigError for a wrong request, MusterError where `out` can't be written or the library is missing.
    """
    if out.exists():
        raise ConfigError(f"{out} exists already: give a directory that doesn't")
    if vocab_size < MIN_VOCAB_SIZE:
        raise ConfigError(
            f"--vocab-size {vocab_size} is too small: expected {MIN_VOCAB_SIZE} or more, for the 256 bytes and"
            f" {MIN_VOCAB_SIZE - 256} special tokens"
        )
    if vocab_size > MAX_VOCAB_SIZE:
        raise ConfigError(f"--vocab-size {vocab_size} is too large: expected {MAX_VOCAB_SIZE} or fewer")
    try:
        from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    except ImportError as error:
        raise MusterError("training a tokenizer needs the library tokenizers: pip install 'muster-llm[hf]'") from error
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, *CHAT_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    with TemporaryDirectory(prefix="muster-tokenizer-") as folder:
        texts = _Texts(sources, Path(folder), max_bytes, on_invalid_row)
        tokenizer.train_from_iterator(texts, trainer)
        num_ids = sum(len(one.ids) for one in tokenizer.encode_batch(texts.sample))
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "additional_special_tokens": list(CHAT_TOKENS),
        "clean_up_tokenization_spaces": False,
    }
    try:
        out.mkdir(parents=True)
        tokenizer.save(str(out / "tokenizer.json"))
        (out / "tokenizer_config.json").write_text(json.dumps(about, indent=2) + "\n")
    except OSError as error:
        raise MusterError(f"{out} can't be written: {error.strerror}") from error
    return {
        "version": 1,
        "tokenizer": str(out),
        "ids": tokenizer.get_vocab_size(),
        "bytes": texts.num_bytes,
        "bytes_per_token": sum(len(text.encode()) for text in texts.sample) / max(1, num_ids),
    }


def _texts_of(source: str, folder: Path, max_bytes: int | None, on_invalid_row: InvalidRowPolicy) -> Iterator[bytes]:
    """Yield the texts of a source, whatever its format, in pieces of at most `PIECE_BYTES`.

    They are read as training reads them, through a token store of bytes under `folder`.
    """
    store = prepare(PrepareOptions(source, load_tokenizer("bytes"), max_bytes, on_invalid_row=on_invalid_row), folder)
    starts = store.document_starts.tolist()
    for start, stop in zip(starts, [*starts[1:], store.header.num_tokens], strict=True):
        for first in range(start, stop, PIECE_BYTES):
            ids = store.read(first, min(first + PIECE_BYTES, stop))
            yield ids[ids < 256].astype(np.uint8).tobytes()


class _Texts:
    """Iterator over texts that counts their bytes; the markers of ChatML are tokens of their own, and left out."""

    def __init__(
        self, sources: Sequence[str], folder: Path, max_bytes: int | None, on_invalid_row: InvalidRowPolicy
    ) -> None:
        self._sources, self._folder, self._max_bytes = sources, folder, max_bytes
        self._on_invalid_row: InvalidRowPolicy = on_invalid_row
        self.num_bytes = 0
        self.sample: list[str] = []
        """First texts, on which the compression is measured."""

    def __iter__(self) -> Iterator[str]:
        for number, source in enumerate(self._sources):
            for piece in _texts_of(source, self._folder / str(number), self._max_bytes, self._on_invalid_row):
                self.num_bytes += len(piece)
                text = piece.decode(errors="ignore")
                for token in CHAT_TOKENS:
                    text = text.replace(token, "\n")
                if sum(map(len, self.sample)) < PIECE_BYTES:
                    self.sample.append(text)
                yield text
