"""Loading under any plan: every rank reads, of whatever pieces were written, the bytes that it needs."""

import difflib
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from muster.checkpoint.folder import file_problem
from muster.checkpoint.manifest import Manifest, StoredPiece, StoredTensor, read_manifest
from muster.checkpoint.piece import Piece, dtype_name
from muster.checkpoint.save import tensor_bytes
from muster.spec.errors import ConfigError, MusterError
from muster.spec.layout import Box, TensorLayout, overlap, within


def load(folder: Path, wanted: Sequence[Piece], convert: bool = False) -> Manifest:
    """Fills the local tensor of every wanted piece from the checkpoint at `folder`, and returns its manifest.

    A piece that is read whole is checked against its crc32; of others only the needed rows are touched. Stored and
    wanted dtypes must be equal unless `convert`. Raises ConfigError when the checkpoint holds other tensors than
    wanted, MusterError when it is damaged; tensors may then be partly filled.
    """
    manifest = read_manifest(folder)
    files = _Files(folder, manifest)
    for piece in wanted:
        stored = _find(folder, manifest, piece, convert)
        for box, into in piece.parts():
            _fill(files, piece.name, stored, box, into)
    return manifest


def read_full(folder: Path, name: str) -> Tensor:
    """One whole tensor of the checkpoint at `folder`, with the dtype it was stored in."""
    manifest = read_manifest(folder)
    stored = _stored(folder, manifest, name)
    whole = Box((0,) * len(stored.shape), stored.shape)
    tensor = torch.empty(stored.shape, dtype=getattr(torch, stored.dtype))
    load(folder, [Piece(name, TensorLayout(name, stored.shape, (whole,)), tensor)])
    return tensor


class _Files:
    """The tensor files of a checkpoint, each opened (mapped into memory) once when first needed."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._folder = folder
        self._bytes = manifest.files
        self._open: dict[str, Any] = {}

    def read(self, name: str, piece: StoredPiece, part: Box) -> Tensor:
        """The box `part` of tensor `name`, which lies in `piece`: a view of the file."""
        path = self._folder / piece.file
        try:
            found = self._file(piece.file, path).get_slice(piece.key)[within(part, piece.box)]
        except (SafetensorError, OSError, IndexError) as error:
            raise MusterError(f"could not read {name} from {path}: {error}") from error
        if tuple(found.shape) != part.size:
            raise MusterError(f"{path} is damaged: {name} there has another size than in the manifest")
        if part == piece.box and zlib.crc32(tensor_bytes(found)) != piece.crc32:
            raise MusterError(f"{path} is damaged: the checksum of {name} is wrong")
        return found

    def _file(self, name: str, path: Path) -> Any:
        if name not in self._open:
            if name not in self._bytes or (problem := file_problem(path, self._bytes[name])) is not None:
                raise OSError(problem if name in self._bytes else "the manifest doesn't list this file")
            self._open[name] = safe_open(path, "pt")
        return self._open[name]


def _fill(files: _Files, name: str, stored: StoredTensor, box: Box, into: Tensor) -> None:
    filled = 0
    for piece in stored.pieces:
        if (common := overlap(box, piece.box)) is not None:
            into[within(common, box)].copy_(files.read(name, piece, common))
            filled += common.numel
    if filled != box.numel:
        raise MusterError(f"the checkpoint holds only {filled} of {box.numel} wanted numbers of {name}")


def _find(folder: Path, manifest: Manifest, piece: Piece, convert: bool) -> StoredTensor:
    stored = _stored(folder, manifest, piece.name)
    if stored.shape != piece.layout.shape:
        raise ConfigError(
            f"{piece.name} has shape {list(stored.shape)} in {folder}, but {list(piece.layout.shape)} is wanted"
        )
    if stored.dtype != dtype_name(piece.tensor) and not convert:
        raise ConfigError(f"{piece.name} is {stored.dtype} in {folder}, but {dtype_name(piece.tensor)} is wanted")
    return stored


def _stored(folder: Path, manifest: Manifest, name: str) -> StoredTensor:
    if name not in manifest.tensors:
        near = difflib.get_close_matches(name, manifest.tensors, n=1, cutoff=0.0)
        hint = f"; the nearest name there is {near[0]}" if near else ""
        raise ConfigError(f"{folder} holds no tensor {name}{hint}")
    return manifest.tensors[name]
