"""safetensors files: eight bytes with the header's length, a JSON header, and the tensors' bytes."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from muster.checkpoint.dtypes import SAFETENSORS_NAMES
from muster.checkpoint.tensors import ArrayFile, TensorMeta
from muster.layout.tensor_layout import Box
from muster.spec.errors import MusterError

DTYPE_NAMES = {getattr(torch, name): word for name, word in SAFETENSORS_NAMES.items()}
DTYPE_NAMES |= {torch.int16: "I16", torch.int8: "I8"}
"""Names of dtypes in the format."""

_DTYPES = {word: dtype for dtype, word in DTYPE_NAMES.items()}
_LONGEST_HEADER_BYTES = 100_000_000
"""Limit of the format's own library."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Tensor in a file, with the offset of its first byte in the file."""

    meta: TensorMeta
    offset: int


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Read the tensors' entries of a file.

    Raises MusterError if it can't be read, is truncated, or has an unknown dtype.
    """
    try:
        with open(path, "rb") as file:
            size = path.stat().st_size
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(size - 8, _LONGEST_HEADER_BYTES):
                raise MusterError(f"{path} is damaged: it is not a safetensors file, or truncated in its header")
            content = json.loads(file.read(length))
    except OSError as error:
        raise MusterError(f"could not read {path}: {error.strerror}") from error
    except ValueError as error:
        raise MusterError(f"{path} is damaged: its header is not JSON") from error
    try:
        return {
            name: _entry(path, name, fields, 8 + length, size)
            for name, fields in content.items()
            if name != "__metadata__"
        }
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise MusterError(f"{path} is damaged: its header doesn't describe tensors") from error


def _entry(path: Path, name: str, fields: Mapping, start: int, size: int) -> TensorEntry:
    if (dtype := _DTYPES.get(fields["dtype"])) is None:
        raise MusterError(f"{path}: {name} is {fields['dtype']}, but only {', '.join(_DTYPES)} can be read")
    meta = TensorMeta(tuple(int(length) for length in fields["shape"]), dtype)
    begin, end = (int(offset) for offset in fields["data_offsets"])
    if end - begin != meta.nbytes or begin < 0:
        raise MusterError(f"{path} is damaged: {name} has {end - begin} bytes, but {meta} needs {meta.nbytes}")
    if start + end > size:
        raise MusterError(f"{path} is damaged: it has {size} bytes, but {name} ends at byte {start + end}")
    return TensorEntry(meta, start + begin)


def write_header(out: BinaryIO, tensors: Iterable[tuple[str, TensorMeta]]) -> None:
    """Write the header of a file with these tensors in this order. Raises MusterError for an unsupported dtype."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for key, meta in tensors:
        if (dtype := DTYPE_NAMES.get(meta.dtype)) is None:
            raise MusterError(f"can't store {key} as {meta.dtype}: expected one of {', '.join(map(str, DTYPE_NAMES))}")
        start, end = end, end + meta.nbytes
        entries[key] = {"dtype": dtype, "shape": list(meta.shape), "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    out.write(len(text).to_bytes(8, "little") + text)


class SafetensorsFiles:
    """Tensors of several files (a `TensorSource`)."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._entries: dict[str, tuple[Path, TensorEntry]] = {}
        for path in paths:
            for name, entry in read_header(path).items():
                if name in self._entries:
                    raise MusterError(f"{name} is in two files, {self._entries[name][0]} and {path}")
                self._entries[name] = (path, entry)
        self.metas: Mapping[str, TensorMeta] = {name: entry.meta for name, (_, entry) in self._entries.items()}

    def read(self, name: str, box: Box) -> Tensor:
        path, entry = self._entries[name]
        return ArrayFile(path).read_box(entry.offset, entry.meta, box)

    def file_of(self, name: str) -> Path:
        """Return the file of a tensor."""
        return self._entries[name][0]
