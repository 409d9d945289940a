"""Saving: every rank writes its own boxes once, and the checkpoint appears as a whole or not at all."""

import json
import os
import shutil
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import muster
from muster.checkpoint.folder import folder_of, prune, publish, remove_stale, sync_folder, write_durably
from muster.checkpoint.manifest import MANIFEST, Manifest, RankList, StoredPiece, StoredTensor, merge
from muster.checkpoint.piece import Piece, dtype_name
from muster.spec.errors import MusterError
from muster.spec.layout import Box

Exchange = Callable[[str | None], Sequence[str | None]]
"""Hands a short text to every rank and returns all ranks' texts in rank order. It must wait with a time limit."""

_SAFETENSORS_NAMES = {
    "float64": "F64",
    "float32": "F32",
    "bfloat16": "BF16",
    "float16": "F16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "uint8": "U8",
    "bool": "BOOL",
}


def save(
    root: Path,
    step: int,
    pieces: Sequence[Piece],
    info: Mapping[str, Any],
    rank: int,
    world_size: int,
    exchange: Exchange,
    keep_last: int = 2,
) -> Path:
    """Writes the checkpoint `root/step-…` together with all other ranks, and returns its folder.

    `pieces` are all that this rank holds: those with copy_index 0 are written. `info` holds the manifest's `plan`,
    `model` and `counters`. Afterwards the `keep_last` newest checkpoints remain (0: all). `root` must be the same
    folder for all ranks. When any rank fails, every rank raises MusterError and earlier checkpoints are untouched.
    """
    folder = folder_of(root, step)
    beside = folder.with_name(folder.name + ".tmp")

    def together(action: Callable[[], None], only_first_rank: bool = False) -> None:
        cause, problem = None, None
        if rank == 0 or not only_first_rank:
            try:
                action()
            except Exception as error:  # whatever it is, the others must hear of it or they wait in vain
                cause, problem = error, f"{_sentence(error, beside)} (rank {rank})"
        if problems := [text for text in exchange(problem) if text]:
            raise MusterError(f"the checkpoint of step {step} was not saved: {problems[0]}") from cause

    def commit() -> None:
        _write_manifest(beside, step, info, world_size)
        publish(beside, folder)

    try:
        together(lambda: _prepare(root, beside), only_first_rank=True)
        together(lambda: write_rank(beside, rank, pieces))
        together(commit, only_first_rank=True)
    except MusterError:
        if rank == 0:
            shutil.rmtree(beside, ignore_errors=True)
        raise
    if rank == 0:
        prune(root, keep_last, folder)
    return folder


def alone(text: str | None) -> list[str | None]:
    """The exchange of a run of one rank."""
    return [text]


def write_rank(folder: Path, rank: int, pieces: Sequence[Piece]) -> None:
    """Writes this rank's tensor file (none when it has nothing to write) and the list of what is in it, durably."""
    file = f"rank-{rank:05}.safetensors"
    parts = _parts_to_write(pieces)
    tensors: dict[str, StoredTensor] = {}
    if parts:
        with open(folder / file, "wb") as out:
            out.write(_header([(part.key, part.tensor) for part in parts]))
            for part in parts:
                data = tensor_bytes(part.tensor)
                out.write(data)
                piece = StoredPiece(
                    file=file,
                    key=part.key,
                    start=part.box.start,
                    size=part.box.size,
                    crc32=zlib.crc32(data),
                    nbytes=data.nbytes,
                )
                before = tensors[part.name].pieces if part.name in tensors else ()
                tensors[part.name] = StoredTensor(
                    shape=part.shape, dtype=dtype_name(part.tensor), pieces=(*before, piece)
                )
            out.flush()
            os.fsync(out.fileno())
    files = {file: (folder / file).stat().st_size} if parts else {}
    write_durably(_list_path(folder, rank), RankList(files=files, tensors=tensors).model_dump_json())
    sync_folder(folder)


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The numbers of a tensor as bytes in row-major order; copied only from a device or from strided memory."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data


class _Part(NamedTuple):
    """One box to write."""

    name: str
    key: str
    shape: tuple[int, ...]
    box: Box
    tensor: Tensor


def _parts_to_write(pieces: Sequence[Piece]) -> list[_Part]:
    parts = []
    for piece in pieces:
        for index, (box, tensor) in enumerate(piece.parts()):
            if piece.layout.copy_index == 0 and box.numel:
                key = f"{piece.name}#{index}" if index else piece.name
                parts.append(_Part(piece.name, key, piece.layout.shape, box, tensor))
    # Wide types first, so that every tensor in the file is aligned and can be mapped into memory.
    return sorted(parts, key=lambda part: -part.tensor.element_size())


def _header(tensors: list[tuple[str, Tensor]]) -> bytes:
    """The start of a safetensors file that holds `tensors` in this order."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for key, tensor in tensors:
        start, end = end, end + tensor.numel() * tensor.element_size()
        if (dtype := _SAFETENSORS_NAMES.get(dtype_name(tensor))) is None:
            raise MusterError(
                f"can't store {key} as {dtype_name(tensor)}: expected one of {', '.join(_SAFETENSORS_NAMES)}"
            )
        entries[key] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _prepare(root: Path, beside: Path) -> None:
    root.mkdir(parents=True, exist_ok=True)
    remove_stale(root)
    beside.mkdir()


def _write_manifest(beside: Path, step: int, info: Mapping[str, Any], world_size: int) -> None:
    paths = [_list_path(beside, rank) for rank in range(world_size)]
    if missing := [path for path in paths if not path.exists()]:
        raise MusterError(f"there is no {missing[0]}: checkpoints need a folder that all ranks share")
    all_ranks = merge([RankList.model_validate_json(path.read_bytes()) for path in paths])
    manifest = Manifest(
        step=step,
        muster=muster.__version__,
        torch=torch.__version__,
        plan=info["plan"],
        model=info["model"],
        counters=info["counters"],
        files=all_ranks.files,
        tensors=all_ranks.tensors,
    )
    write_durably(beside / MANIFEST, manifest.model_dump_json())
    for path in paths:
        path.unlink()


def _list_path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05}.json"


def _sentence(error: Exception, beside: Path) -> str:
    if isinstance(error, OSError):
        return f"could not write {error.filename or beside}: {error.strerror or error}"
    return str(error) if isinstance(error, MusterError) else f"{type(error).__name__}: {error}"
