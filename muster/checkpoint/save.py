"""Saving: every rank writes its own boxes once, and the checkpoint appears as a whole or not at all."""

import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import muster
from muster.checkpoint.folder import KEEP_TWO, Keep, folder_of, prune, publish, remove_stale, write_durably
from muster.checkpoint.manifest import MANIFEST, Manifest, RankList, dump, merge
from muster.checkpoint.piece import Piece, dtype_name
from muster.checkpoint.write import Part, file_order, list_path, share_of, strips_of, write_file
from muster.spec.errors import MusterError
from muster.spec.layout import within

Exchange = Callable[[str | None], Sequence[str | None]]
"""Hands a short text to every rank and returns the ranks' texts. It must wait with a time limit.

One that returns only the texts that some rank has given serves as well.
"""


def save(
    root: Path,
    step: int,
    pieces: Sequence[Piece],
    info: Mapping[str, Any],
    rank: int,
    world_size: int,
    exchange: Exchange,
    keep: Keep = KEEP_TWO,
) -> Path:
    """Writes the checkpoint `root/step-…` together with all other ranks, and returns its folder.

    `pieces` are all that this rank holds: of a part that several hold, each writes its share. `info` holds the
    manifest's `plan`, `model`, `counters` and, if there is one, `run`. Afterwards those checkpoints remain that `keep`
    says. `root` must be the same folder for all ranks, and its parent must exist. When any rank fails, every rank
    raises MusterError and earlier checkpoints are untouched.
    """
    write = partial(write_rank, rank=rank, pieces=pieces)
    return save_with(write, root, step, info, rank, world_size, exchange, keep)


def save_with(
    write: Callable[[Path], None],
    root: Path,
    step: int,
    info: Mapping[str, Any],
    rank: int,
    world_size: int,
    exchange: Exchange,
    keep: Keep,
) -> Path:
    """As `save`, where `write` writes this rank's part into the folder that it is given."""
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
        write_manifest(beside, step, info, world_size)
        publish(beside, folder)

    try:
        together(lambda: _prepare(root, beside), only_first_rank=True)
        together(lambda: write(beside))
        together(commit, only_first_rank=True)
    except MusterError:
        if rank == 0:
            shutil.rmtree(beside, ignore_errors=True)
        raise
    if rank == 0:
        prune(root, keep, folder)
    return folder


def alone(text: str | None) -> list[str | None]:
    """The exchange of a run of one rank."""
    return [text]


def write_rank(folder: Path, rank: int, pieces: Sequence[Piece]) -> None:
    """Writes this rank's share of `pieces` and the list of what is in it, durably."""
    tensors = parts_of(pieces)
    parts = file_order(tensors)
    write_file(folder, rank, parts, (tensor_bytes(tensors[part]) for part in parts))


def parts_of(pieces: Iterable[Piece]) -> dict[Part, Tensor]:
    """What this rank writes of `pieces`, and the local tensors that hold it."""
    parts = {}
    for piece in pieces:
        dtype, layout = dtype_name(piece.tensor), piece.layout
        index = 0
        for box, tensor in piece.parts():
            if (own := share_of(layout, box, dtype)) is None:
                continue
            for strip in strips_of(layout, own, dtype):
                key = f"{piece.name}#{index}" if index else piece.name
                parts[Part(piece.name, key, layout.shape, dtype, strip)] = tensor[within(strip, box)]
                index += 1
    return parts


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The numbers of a tensor as bytes in row-major order; copied only from a device or from strided memory."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data


def _prepare(root: Path, beside: Path) -> None:
    root.mkdir(exist_ok=True)  # its parent must be there: one that vanished may be another disk
    remove_stale(root)
    beside.mkdir()


def write_manifest(beside: Path, step: int, info: Mapping[str, Any], world_size: int) -> None:
    """Makes the manifest of what so many ranks have listed in the folder, durably, and removes their lists."""
    paths = [list_path(beside, rank) for rank in range(world_size)]
    if missing := [path for path in paths if not path.exists()]:
        raise MusterError(f"there is no {missing[0]}: checkpoints need a folder that all ranks share")
    all_ranks = merge([RankList.model_validate_json(path.read_bytes()) for path in paths])
    manifest = Manifest(**about(step, info), files=all_ranks.files, tensors=all_ranks.tensors)
    write_durably(beside / MANIFEST, dump(manifest))
    for path in paths:
        path.unlink()


def about(step: int, info: Mapping[str, Any]) -> dict[str, Any]:
    """What a manifest says beside its files and tensors."""
    return {
        "step": step,
        "muster": muster.__version__,
        "torch": torch.__version__,
        "plan": info["plan"],
        "model": info["model"],
        "run": info.get("run", {}),
        "counters": info["counters"],
    }


def _sentence(error: Exception, beside: Path) -> str:
    if isinstance(error, OSError):
        return f"could not write {error.filename or beside}: {error.strerror or error}"
    return str(error) if isinstance(error, MusterError) else f"{type(error).__name__}: {error}"
