"""In-memory checkpoint of a run: copies of each rank's state in the memory of the nodes, and resuming from them."""

import secrets
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from muster.checkpoint.checkpoint_dir import find_latest, list_checkpoints, step_of
from muster.checkpoint.in_memory.checkpointer import InMemoryCheckpointer, format_ranks
from muster.checkpoint.in_memory.directory import InMemoryDirectory, read_identity, remove_stale
from muster.checkpoint.in_memory.recovery import RecoveredCheckpoint, find_newest
from muster.checkpoint.local_shard import LocalShard
from muster.checkpoint.manifest import Manifest
from muster.checkpoint.save import write_items
from muster.config.run_config import TrainConfig
from muster.parallel.world import World
from muster.spec.errors import MusterError
from muster.spec.formatting import format_bytes

LOAD_TIMEOUT = timedelta(hours=6)
"""Longest time that one rank may need more than another to load; a rank that dies ends the job by itself."""


def open_in_memory_checkpoint(
    train: TrainConfig, world: World, run_dir: Path, shards: Sequence[LocalShard]
) -> InMemoryCheckpointer | None:
    """Open this rank's part of the in-memory checkpoint; None for a run without one. All ranks call it.

    Raises MusterError where there is no place or too little room.
    """
    if not train.keeps_state_in_memory:
        return None
    if (identity := read_identity(run_dir)) is None:
        raise MusterError(f"{run_dir} doesn't name its in-memory checkpoint: start it with muster train")
    root = Path(train.in_memory_checkpoint_dir.replace("{rank}", str(world.rank)))
    removed = [] if world.generation else remove_stale(root)
    directory = InMemoryDirectory(root, run_dir, identity.id)
    checkpointer = InMemoryCheckpointer(
        world.rank,
        directory,
        _host_of(world.store),
        world.broadcast_object(secrets.token_hex(8)),
        world.all_gather_object,
    )
    own = "train.in_memory_checkpoint_every", "set it to 0"
    if train.elastic:
        own = "train.elastic", "set train.recovery checkfree, which keeps no copies"
    try:
        checkpointer.require_capacity(sum(part.nbytes for part in write_items(shards)), world.all_gather_object, *own)
    except Exception:  # too little room, or another rank is lost
        checkpointer.close(delete=False)
        raise
    for leftover in removed:
        print(
            f"removed {leftover.path}, an in-memory checkpoint of {leftover.run_dir} that nobody can resume from",
            flush=True,
        )
    if world.rank == 0:
        every = _steps(1 if train.keeps_every_step else train.in_memory_checkpoint_every)
        print(f"in-memory checkpoint every {every} {checkpointer.describe_location()}", flush=True)
    return checkpointer


def load_in_memory_checkpoint(
    world: World,
    checkpointer: InMemoryCheckpointer,
    run_dir: Path,
    stored_shards: Callable[[Manifest], Sequence[LocalShard]],
    max_step: int,
) -> Manifest | None:
    """Load the in-memory checkpoint of a step up to `max_step` if it is as new as the checkpoints on disk.

    `stored_shards` returns this rank's shards that a checkpoint with the given manifest has to hold.
    None where there is none, or it can't be read. All ranks call it; rank 0 prints what is lost. Raises MusterError
    where it can't be read and there is no checkpoint on disk.
    """
    world.heartbeat.update("load")
    found = find_newest(checkpointer, world.all_gather_object, max_step)
    on_disk = world.broadcast_object(_latest_step_on_disk(run_dir / "checkpoints", found.newest))
    manifest, received_bytes = None, 0
    lines: list[str] = []
    if found.newest is not None and found.newest.step >= on_disk:
        manifest = found.newest.manifest
        problem = _load(found.newest, stored_shards(manifest))
        told = [problem, found.newest.files.received_bytes]
        everyone = world.all_gather_object_via_store("recall", told, LOAD_TIMEOUT)
        received_bytes = sum(count for _, count in everyone)
        if problems := [text for text, _ in everyone if text]:
            manifest = None
            lost = f"the in-memory checkpoint of step {found.newest.step} can't be read: {problems[0]}"
            if not on_disk:  # parameters are partly filled, and nothing else would fill them
                raise MusterError(f"{lost}; there is no checkpoint on disk: try again, or --fresh starts anew")
            lines.append(lost)
        else:
            found.newest.copy_to_other_nodes(checkpointer, world.all_gather_object)
            world.all_gather_object_via_store("copied", None, LOAD_TIMEOUT)
    steps_done = on_disk if manifest is None else manifest.step
    for step, ranks in found.incomplete[:1]:
        if step > steps_done:
            lost_steps = f"step {step} is" if step == steps_done + 1 else f"steps {steps_done + 1} to {step} are"
            lost = f"the in-memory checkpoint of step {step} has lost the parts of {format_ranks(ranks)}"
            lines.append(f"{lost}: {lost_steps} repeated")
    if steps_done:
        source = "" if manifest is None else " from memory"
        if manifest is not None and received_bytes:
            source += f", {format_bytes(received_bytes)} from that of other nodes"
        lines.append(f"resuming {run_dir} after step {steps_done}{source}")
    if world.rank == 0 and lines:
        print(*lines, sep="\n", flush=True)
    return manifest


def _latest_step_on_disk(root: Path, found: RecoveredCheckpoint | None) -> int:
    """Return the step of the last checkpoint on disk; 0 without one.

    No file is opened when by the names alone the in-memory checkpoint is as new.
    """
    names = list_checkpoints(root)
    if not names or (found is not None and found.step >= step_of(names[-1])):
        return step_of(names[-1]) if names else 0
    latest = find_latest(root)
    return step_of(latest) if latest is not None else 0


def _load(newest: RecoveredCheckpoint, shards: Sequence[LocalShard]) -> str | None:
    """Load the shards; returns the reason of a failure, or None."""
    try:
        newest.load(shards)
    except MusterError as error:
        return str(error)
    return None


def _host_of(store: dist.Store) -> str:
    """Return the host of the launcher's store."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store.host if isinstance(store, dist.TCPStore) else "127.0.0.1"


def _steps(count: int) -> str:
    return "step" if count == 1 else f"{count} steps"
