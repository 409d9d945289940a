"""A run's copies in the memory of its nodes: where they lie, and going on from them."""

import secrets
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from muster.checkpoint.folder import checkpoints, find_latest, step_of
from muster.checkpoint.manifest import Manifest
from muster.checkpoint.memory.copies import Copies, ranks_in_words
from muster.checkpoint.memory.folder import CopyFolder, clear_stale, read_identity
from muster.checkpoint.memory.recall import Recalled, survey
from muster.checkpoint.piece import Piece
from muster.checkpoint.save import parts_of
from muster.parallel.world import World
from muster.spec.errors import MusterError
from muster.spec.run import TrainConfig

LOAD_LIMIT = timedelta(hours=6)
"""How long one rank may take longer to load than another; a rank that dies ends the job by itself."""


def open_copies(train: TrainConfig, world: World, run_dir: Path, pieces: Sequence[Piece]) -> Copies | None:
    """This rank's part in the copies of a run; None for one that makes none. All ranks call it.

    Raises MusterError where there is no place or too little room for them.
    """
    if not train.copies_every:
        return None
    if (identity := read_identity(run_dir)) is None:
        raise MusterError(f"{run_dir} doesn't say which copies in memory are its own: start it by muster train")
    place = Path(train.copies_dir.replace("{rank}", str(world.rank)))
    removed = clear_stale(place)
    folder = CopyFolder(place, run_dir, identity.id)
    copies = Copies(world.rank, folder, _host_of(world.store), world.share(secrets.token_hex(8)), world.exchange)
    copies.require_room(sum(part.nbytes for part in parts_of(pieces)), world.exchange)
    for left in removed:
        print(f"removed {left.path}, copies of {left.run} that nobody can go on from", flush=True)
    if world.rank == 0:
        print(f"copies every {_steps(train.copies_every)} {copies.where()}", flush=True)
    return copies


def recall(world: World, copies: Copies, run_dir: Path, pieces: Sequence[Piece], most: int) -> Manifest | None:
    """Loads the copies of a step up to `most` if they are as new as the checkpoints on disk, of which then no file is
    opened. None where there are none, or they can't be read. All ranks call it; rank 0 says what is lost.

    Raises MusterError where the copies can't be read, and there is no checkpoint.
    """
    world.where.say("load")
    found = survey(copies, world.exchange, most)
    on_disk = world.share(_newest_on_disk(run_dir / "checkpoints", found.newest))
    manifest, said = None, list[str]()
    if found.newest is not None and found.newest.step >= on_disk:
        manifest, problem = found.newest.manifest, _load(found.newest, pieces)
        if problems := [text for text in world.exchange_within("recall", problem, LOAD_LIMIT) if text]:
            manifest, lost = None, f"the copies of step {found.newest.step} in memory can't be read: {problems[0]}"
            if not on_disk:  # parameters are partly filled, and nothing else would fill them
                raise MusterError(f"{lost}; there is no checkpoint on disk: try again, or --fresh starts anew")
            said.append(lost)
    done = on_disk if manifest is None else manifest.step
    for step, ranks in found.gaps[:1]:
        if step > done:
            again = f"step {step} is" if step == done + 1 else f"steps {done + 1} to {step} are"
            lacking = ranks_in_words(ranks)
            said.append(f"of the copies of step {step} in memory those of {lacking} are lost: {again} done again")
    if done:
        source = "" if manifest is None else " from copies in memory"
        said.append(f"resuming {run_dir} after step {done}{source}")
    if world.rank == 0 and said:
        print(*said, sep="\n", flush=True)
    return manifest


def _newest_on_disk(root: Path, found: Recalled | None) -> int:
    """The step of the last checkpoint; 0 without. No file is opened where the copies are as new by the names alone."""
    names = checkpoints(root)
    if not names or (found is not None and found.step >= step_of(names[-1])):
        return step_of(names[-1]) if names else 0
    latest = find_latest(root)
    return step_of(latest) if latest is not None else 0


def _load(newest: Recalled, pieces: Sequence[Piece]) -> str | None:
    """Why this rank could not; None when it could."""
    try:
        newest.load(pieces)
    except MusterError as error:
        return str(error)
    return None


def _host_of(store: dist.Store) -> str:
    """Where the launcher's store is."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store.host if isinstance(store, dist.TCPStore) else "127.0.0.1"


def _steps(count: int) -> str:
    return "step" if count == 1 else f"{count} steps"
