"""Manifest of a checkpoint: a plain JSON index of its tensors, and the run's plan, model and counters; free of torch.

A checkpoint is a folder with `manifest.json` and one safetensors file per writing rank (docs/checkpoints.md).
"""

import json
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import NonNegativeInt, ValidationError

from muster.checkpoint.dtypes import SAFETENSORS_NAMES, item_bytes
from muster.checkpoint.migrate import from_schema_1
from muster.layout.tensor_layout import Box
from muster.spec.base import Frozen
from muster.spec.errors import ConfigError, MusterError

SCHEMA_VERSION: Literal[2] = 2
"""Newest schema that is read, and the one that is written."""
MANIFEST = "manifest.json"


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """One box of a tensor: contiguous elements in row-major order, with one checksum."""

    file: str
    offset: int
    """Offset in bytes from the beginning of the file."""
    nbytes: int
    crc32: int
    box: Box


class StoredTensor(Frozen):
    """Global tensor and the chunks that cover each of its elements once, as columns with an entry per chunk."""

    shape: tuple[NonNegativeInt, ...]
    dtype: str
    """Name of the dtype in torch, such as `float32`."""
    files: tuple[int, ...]
    """File of each chunk, as an index into the manifest's list of files."""
    offsets: tuple[int, ...]
    """Offset of each chunk in its file, in bytes."""
    crc32: tuple[int, ...]
    starts: tuple[tuple[int, ...], ...]
    """First index of each chunk in the tensor, a column per dimension."""
    sizes: tuple[tuple[int, ...], ...]
    """Size of each chunk, a column per dimension."""

    @property
    def num_chunks(self) -> int:
        return len(self.files)

    @property
    def nbytes(self) -> int:
        """Size of the whole tensor in bytes."""
        return prod(self.shape) * item_bytes(self.dtype)

    @cached_property
    def chunk_starts(self) -> np.ndarray:
        """First index of each chunk in each dimension, [chunks, dimensions]."""
        return _to_rows(self.starts, self.num_chunks)

    @cached_property
    def chunk_sizes(self) -> np.ndarray:
        """Size of each chunk in each dimension, [chunks, dimensions]."""
        return _to_rows(self.sizes, self.num_chunks)

    def chunk_box(self, index: int) -> Box:
        """Return the box of the tensor that chunk `index` holds."""
        return Box(tuple(column[index] for column in self.starts), tuple(column[index] for column in self.sizes))


class TensorIndex(Frozen):
    """Index of the tensors in some files. Each rank writes one, and they are merged in the manifest."""

    files: dict[str, NonNegativeInt]
    """Size of each tensor file in bytes."""
    tensors: dict[str, StoredTensor]

    @cached_property
    def file_names(self) -> tuple[str, ...]:
        """Names of the files in the order that the chunks' file numbers refer to."""
        return tuple(self.files)

    def chunks(self, name: str) -> list[StoredChunk]:
        """Return the chunks of one tensor."""
        tensor = self.tensors[name]
        boxes = [tensor.chunk_box(index) for index in range(tensor.num_chunks)]
        nbytes = [box.numel * item_bytes(tensor.dtype) for box in boxes]
        names = [self.file_names[number] for number in tensor.files]
        rows = zip(names, tensor.offsets, nbytes, tensor.crc32, boxes, strict=True)
        return [StoredChunk(*row) for row in rows]


class Manifest(TensorIndex):
    """Everything needed to open a checkpoint under any plan."""

    version: Literal[2] = SCHEMA_VERSION
    step: NonNegativeInt
    muster: str
    """Version of Muster that wrote the checkpoint."""
    torch: str
    """Version of PyTorch that wrote the checkpoint."""
    plan: dict[str, Any]
    model: dict[str, Any]
    run: dict[str, Any] = {}
    """Complete configuration of the run; empty if no run wrote the checkpoint."""
    counters: dict[str, Any]
    """Progress of the run: samples consumed, hash of the sample stream, and the like."""


def merge_indexes(indexes: list[TensorIndex]) -> TensorIndex:
    """Merge the indexes of all ranks.

    Raises MusterError if ranks disagree about a tensor, or if their boxes don't cover each tensor exactly once.
    """
    files: dict[str, int] = {}
    parts: dict[str, list[tuple[int, StoredTensor]]] = {}
    for index in indexes:
        for name, tensor in index.tensors.items():
            parts.setdefault(name, []).append((len(files), tensor))
        files |= index.files
    return TensorIndex(files=files, tensors={name: _merge_tensor(name, found) for name, found in parts.items()})


