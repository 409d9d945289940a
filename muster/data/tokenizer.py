"""Tokenizers: text to token ids and back."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from muster.data.chat import ChatTemplate, read_template
from muster.spec.errors import ConfigError, MusterError

BYTES = "bytes"
"""Name of the tokenizer whose ids are single bytes."""
EOS_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[SEP]")
"""End-of-document tokens, in the order in which they are tried if tokenizer_config.json names none."""


class Tokenizer(Protocol):
    """Interface of tokenizers."""

    vocab_size: int
    eos_id: int
    """Id of the token that ends each document."""
    fingerprint: str
    """Identifier that differs between tokenizers that give different ids, saved in token stores and checkpoints."""
    chat_template: ChatTemplate
    """Template that renders dialogues."""

    def encode(self, text: bytes | str) -> np.ndarray:
        """Return the ids of `text`, without an end-of-document token."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids of several texts, concatenated, and the number of ids of each text (int64).

        No end-of-document tokens are added.
        """
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`."""
        ...


class ByteTokenizer:
    """Tokenizer whose ids are the 256 bytes; 256 ends a document."""

    vocab_size: int = 257
    eos_id: int = 256
    fingerprint: str = "bytes-" + hashlib.sha256(b"muster: bytes 0-255, end of document 256").hexdigest()[:12]
    chat_template: ChatTemplate = ChatTemplate()

    def encode(self, text: bytes | str) -> np.ndarray:
        """Return the UTF-8 bytes of `text` as uint16, without an end-of-document token."""
        data = text.encode() if isinstance(text, str) else text
        return np.frombuffer(data, np.uint8).astype(np.uint16)

    def encode_batch(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        data = [text.encode() for text in texts]
        return np.frombuffer(b"".join(data), np.uint8), np.fromiter(map(len, data), np.int64, len(data))

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids` without end-of-document tokens; invalid UTF-8 becomes the replacement character."""
        return bytes(i for i in ids if i < 256).decode(errors="replace")


class JsonTokenizer:
    """Tokenizer of a tokenizer.json, by the library `tokenizers`.

    tokenizer_config.json beside it names the end-of-document token and the chat template. Special tokens that occur in
    a text are recognized; none is added. Raises ConfigError if the file can't be used, MusterError if the library is
    missing.
    """

    def __init__(self, path: Path, eos_token: str | None = None) -> None:
        tokenizers = _import("tokenizers", "hf")
        self.path, self._eos_token = path, eos_token
        try:
            text = path.read_text(encoding="utf-8")
            self._tokenizer: Any = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the library raises nothing more special
            raise ConfigError(f"data.tokenizer: {path} can't be read as a tokenizer.json ({error})") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size: int = max(vocabulary.values()) + 1
        config = _read_tokenizer_config(path)
        self.eos_id: int = vocabulary[self._find_eos(vocabulary, config, eos_token)]
        self.fingerprint: str = f"json-{_digest(text.encode(), self.eos_id)}"
        self.chat_template: ChatTemplate = _find_chat_template(path, config)

    def encode(self, text: bytes | str) -> np.ndarray:
        return self.encode_batch([text if isinstance(text, str) else text.decode(errors="replace")])[0]

    def encode_batch(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        ids = [one.ids for one in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]
        lengths = np.fromiter(map(len, ids), np.int64, len(ids))
        return np.fromiter(chain.from_iterable(ids), np.uint32, int(lengths.sum())), lengths

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids` without special tokens."""
        return self._tokenizer.decode([int(i) for i in ids])

    def __reduce__(self) -> tuple[Any, ...]:
        return JsonTokenizer, (self.path, self._eos_token)

    def _find_eos(self, vocabulary: dict[str, int], config: dict[str, Any], wanted: str | None) -> str:
        named = config.get("eos_token")
        named = named.get("content") if isinstance(named, dict) else named
        found = next((name for name in (wanted, named, *EOS_NAMES) if name in vocabulary), None)
        if found is None or (wanted is not None and wanted not in vocabulary):
            raise ConfigError(
                f"data.eos_token: {self.path} has no token {wanted!r}; name one that ends a document, such as"
                f" {sorted(vocabulary, key=lambda word: vocabulary[word])[-1]!r}"
                if wanted is not None
                else f"data.tokenizer: {self.path} doesn't say which token ends a document; name it as data.eos_token"
            )
        return found


class SentencePieceTokenizer:
    """Tokenizer of a SentencePiece model; documents end with its </s> unless another piece is given.

    Raises ConfigError if the file can't be used, MusterError if the library is missing.
    """

    def __init__(self, path: Path, eos_token: str | None = None) -> None:
        sentencepiece = _import("sentencepiece", "data")
        self.path, self._eos_token = path, eos_token
        try:
            data = path.read_bytes()
            self._processor: Any = sentencepiece.SentencePieceProcessor(model_proto=data)
        except (OSError, RuntimeError) as error:
            raise ConfigError(f"data.tokenizer: {path} can't be read as a SentencePiece model") from error
        self.vocab_size: int = self._processor.vocab_size()
        self.eos_id: int = self._processor.eos_id() if eos_token is None else self._processor.piece_to_id(eos_token)
        if self.eos_id < 0 or (eos_token is not None and self.eos_id == self._processor.unk_id()):
            raise ConfigError(f"data.eos_token: {path} has no piece {eos_token or '</s>'!r} to end documents with")
        self.fingerprint: str = f"spm-{_digest(data, self.eos_id)}"
        self.chat_template: ChatTemplate = _find_chat_template(path, _read_tokenizer_config(path))

    def encode(self, text: bytes | str) -> np.ndarray:
        return self.encode_batch([text if isinstance(text, str) else text.decode(errors="replace")])[0]

    def encode_batch(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        ids = self._processor.encode(list(texts), out_type=int)
        lengths = np.fromiter(map(len, ids), np.int64, len(ids))
        return np.fromiter(chain.from_iterable(ids), np.uint32, int(lengths.sum())), lengths

    def decode(self, ids: Iterable[int]) -> str:
        return self._processor.decode([int(i) for i in ids])

    def __reduce__(self) -> tuple[Any, ...]:
        return SentencePieceTokenizer, (self.path, self._eos_token)


def load_tokenizer(name: str, eos_token: str | None = None) -> Tokenizer:
    """Load the tokenizer that `data.tokenizer` names.

    `name` is `bytes`, a tokenizer.json or a directory with one, or a SentencePiece model (*.model). Raises ConfigError
    if there is none, MusterError if a library is missing.
    """
    if name == BYTES:
        if eos_token is not None:
            raise ConfigError(f"data.eos_token {eos_token!r} can't be set for the tokenizer bytes, which ends with 256")
        return ByteTokenizer()
    path = Path(name)
    if path.is_dir():
        found = [path / file for file in ("tokenizer.json", "tokenizer.model") if (path / file).is_file()]
        if not found:
            raise ConfigError(f"data.tokenizer: {path} has neither tokenizer.json nor tokenizer.model")
        path = found[0]
    if not path.is_file():
        raise ConfigError(
            f"data.tokenizer: there is no file {name!r}; give bytes, a tokenizer.json, a directory with one, or a"
            " SentencePiece model"
        )
    if path.suffix == ".model":
        return SentencePieceTokenizer(path, eos_token)
    return JsonTokenizer(path, eos_token)


def _import(module: str, extra: str) -> Any:
    from importlib import import_module

    try:
        return import_module(module)
    except ModuleNotFoundError:
        raise MusterError(
            f"this tokenizer needs {module}, which is not installed: pip install 'muster-llm[{extra}]'"
        ) from None


def _digest(data: bytes, end: int) -> str:
    return hashlib.sha256(data + f"\0{end}".encode()).hexdigest()[:12]


def _read_tokenizer_config(path: Path) -> dict[str, Any]:
    try:
        content = json.loads((path.parent / "tokenizer_config.json").read_bytes())
        return content if isinstance(content, dict) else {}
    except (OSError, ValueError):
        return {}


def _find_chat_template(path: Path, config: dict[str, Any]) -> ChatTemplate:
    """Return the chat template in a tokenizer's directory: chat_template.jinja, or the one in its configuration."""
    special = {}
    for key, value in config.items():
        if key.endswith("_token") and isinstance(
            text := value.get("content") if isinstance(value, dict) else value, str
        ):
            special[key] = text
    tokens = tuple(special.items())
    if (file := path.parent / "chat_template.jinja").is_file():
        return read_template(file, tokens)
    text = config.get("chat_template")
    if isinstance(text, list):
        text = next((one.get("template") for one in text if one.get("name") == "default"), None)
    return ChatTemplate(text, tokens) if isinstance(text, str) else ChatTemplate(special_tokens=tokens)
