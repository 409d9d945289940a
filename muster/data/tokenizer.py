"""Tokenizers: text to token ids and back."""

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from itertools import chain, groupby
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from muster.config.run_paths import BYTES
from muster.data.chat import ChatTemplate, read_template
from muster.spec.errors import ConfigError, MusterError

EOS_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[SEP]")
"""End-of-document tokens, in the order in which they are tried if the tokenizer's files name none."""
BOS_NAMES = ("<|begin_of_text|>", "<s>", "<bos>", "[CLS]")
"""Begin-of-document tokens, likewise; tried only where `data.add_bos` asks for one."""
TEMPLATE_FILE = "chat_template.jinja"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    TEMPLATE_FILE,
    "chat_template.json",
)
"""Files of a tokenizer in a Hugging Face directory, as far as it has them."""


class Tokenizer(Protocol):
    """Interface of tokenizers."""

    vocab_size: int
    eos_id: int
    """Id of the token that ends each document."""
    bos_id: int | None
    """Id of the token that begins each document; None: none does."""
    special_ids: dict[str, int | None]
    """Ids of the tokens that Hugging Face calls `bos`, `eos` and `pad`; None where the tokenizer has no such token."""
    fingerprint: str
    """Identifier that differs between tokenizers that give different ids, saved in token stores and checkpoints."""
    chat_template: ChatTemplate
    """Template that renders dialogues."""

    def encode(self, text: bytes | str) -> np.ndarray:
        """Return the ids of `text`, without the tokens that begin and end a document."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids of several texts, concatenated, and the number of ids of each text (int64).

        No tokens that begin or end documents are added.
        """
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`."""
        ...

    def decode_all(self, ids: Iterable[int]) -> str:
        """Return the text of `ids` with the special tokens among them."""
        ...


class ByteTokenizer:
    """Tokenizer whose ids are the 256 bytes; 256 ends a document."""

    vocab_size: int = 257
    eos_id: int = 256
    bos_id: int | None = None
    special_ids: dict[str, int | None] = {"bos": None, "eos": 256, "pad": None}
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

    def decode_all(self, ids: Iterable[int]) -> str:
        return b"".join(bytes([i]) if i < 256 else EOS_NAMES[0].encode() for i in ids).decode(errors="replace")


class JsonTokenizer:
    """Tokenizer of a tokenizer.json, by the library `tokenizers`.

    tokenizer_config.json beside it names the end-of-document token and the chat template. Documents begin with the
    token that its post-processor adds (Llama 3, Mistral), or as `add_bos` says. Special tokens that occur in a text are
    recognized. Raises ConfigError if the file can't be used, MusterError if the library is missing.
    """

    def __init__(self, path: Path, eos_token: str | None = None, add_bos: bool | None = None) -> None:
        tokenizers = _import("tokenizers", "hf")
        self.path, self._eos_token, self._add_bos = path, eos_token, add_bos
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
        added = self._first_added_id()
        named = _named_id("bos_token", config, vocabulary)
        if add_bos and added is None and named is None:
            named = next((vocabulary[name] for name in BOS_NAMES if name in vocabulary), None)
        self.bos_id: int | None = _chosen_bos(path, add_bos, added, named)
        bos = added if named is None else named
        self.special_ids = {"bos": bos, "eos": self.eos_id, "pad": _named_id("pad_token", config, vocabulary)}
        self.fingerprint: str = f"json-{_digest(text.encode(), self.eos_id, self.bos_id)}"
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
        return _restored, (JsonTokenizer, self.path, self._eos_token, self._add_bos, self.chat_template)

    def decode_all(self, ids: Iterable[int]) -> str:
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=False)

    def token_text(self, number: int) -> str | None:
        """Return the token of an id; None where there is none."""
        return self._tokenizer.id_to_token(number)

    def _first_added_id(self) -> int | None:
        """Return the id of the special token that the post-processor puts before a text; None if it puts none."""
        found = self._tokenizer.encode("a")
        return found.ids[0] if found.ids and found.special_tokens_mask[0] and found.ids[0] != self.eos_id else None

    def _find_eos(self, vocabulary: dict[str, int], config: dict[str, Any], wanted: str | None) -> str:
        names = (wanted, _token_text(config.get("eos_token")), *EOS_NAMES)
        found = next((name for name in names if isinstance(name, str) and name in vocabulary), None)
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

    They begin with its <s> where tokenizer_config.json beside it, or `add_bos`, says so. Control pieces such as <s>
    that occur in a text are recognized, which chat templates need. Raises ConfigError if the file can't be used,
    MusterError if the library is missing.
    """

    def __init__(self, path: Path, eos_token: str | None = None, add_bos: bool | None = None) -> None:
        sentencepiece = _import("sentencepiece", "data")
        self.path, self._eos_token, self._add_bos = path, eos_token, add_bos
        try:
            data = path.read_bytes()
            self._processor: Any = sentencepiece.SentencePieceProcessor(model_proto=data)
        except (OSError, RuntimeError) as error:
            raise ConfigError(f"data.tokenizer: {path} can't be read as a SentencePiece model") from error
        self.vocab_size: int = self._processor.vocab_size()
        self.eos_id: int = self._processor.eos_id() if eos_token is None else self._processor.piece_to_id(eos_token)
        if self.eos_id < 0 or (eos_token is not None and self.eos_id == self._processor.unk_id()):
            raise ConfigError(f"data.eos_token: {path} has no piece {eos_token or '</s>'!r} to end documents with")
        config = _read_tokenizer_config(path)
        ids = {"bos": self._processor.bos_id(), "eos": self.eos_id, "pad": self._processor.pad_id()}
        self.special_ids = {name: number if number >= 0 else None for name, number in ids.items()}
        adds = config.get("add_bos_token", config.get("tokenizer_class") in _CLASSES_WITH_BOS)
        named = self.special_ids["bos"]
        self.bos_id: int | None = _chosen_bos(path, add_bos, named if adds else None, named)
        self.fingerprint: str = f"spm-{_digest(data, self.eos_id, self.bos_id)}"
        self.chat_template: ChatTemplate = _find_chat_template(path, config)
        control = [number for number in range(self.vocab_size) if self._processor.is_control(number)]
        self._control = {self._processor.id_to_piece(number): number for number in control}
        self._control_pattern = re.compile(f"({'|'.join(map(re.escape, self._control))})") if control else None

    def encode(self, text: bytes | str) -> np.ndarray:
        return self.encode_batch([text if isinstance(text, str) else text.decode(errors="replace")])[0]

    def encode_batch(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        ids = self._processor.encode(list(texts), out_type=int)
        if (pattern := self._control_pattern) is not None:
            for index, text in enumerate(texts):
                if pattern.search(text):
                    ids[index] = list(chain.from_iterable(map(self._encode_part, pattern.split(text))))
        lengths = np.fromiter(map(len, ids), np.int64, len(ids))
        return np.fromiter(chain.from_iterable(ids), np.uint32, int(lengths.sum())), lengths

    def decode(self, ids: Iterable[int]) -> str:
        return self._processor.decode([int(i) for i in ids])

    def decode_all(self, ids: Iterable[int]) -> str:
        names = {number: piece for piece, number in self._control.items()}
        runs = groupby(map(int, ids), key=lambda number: number in names)
        return "".join(
            "".join(names[number] for number in run) if is_control else self._processor.decode(list(run))
            for is_control, run in runs
        )

    def _encode_part(self, part: str) -> list[int]:
        """Return the ids of a control piece, or of the text between two."""
        return [self._control[part]] if part in self._control else self._processor.encode(part, out_type=int)

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (SentencePieceTokenizer, self.path, self._eos_token, self._add_bos, self.chat_template)


_CLASSES_WITH_BOS = ("LlamaTokenizer", "LlamaTokenizerFast", "GemmaTokenizer", "GemmaTokenizerFast")
"""Classes of `transformers` that add <s> unless tokenizer_config.json says otherwise."""


def _restored(kind: Any, path: Path, eos_token: str | None, add_bos: bool | None, template: ChatTemplate) -> Tokenizer:
    """Return a pickled tokenizer."""
    found = kind(path, eos_token, add_bos)
    found.chat_template = template
    return found


def bos_before(ids: np.ndarray, tokenizer: Tokenizer) -> list[int]:
    """Return the begin-of-document token that a document's ids lack, as a list; empty where they need none."""
    lacks = tokenizer.bos_id is not None and not (len(ids) and ids[0] == tokenizer.bos_id)
    return [tokenizer.bos_id] if lacks and tokenizer.bos_id is not None else []


def load_tokenizer(name: str, eos_token: str | None = None, add_bos: bool | None = None) -> Tokenizer:
    """Load the tokenizer that `data.tokenizer` names.

    `name` is `bytes`, a tokenizer.json or a directory with one, or a SentencePiece model (*.model). `add_bos` is
    `data.add_bos`. Raises ConfigError if there is none, MusterError if a library is missing.
    """
    if name == BYTES:
        if eos_token is not None:
            raise ConfigError(f"data.eos_token {eos_token!r} can't be set for the tokenizer bytes, which ends with 256")
        if add_bos:
            raise ConfigError("data.add_bos: the tokenizer bytes has no token that begins a document; leave it out")
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
        return SentencePieceTokenizer(path, eos_token, add_bos)
    return JsonTokenizer(path, eos_token, add_bos)


def _import(module: str, extra: str) -> Any:
    from importlib import import_module

    try:
        return import_module(module)
    except ModuleNotFoundError:
        raise MusterError(
            f"this tokenizer needs {module}, which is not installed: pip install 'muster-llm[{extra}]'"
        ) from None


def _digest(data: bytes, eos: int, bos: int | None) -> str:
    begin = "" if bos is None else f"\0bos {bos}"
    return hashlib.sha256(data + f"\0{eos}{begin}".encode()).hexdigest()[:12]


def _chosen_bos(path: Path, add_bos: bool | None, added: int | None, named: int | None) -> int | None:
    """Return the id of the token that begins documents, or None.

    `added` is the one that the tokenizer adds of itself, `named` the one that its files name. Raises ConfigError where
    `add_bos` asks for one and there is none.
    """
    if add_bos is None or not add_bos:
        return added if add_bos is None else None
    if added is None and named is None:
        raise ConfigError(
            f"data.add_bos: {path} doesn't say which token begins a document; leave data.add_bos out, or name a"
            " bos_token in its tokenizer_config.json"
        )
    return named if added is None else added


def _token_text(value: object) -> object:
    """Return a special token's text: configurations hold it as a text, or as an object with its properties."""
    return value.get("content") if isinstance(value, dict) else value


def _named_id(key: str, config: dict[str, Any], vocabulary: dict[str, int]) -> int | None:
    name = _token_text(config.get(key))
    return vocabulary.get(name) if isinstance(name, str) else None


def _read_tokenizer_config(path: Path) -> dict[str, Any]:
    """Return tokenizer_config.json beside a tokenizer, over special_tokens_map.json; empty where there is neither."""
    found: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        try:
            content = json.loads((path.parent / name).read_bytes())
        except (OSError, ValueError):
            continue
        found |= content if isinstance(content, dict) else {}
    return found


def _find_chat_template(path: Path, config: dict[str, Any]) -> ChatTemplate:
    """Return the chat template in a tokenizer's directory: chat_template.jinja, or the one in its configuration."""
    special = {}
    for key, value in config.items():
        if key.endswith("_token") and isinstance(text := _token_text(value), str):
            special[key] = text
    tokens = tuple(special.items())
    if (file := path.parent / TEMPLATE_FILE).is_file():
        return read_template(file, tokens)
    text = config.get("chat_template")
    if isinstance(text, list):
        text = next((one.get("template") for one in text if one.get("name") == "default"), None)
    return ChatTemplate(text, tokens) if isinstance(text, str) else ChatTemplate(special_tokens=tokens)
