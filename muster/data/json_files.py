"""Files of JSON other than plain JSON lines: one list of objects, and compressed files of either kind."""

import codecs
import gzip
import io
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Literal

from muster.spec.errors import ConfigError, MusterError

COMPRESSIONS = (".gz", ".zst")
"""Suffixes of compressed files."""
_CHUNK_BYTES = 1 << 20
JsonLayout = Literal["lines", "list", "object"]


def json_layout(path: Path) -> JsonLayout | None:
    """Return the layout of a JSON file, as its beginning shows it: one object a line, one list of objects, or a single
    object on its only line; None for any other. Raises ConfigError if the file can't be read."""
    with open_decompressed(path) as file:
        line = b""
        while not line.strip() and (chunk := file.readline(_CHUNK_BYTES)):
            line = chunk
        text = line.lstrip(codecs.BOM_UTF8).strip()
        if text.startswith(b"["):
            rest = text[1:] + file.read(1024)
            return "list" if rest.lstrip()[:1] in (b"{", b"]") else None
        if not text.startswith(b"{"):
            return None
        if len(line) == _CHUNK_BYTES:
            text += file.readline()
        if not _is_json(text):
            return None
        return "lines" if file.readline().strip() else "object"


def _is_json(text: bytes) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def open_decompressed(path: Path) -> BinaryIO:
    """Open a file for reading its bytes, decompressed as its suffix says.

    Raises MusterError if the library for it is missing. Reading from it raises ConfigError where the file is damaged.
    """
    if path.suffix == ".gz":
        return io.BufferedReader(_Decompressed(path, gzip.open(path)))
    if path.suffix == ".zst":
        try:
            import pyarrow
        except ModuleNotFoundError:
            raise MusterError(f"{path} needs pyarrow, which is not installed: pip install 'muster-llm[data]'") from None
        return io.BufferedReader(_Decompressed(path, pyarrow.input_stream(str(path), compression="zstd")))
    return path.open("rb")


class _Decompressed(io.RawIOBase):
    """Decompressed bytes of a file, with errors that name it."""

    def __init__(self, path: Path, stream: Any) -> None:
        self._path, self._stream = path, stream

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            data = self._stream.read(len(buffer))
        except (OSError, EOFError, zlib.error) as error:
            raise ConfigError(f"{self._path} can't be decompressed: {error}") from None
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self._stream.close()
        super().close()


def array_rows(path: Path) -> Iterator[tuple[Any, int]]:
    """Yield each item of a file that is one list in JSON, and its approximate size in bytes.

    Only the items that a chunk of the file completes are in memory. Raises ConfigError where the file is not such a
    list.
    """
    with open_decompressed(path) as file:
        text = _Text(path, file)
        text.skip_space()
        if text.take() != "[":
            raise text.error("expected a list of objects")
        text.skip_space()
        if text.peek() == "]":
            return
        while True:
            yield text.value()
            text.skip_space()
            separator = text.take()
            if separator == "]":
                return
            if separator != ",":
                raise text.error("expected ',' or ']' after an object")


class _Text:
    """Text of a file, read chunk by chunk."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path, self._file = path, file
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self._text, self._at, self._lines = "", 0, 1
        self._json = json.JSONDecoder()

    def _read(self, num_bytes: int) -> bool:
        """Append more of the file, and drop what is done; False at its end."""
        chunk = self._file.read(num_bytes)
        try:
            more = self._decoder.decode(chunk, final=not chunk)
        except UnicodeDecodeError as error:
            raise self.error(f"not UTF-8: it has the byte 0x{error.object[error.start]:02x}") from None
        self._lines += self._text.count("\n", 0, self._at)
        self._text, self._at = self._text[self._at :] + more, 0
        return bool(chunk)

    def peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def take(self) -> str:
        character = self.peek()
        self._at += len(character)
        return character

    def skip_space(self) -> None:
        while True:
            while (character := self.peek()) and character.isspace():
                self._at += 1
            if character or not self._read(_CHUNK_BYTES):
                return

    def value(self) -> tuple[Any, int]:
        """Return the next value and its characters; the chunk doubles until it holds the whole value."""
        self.skip_space()
        num_bytes = _CHUNK_BYTES
        while True:
            try:
                found, end = self._json.raw_decode(self._text, self._at)
                if end < len(self._text):  # else it might be a number that goes on
                    size = end - self._at
                    self._at = end
                    return found, size
                problem = "it ends within the list"
            except RecursionError:
                raise self.error("JSON that is nested too deeply to be read") from None
            except json.JSONDecodeError as error:
                problem = f"not JSON: {error.msg.removesuffix(' at')}"
            if not self._read(num_bytes):
                raise self.error(problem)
            num_bytes *= 2

    def error(self, problem: str) -> ConfigError:
        """Return an error about the present place."""
        line = self._lines + self._text.count("\n", 0, self._at)
        return ConfigError(f"{self._path}:{line}: {problem}")
