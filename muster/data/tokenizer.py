"""Text to token ids and back."""

import hashlib
from collections.abc import Iterable
from typing import Protocol

import numpy as np


class Tokenizer(Protocol):
    """What the rest of Muster asks of a tokenizer."""

    vocab_size: int
    end: int
    """The id that ends each document."""
    fingerprint: str
    """Differs between tokenizers that give different ids: kept in token stores and checkpoints."""

    def encode(self, text: bytes | str) -> np.ndarray:
        """The ids of `text`, without `end`."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`."""
        ...


class ByteTokenizer:
    """Each byte is its own id; 256 ends a document."""

    vocab_size: int = 257
    end: int = 256
    fingerprint: str = "bytes-" + hashlib.sha256(b"muster: bytes 0-255, end of document 256").hexdigest()[:12]

    def encode(self, text: bytes | str) -> np.ndarray:
        """The UTF-8 bytes of `text` as uint16, without the end of the document."""
        data = text.encode() if isinstance(text, str) else text
        return np.frombuffer(data, np.uint8).astype(np.uint16)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`, ends of documents left out; bytes that are not UTF-8 become the replacement character."""
        return bytes(i for i in ids if i < 256).decode(errors="replace")
