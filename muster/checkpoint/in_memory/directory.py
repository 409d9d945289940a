"""The folder of a run's copies in the memory of one node; free of torch.

/dev/shm/muster-3f1c…/owner.json                             whose they are
/dev/shm/muster-3f1c…/lock                                   held by the ranks while they run
/dev/shm/muster-3f1c…/step-00000100/head.json                what a manifest says beside the tensors
/dev/shm/muster-3f1c…/step-00000100/rank-00000.safetensors   of a rank of this node, or of the node before
/dev/shm/muster-3f1c…/step-00000100/rank-00000.json          what lies in it
/dev/shm/muster-3f1c…/step-00000120.tmp/                     being written, or left by a run that was killed
"""

import errno
import fcntl
import hashlib
import json
import mmap
import os
import secrets
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from pydantic import PositiveInt, ValidationError

from muster.checkpoint.checkpoint_dir import checkpoint_path, find_file_damage, list_checkpoints, remove_checkpoint
from muster.checkpoint.manifest import TensorIndex
from muster.checkpoint.rank_file import rank_index_path
from muster.config.yaml_writer import write_atomically
from muster.spec.base import Frozen
from muster.spec.checksum import crc32

_LOCK_TIMEOUT_S = 30.0
HEADER_FILE, OWNER_FILE, LOCK_FILE = "head.json", "owner.json", "lock"
IDENTITY_FILE = "copies.json"
"""In the run directory: who may go on from copies."""


class StepHeader(Frozen):
    """What all nodes say alike of the copies of one step."""

    version: Literal[1] = 1
    attempt: str
    """Of the launch that made them: copies of several never mix."""
    world_size: PositiveInt
    """Ranks that wrote: the copies of all of them together are a checkpoint."""
    about: dict[str, Any]
    """A manifest without its files and tensors."""


class DirectoryOwner(Frozen):
    """Whose a folder of copies is."""

    version: Literal[1] = 1
    run: str
    """The run directory."""
    id: str
    mark: str
    """Drawn when the folder was made: ranks that read the same one share a memory."""


class RunIdentity(Frozen):
    """A run for the sake of its copies. One that begins anew, or with other settings or data, becomes another."""

    version: Literal[1] = 1
    id: str
    settings: tuple[str, ...]
    """Digests of all configurations, with their data, under which it has gone on."""


def claim_run_id(run_dir: Path, settings: str, resumes: bool) -> str:
    """The run's id, for an attempt with these `settings`: a new one where the attempt begins anew.

    `goes_on`: the attempt was found to go on with what is there, or allowed to.
    """
    known = read_identity(run_dir)
    if known is not None and settings in known.settings:
        return known.id
    if known is None or not resumes:
        known = RunIdentity(id=secrets.token_hex(8), settings=())
    write_atomically(
        run_dir / IDENTITY_FILE, RunIdentity(id=known.id, settings=(*known.settings, settings)).model_dump_json()
    )
    return known.id


def read_identity(run_dir: Path) -> RunIdentity | None:
    """What `identify` has written, if it has."""
    return _read_json(RunIdentity, run_dir / IDENTITY_FILE)


class InMemoryDirectory:
    """One run's folder in one memory."""

    def __init__(self, parent: Path, run_dir: Path, run_id: str) -> None:
        self._owner = DirectoryOwner(run=str(run_dir.absolute()), id=run_id, mark=secrets.token_hex(8))
        key = hashlib.sha256(f"{run_id} {self._owner.run}".encode()).hexdigest()[:12]
        self.path = parent / f"muster-{key}"

    def open(self) -> str:
        """Makes the folder where there is none, holds it for as long as this process lives, and returns its mark.

        Raises OSError.
        """
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _belongs_to_user(self.path):
            raise OSError(errno.EPERM, "it belongs to another user", str(self.path))
        self._lock = (self.path / LOCK_FILE).open("w")
        _lock_shared(self._lock.fileno())
        beside = self.path / f"owner-{self._owner.mark}"
        beside.write_text(self._owner.model_dump_json())
        with suppress(FileExistsError):  # another rank's is as good
            os.link(beside, self.path / OWNER_FILE)
        beside.unlink()
        return DirectoryOwner.model_validate_json((self.path / OWNER_FILE).read_bytes()).mark

    def tmp_dir(self, step: int) -> Path:
        """Where the copies of a step are written."""
        return self.path / f"{checkpoint_path(self.path, step).name}.tmp"

    def begin(self, step: int, header: StepHeader) -> None:
        """Makes way for the copies of a step. One rank of a node calls this and what follows."""
        for path in self.path.glob("*.tmp"):
            shutil.rmtree(path)
        self.tmp_dir(step).mkdir(parents=True)
        (self.tmp_dir(step) / HEADER_FILE).write_text(header.model_dump_json())

    def commit(self, step: int) -> None:
        """Gives the copies of a step, all of which are there, their name."""
        remove_checkpoint(checkpoint_path(self.path, step))
        os.rename(self.tmp_dir(step), checkpoint_path(self.path, step))

    def discard(self, step: int) -> None:
        """Removes what there is of copies that will not be complete."""
        shutil.rmtree(self.tmp_dir(step), ignore_errors=True)

    def keep_only(self, step: int) -> None:
        """Removes the copies of all other steps."""
        for path in list_checkpoints(self.path):
            if path != checkpoint_path(self.path, step):
                remove_checkpoint(path)

    def step_headers(self) -> Iterator[tuple[Path, StepHeader]]:
        """The steps of which there are copies here, rising."""
        return step_headers(self.path)

    def release(self) -> None:
        """Lets others see that nobody holds the folder."""
        self._lock.close()

    def delete(self) -> None:
        """Removes it all."""
        _remove_all(self.path)


