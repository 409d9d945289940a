"""Saving: every rank writes its own boxes once, and the checkpoint appears as a whole or not at all."""

import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from muster.checkpoint.checkpoint_dir import (
    KEEP_LAST_TWO,
    RetentionPolicy,
    checkpoint_path,
    prune,
    publish,
    remove_incomplete,
)
from muster.checkpoint.local_shard import LocalShard, dtype_name
from muster.checkpoint.manifest import MANIFEST, Manifest, TensorIndex, dump_manifest, merge_indexes
from muster.checkpoint.rank_file import (
    WriteItem,
    column_strips,
    local_share,
    rank_index_path,
    sort_for_file,
    write_rank_file,
)
from muster.config.yaml_writer import write_durably
from muster.layout.tensor_layout import slices_within
from muster.spec.errors import MusterError
from muster.version import __version__

ErrorExchange = Callable[[str | None], Sequence[str | None]]
"""Hands a short text to every rank and returns the ranks' texts. It must wait with a time limit.

One that returns only the texts that some rank has given serves as well.
"""


def save(
    root: Path,
    step: int,
    shards: Sequence[LocalShard],
    info: Mapping[str, Any],
    rank: int,
    world_size: int,
    exchange: ErrorExchange,
    retention: RetentionPolicy = KEEP_LAST_TWO,
) -> Path:
    """Writes the checkpoint `root/step-…` together with all other ranks, and returns its folder.

    `pieces` are all that this rank holds: of a part that several hold, each writes its share. `info` holds the
    manifest's `plan`, `model`, `counters` and, if there is one, `run`. Afterwards those checkpoints remain that `keep`
    says. `root` must be the same folder for all ranks, and its parent must exist. When any rank fails, every rank
    raises MusterError and earlier checkpoints are untouched.
    """
    write = partial(write_local_shards, rank=rank, shards=shards)
    return save_using(write, root, step, info, rank, world_size, exchange, retention)


def save_using(
    write: Callable[[Path], None],
    root: Path,
    step: int,
    info: Mapping[str, Any],
    rank: int,
    world_size: int,
    exchange: ErrorExchange,
    retention: RetentionPolicy,
) -> Path:
    """As `save`, where `write` writes this rank's part into the folder that it is given."""
    folder = checkpoint_path(root, step)
    beside = folder.with_name(folder.name + ".tmp")

    def together(action: Callable[[], None], only_first_rank: bool = False) -> None:
        cause, problem = None, None
        if rank == 0 or not only_first_rank:
            try:
                action()
            except Exception as error:  # whatever it is, the others must hear of it or they wait in vain
                cause, problem = error, f"{_format_error(error, beside)} (rank {rank})"
        if problems := [text for text in exchange(problem) if text]:
            raise MusterError(f"the checkpoint of step {step} was not saved: {problems[0]}") from cause

    def commit() -> None:
        write_manifest(beside, step, info, world_size)
        publish(beside, folder)

    try:
        together(lambda: _make_tmp_dir(root, beside), only_first_rank=True)
        together(lambda: write(beside))
        together(commit, only_first_rank=True)
    except MusterError:
        if rank == 0:
            shutil.rmtree(beside, ignore_errors=True)
        raise
    if rank == 0:
        prune(root, retention, folder)
    return folder


def single_rank_exchange(text: str | None) -> list[str | None]:
    """The exchange of a run of one rank."""
    return [text]


def write_local_shards(folder: Path, rank: int, shards: Sequence[LocalShard]) -> None:
    """Writes this rank's share of `pieces` and the list of what is in it, durably."""
    tensors = write_items(shards)
    parts = sort_for_file(tensors)
    write_rank_file(folder, rank, parts, (host_bytes(tensors[part]) for part in parts))


def write_items(shards: Iterable[LocalShard]) -> dict[WriteItem, Tensor]:
    """What this rank writes of `pieces`, and the local tensors that hold it."""
    parts = {}
    for piece in shards:
        dtype, layout = dtype_name(piece.tensor), piece.layout
        index = 0
        for box, tensor in piece.box_views():
            if (own := local_share(layout, box, dtype)) is None:
                continue
            for strip in column_strips(layout, own, dtype):
                key = f"{piece.name}#{index}" if index else piece.name
                parts[WriteItem(piece.name, key, layout.shape, dtype, strip)] = tensor[slices_within(strip, box)]
                index += 1
    return parts


def host_bytes(tensor: Tensor) -> memoryview:
    """The numbers of a tensor as bytes in row-major order; copied only from a device or from strided memory."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data


def _make_tmp_dir(root: Path, tmp_dir: Path) -> None:
    root.mkdir(exist_ok=True)  # its parent must be there: one that vanished may be another disk
    remove_incomplete(root)
    tmp_dir.mkdir()


def write_manifest(folder: Path, step: int, info: Mapping[str, Any], world_size: int) -> None:
    """Makes the manifest of what so many ranks have listed in the folder, durably, and removes their lists."""
    paths = [rank_index_path(folder, rank) for rank in range(world_size)]
    if missing := [path for path in paths if not path.exists()]:
        raise MusterError(f"there is no {missing[0]}: checkpoints need a folder that all ranks share")
    all_ranks = merge_indexes([TensorIndex.model_validate_json(path.read_bytes()) for path in paths])
    manifest = Manifest(**manifest_header(step, info), files=all_ranks.files, tensors=all_ranks.tensors)
    write_durably(folder / MANIFEST, dump_manifest(manifest))
    for path in paths:
        path.unlink()


def manifest_header(step: int, info: Mapping[str, Any]) -> dict[str, Any]:
    """What a manifest says beside its files and tensors."""
    return {
        "step": step,
        "muster": __version__,
        "torch": torch.__version__,
        "plan": info["plan"],
        "model": info["model"],
        "run": info.get("run", {}),
        "counters": info["counters"],
    }


def _format_error(error: Exception, tmp_dir: Path) -> str:
    if isinstance(error, OSError):
        return f"could not write {error.filename or tmp_dir}: {error.strerror or error}"
    return str(error) if isinstance(error, MusterError) else f"{type(error).__name__}: {error}"
