"""What lies on disk beside the numbers: the manifest of a checkpoint, plain JSON.

A checkpoint is a folder with `manifest.json` and one safetensors file per writing rank.
"""

import json
from math import prod
from pathlib import Path
from typing import Any, Literal

from pydantic import NonNegativeInt, ValidationError

from muster.spec.base import Frozen
from muster.spec.errors import ConfigError, MusterError
from muster.spec.layout import Box

SCHEMA: Literal[1] = 1
"""The newest manifest that this Muster writes and reads."""
MANIFEST = "manifest.json"


class StoredPiece(Frozen):
    """One box of a tensor, whole in one file under one key."""

    file: str
    key: str
    start: tuple[NonNegativeInt, ...]
    size: tuple[NonNegativeInt, ...]
    crc32: NonNegativeInt
    nbytes: NonNegativeInt

    @property
    def box(self) -> Box:
        return Box(self.start, self.size)


class StoredTensor(Frozen):
    """A global tensor and the boxes that cover it, each once."""

    shape: tuple[NonNegativeInt, ...]
    dtype: str
    """As torch calls it, such as `float32`."""
    pieces: tuple[StoredPiece, ...]


class Manifest(Frozen):
    """All that is needed to open a checkpoint under any plan."""

    version: Literal[1] = SCHEMA
    step: NonNegativeInt
    muster: str
    torch: str
    """Versions that wrote it."""
    plan: dict[str, Any]
    model: dict[str, Any]
    counters: dict[str, Any]
    """Where the run stands: samples consumed, hash of the sample stream, and the like."""
    files: dict[str, NonNegativeInt]
    """Bytes of each tensor file."""
    tensors: dict[str, StoredTensor]


class RankList(Frozen):
    """What one rank wrote; the manifest is made of all ranks' lists."""

    files: dict[str, NonNegativeInt]
    tensors: dict[str, StoredTensor]


def merge(lists: list[RankList]) -> RankList:
    """All ranks' lists as one.

    Raises MusterError when ranks disagree about a tensor, or when their boxes don't cover each tensor exactly once.
    """
    files: dict[str, int] = {}
    pieces: dict[str, list[StoredPiece]] = {}
    kinds: dict[str, tuple[tuple[int, ...], str]] = {}
    for part in lists:
        files |= part.files
        for name, tensor in part.tensors.items():
            kind = (tensor.shape, tensor.dtype)
            if kinds.setdefault(name, kind) != kind:
                raise MusterError(f"ranks disagree about {name}: {_kind(kinds[name])} on one, {_kind(kind)} on another")
            pieces.setdefault(name, []).extend(tensor.pieces)
    tensors = {n: StoredTensor(shape=s, dtype=d, pieces=tuple(pieces[n])) for n, (s, d) in kinds.items()}
    for name, tensor in tensors.items():
        numel, held = prod(tensor.shape), sum(piece.box.numel for piece in tensor.pieces)
        if held != numel or len({piece.start for piece in tensor.pieces}) != len(tensor.pieces):
            raise MusterError(f"the ranks' boxes of {name} hold {held} numbers instead of {numel}, each once")
    return RankList(files=files, tensors=tensors)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of the checkpoint at `folder`.

    Raises ConfigError when there is none or it is of a later schema, MusterError when it can't be read.
    """
    path = folder / MANIFEST
    try:
        content = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(f"no checkpoint at {folder}: expected a folder that holds {MANIFEST}") from None
    except OSError as error:
        raise MusterError(f"could not read {path}: {error.strerror}") from error
    try:
        return Manifest.model_validate_json(content)
    except ValidationError as error:
        if (version := _version(content)) > SCHEMA:
            raise ConfigError(
                f"{path} has schema {version}, but this Muster reads schemas up to {SCHEMA}: use a newer Muster"
            ) from None
        raise MusterError(f"{path} is damaged: {_first(error)}") from error


def _kind(kind: tuple[tuple[int, ...], str]) -> str:
    return f"{kind[1]} {list(kind[0])}"


def _version(content: bytes) -> int:
    """The schema that a manifest claims; 0 when it claims none."""
    try:
        return int(json.loads(content)["version"])
    except (ValueError, TypeError, LookupError):
        return 0


def _first(error: ValidationError) -> str:
    problem = error.errors()[0]
    where = ".".join(str(part) for part in problem["loc"])
    return f"{where}: {problem['msg']}" if where else problem["msg"]