def step_headers(folder: Path) -> Iterator[tuple[Path, StepHeader]]:
    """The steps of which a folder holds copies, rising."""
    for path in list_checkpoints(folder):
        if (head := _read_json(StepHeader, path / HEADER_FILE)) is not None:
            yield path, head


def stored_ranks(folder: Path) -> list[int]:
    """The ranks of whose part there is a copy among those of one step."""
    return sorted(int(path.stem.removeprefix("rank-")) for path in folder.glob("rank-*.json"))


def is_intact(folder: Path, rank: int) -> bool:
    """Whether all bytes of a rank's copy are there, and as they were written."""
    listed = _read_json(TensorIndex, rank_index_path(folder, rank))
    if listed is None or any(find_file_damage(folder / name, nbytes) for name, nbytes in listed.files.items()):
        return False
    pieces = [piece for name in listed.tensors for piece in listed.chunks(name)]
    for name, nbytes in listed.files.items():
        with open(folder / name, "rb") as file, mmap.mmap(file.fileno(), nbytes, access=mmap.ACCESS_READ) as memory:
            view = memoryview(memory)
            ok = all(crc32(view[p.offset : p.offset + p.nbytes]) == p.crc32 for p in pieces if p.file == name)
            view.release()
            if not ok:
                return False
    return True


# ----------------------------------------------------------------------------------------------------------------------
# What killed runs have left


class OrphanedDirectory(NamedTuple):
    """Copies that no running job holds."""

    path: Path
    run_dir: Path
    nbytes: int
    step: int | None
    """The last of which something is there."""
    is_stale: bool
    """Nobody will go on from them: their run is gone, or has begun anew."""


def candidate_directories(pattern: str) -> list[Path]:
    """The memories of this machine that `train.in_memory_checkpoint_dir` may mean."""
    if "{rank}" not in pattern:
        return [Path(pattern)]
    head, _, tail = pattern.partition("{rank}")
    base = Path(head if head.endswith("/") else os.path.dirname(head) or ".")
    found = base.glob(f"{head.removeprefix(str(base)).lstrip('/')}*{tail}") if base.is_dir() else ()
    return sorted(path for path in found if path.is_dir())


def find_orphaned(parent: Path) -> Iterator[OrphanedDirectory]:
    """The folders of copies in a memory that nobody holds."""
    for path in sorted(parent.glob("muster-*")):
        if not _belongs_to_user(path):
            continue
        if (owner := _read_json(DirectoryOwner, path / OWNER_FILE)) is None or _is_locked(path):
            continue
        run = Path(owner.run)
        try:
            nbytes = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
            steps = [head.about["step"] for _, head in step_headers(path)]
        except FileNotFoundError:  # another rank of this node removes it now
            continue
        yield OrphanedDirectory(path, run, nbytes, max(steps, default=None), _is_stale(run, owner.id))


def remove_stale(parent: Path) -> list[OrphanedDirectory]:
    """Removes the leftovers that nobody will go on from, and returns them."""
    removed = []
    for left in find_orphaned(parent):
        if left.is_stale:
            _remove_all(left.path)
            if not left.path.exists():
                removed.append(left)
    return removed


def _is_stale(run: Path, run_id: str) -> bool:
    """Not where nobody can tell now: the disk may be away, or a later version have written there."""
    if (known := read_identity(run)) is not None:
        return known.id != run_id
    try:
        return run.parent.is_dir() and not (run / IDENTITY_FILE).exists()
    except OSError:
        return False


def _remove_all(folder: Path) -> None:
    """Removes a folder, last what says whose it is: what a kill in between leaves can then be found. Several ranks may
    do so at once."""
    for path in folder.glob("step-*"):
        shutil.rmtree(path, ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)


def _belongs_to_user(folder: Path) -> bool:
    """Whether it is a folder of this user: all may write to /dev/shm, and could lay links there."""
    try:
        found = folder.lstat()
    except FileNotFoundError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()


def _lock_shared(lock: int) -> None:
    """Takes a lock that others may have as well; who looks whether a folder is held has it alone for a moment."""
    limit = time.monotonic() + _LOCK_TIMEOUT_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > limit:
                raise
            time.sleep(0.01)


def _is_locked(path: Path) -> bool:
    try:
        with open(path / LOCK_FILE, "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:  # held, or another user's
        return True
    return False


T = TypeVar("T", bound=Frozen)


def _read_json(model: type[T], path: Path) -> T | None:
    try:
        return model.model_validate(json.loads(path.read_bytes()))
    except (OSError, ValueError, ValidationError):
        return None
