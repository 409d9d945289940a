"""Saving: every rank writes its share of the tensors, and the checkpoint appears as a whole or not at all."""

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
from muster.config.file_writer import write_durably
from muster.layout.tensor_layout import slices_within
from muster.spec.errors import MusterError
from muster.version import __version__

ErrorExchange = Callable[[str | None], Sequence[str | None]]
"""Exchange of error messages: takes this rank's, or None, waits for all ranks with a timeout, and returns all.

It may leave out the ranks without an error.
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
    """Write the checkpoint `root/step-…` together with all other ranks, and return its folder.

    `shards` are all that this rank holds; of a part that several ranks hold, each writes a share. `info` has the
    manifest's `plan`, `model`, `counters` and, if there is one, `run`. Afterwards older checkpoints are removed as
    `retention` says. `root` must be the same directory for all ranks, and its parent must exist. If any rank fails, all
    raise MusterError, and earlier checkpoints are untouched.
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
    """Save as `save` does, with `write` to write this rank's part into the folder that it receives."""
    folder = checkpoint_path(root, step)
    tmp_dir = folder.with_name(folder.name + ".tmp")

    def together(action: Callable[[], None], only_first_rank: bool = False) -> None:
        cause, problem = None, None
        if rank == 0 or not only_first_rank:
            try:
                action()
            except Exception as error:  # any error: the other ranks must learn of it, or they wait in vain
                cause = error
                problem = f"{_format_error(error, tmp_dir)} (rank {rank})"
        if problems := [text for text in exchange(problem) if text]:
            raise MusterError(f"the checkpoint of step {step} was not saved: {problems[0]}") from cause

    def commit() -> None:
        write_manifest(tmp_dir, step, info, world_size)
        publish(tmp_dir, folder)

    try:
        together(lambda: _make_tmp_dir(root, tmp_dir), only_first_rank=True)
        together(lambda: write(tmp_dir))
        together(commit, only_first_rank=True)
    except MusterError:
        if rank == 0:
            shutil.rmtree(tmp_dir, ignore_errors=True)
        raise
    if rank == 0:
        prune(root, retention, folder)
    return folder


def single_rank_exchange(text: str | None) -> list[str | None]:
    """Return the exchange of a single rank's error."""
    return [text]


def write_local_shards(folder: Path, rank: int, shards: Sequence[LocalShard]) -> None:
    """Write this rank's share of `shards` and its index, durably."""
    tensors = write_items(shards)
    items = sort_for_file(tensors)
    write_rank_file(folder, rank, items, (host_bytes(tensors[item]) for item in items))


def write_items(shards: Iterable[LocalShard]) -> dict[WriteItem, Tensor]:
    """Return the boxes of `shards` that this rank writes, each with the local tensor that holds it."""
    items = {}
    for shard in shards:
        dtype, layout = dtype_name(shard.tensor), shard.layout
        index = 0
        for box, tensor in shard.box_views():
            if (local := local_share(layout, box, dtype)) is None:
                continue
            for strip in column_strips(layout, local, dtype):
                key = f"{shard.name}#{index}" if index else shard.name
                items[WriteItem(shard.name, key, layout.shape, dtype, strip)] = tensor[slices_within(strip, box)]
                index += 1
    return items


def host_bytes(tensor: Tensor) -> memoryview:
    """Return a tensor's elements as bytes in row-major order; copied only from a device or from strided memory."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data


def _make_tmp_dir(root: Path, tmp_dir: Path) -> None:
    root.mkdir(exist_ok=True)  # not its parents: if one has vanished, a disk may have been unmounted
    remove_incomplete(root)
    tmp_dir.mkdir()


def write_manifest(folder: Path, step: int, info: Mapping[str, Any], world_size: int) -> None:
    """Merge the indexes of all ranks in the folder into the manifest, durably, and remove them."""
    paths = [rank_index_path(folder, rank) for rank in range(world_size)]
    if missing := [path for path in paths if not path.exists()]:
        raise MusterError(f"{missing[0]} is missing: checkpoints need a directory that all ranks share")
    all_ranks = merge_indexes([TensorIndex.model_validate_json(path.read_bytes()) for path in paths])
    manifest = Manifest(**manifest_header(step, info), files=all_ranks.files, tensors=all_ranks.tensors)
    write_durably(folder / MANIFEST, dump_manifest(manifest))
    for path in paths:
        path.unlink()


def manifest_header(step: int, info: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a manifest other than its files and tensors."""
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