def dump_manifest(manifest: TensorIndex) -> str:
    """Format a manifest, or a rank's index, as JSON with one tensor a line."""
    head = manifest.model_dump(mode="json", exclude={"tensors"})
    tensors = ",\n".join(f" {json.dumps(name)}: {one.model_dump_json()}" for name, one in manifest.tensors.items())
    keys = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
    return "{" + ",\n".join([*keys, '"tensors": {\n' + tensors + "\n}"]) + "}\n"


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of the checkpoint at `folder`; one of an earlier schema is migrated, with a message.

    Raises ConfigError if there is none or it is of a later schema, MusterError if it can't be read.
    """
    path = folder / MANIFEST
    try:
        content = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(f"no checkpoint at {folder}: expected a folder that holds {MANIFEST}") from None
    except OSError as error:
        raise MusterError(f"could not read {path}: {error.strerror}") from error
    try:
        manifest = Manifest.model_validate_json(content)
    except ValidationError as error:
        if (version := _schema_version(content)) > SCHEMA_VERSION:
            raise ConfigError(
                f"{path} has schema {version}, but this Muster reads schemas up to {SCHEMA_VERSION}: use a newer Muster"
            ) from None
        if version == 1:
            return _migrate(folder, content)
        raise MusterError(f"{path} is damaged: {_first_error(error)}") from error
    if problem := _find_inconsistency(manifest):
        raise MusterError(f"{path} is damaged: {problem}")
    return manifest


def _migrate(folder: Path, content: bytes) -> Manifest:
    path = folder / MANIFEST
    try:
        manifest = Manifest.model_validate(from_schema_1(folder, json.loads(content)))
    except ValidationError as error:
        raise MusterError(f"{path} is damaged: {_first_error(error)}") from error
    except (LookupError, TypeError, ValueError) as error:
        raise MusterError(f"{path} is damaged: its schema is 1, but a chunk of a tensor is not described") from error
    print(f"{path} has schema 1: read as schema {SCHEMA_VERSION}, which the next save writes")
    return manifest


def _merge_tensor(name: str, parts: list[tuple[int, StoredTensor]]) -> StoredTensor:
    """Merge one tensor's chunks from all ranks. Each part comes with the offset of its file numbers."""
    first = parts[0][1]
    for _, other in parts:
        if (other.shape, other.dtype) != (first.shape, first.dtype):
            raise MusterError(f"ranks disagree about {name}: {_describe(first)} on one, {_describe(other)} on another")
    dims = range(len(first.shape))
    joined = StoredTensor(
        shape=first.shape,
        dtype=first.dtype,
        files=tuple(number + base for base, part in parts for number in part.files),
        offsets=tuple(offset for _, part in parts for offset in part.offsets),
        crc32=tuple(sum_ for _, part in parts for sum_ in part.crc32),
        starts=tuple(tuple(at for _, part in parts for at in part.starts[dim]) for dim in dims),
        sizes=tuple(tuple(n for _, part in parts for n in part.sizes[dim]) for dim in dims),
    )
    numel, held = prod(joined.shape), sum(map(prod, zip(*joined.sizes, strict=True))) if dims else joined.num_chunks
    num_places = len(set(zip(*joined.starts, strict=True))) if dims else 1
    if held != numel or num_places != joined.num_chunks:
        raise MusterError(f"the ranks' boxes of {name} hold {held} elements instead of {numel}, each once")
    return joined


def _to_rows(columns: tuple[tuple[int, ...], ...], num_chunks: int) -> np.ndarray:
    """Return columns as an array [chunks, dimensions]; a tensor without dimensions has no column."""
    return np.array(columns, dtype=np.int64).reshape(len(columns), num_chunks).T


def _find_inconsistency(manifest: Manifest) -> str | None:
    """Return a sentence about inconsistent columns of a tensor; None if all are consistent."""
    for name, one in manifest.tensors.items():
        lengths = {len(column) for column in (one.files, one.offsets, one.crc32, *one.starts, *one.sizes)}
        if len(lengths) != 1 or not len(one.starts) == len(one.sizes) == len(one.shape):
            return f"the columns of {name} have unequal lengths"
        if one.dtype not in SAFETENSORS_NAMES:
            return f"{name} has the dtype {one.dtype}; expected one of {', '.join(SAFETENSORS_NAMES)}"
        if one.offsets and not 0 <= min(one.offsets) <= max(one.offsets) < 2**62:
            return f"a chunk of {name} begins outside every file"
        if one.files and not 0 <= min(one.files) <= max(one.files) < len(manifest.files):
            return f"{name} lies in a file that is not listed"
    return None


def _describe(tensor: StoredTensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"


def _schema_version(content: bytes) -> int:
    """Return the schema version in a manifest; 0 if there is none."""
    try:
        return int(json.loads(content)["version"])
    except (ValueError, TypeError, LookupError):
        return 0


def _first_error(error: ValidationError) -> str:
    problem = error.errors()[0]
    where = ".".join(str(part) for part in problem["loc"])
    return f"{where}: {problem['msg']}" if where else problem["msg"]
