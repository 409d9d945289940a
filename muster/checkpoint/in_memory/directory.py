"""Directory of a run's in-memory checkpoints on one node; free of torch.

/dev/shm/muster-3f1c…/owner.json                             run that they belong to
/dev/shm/muster-3f1c…/lock                                   held by the ranks while they run
/dev/shm/muster-3f1c…/step-00000100/head.json                header of a manifest, without files and tensors
/dev/shm/muster-3f1c…/step-00000100/rank-00000.safetensors   part of a rank of this node, or of the node before
/dev/shm/muster-3f1c…/step-00000100/rank-00000.json          index of that file
/dev/shm/muster-3f1c…/step-00000120.tmp/                     being written, or left by a killed run
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
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from pydantic import PositiveInt, ValidationError

from muster.checkpoint.checkpoint_dir import (
    checkpoint_path,
    find_file_damage,
    list_checkpoints,
    remove_checkpoint,
    step_of,
)
from muster.checkpoint.manifest import TensorIndex
from muster.checkpoint.rank_file import rank_index_path
from muster.config.file_writer import write_atomically
from muster.spec.base import Frozen
from muster.spec.checksum import crc32

_LOCK_TIMEOUT_S = 30.0
HEADER_FILE, OWNER_FILE, LOCK_FILE = "head.json", "owner.json", "lock"
IDENTITY_FILE = "copies.json"
"""File in the run directory that says which runs may resume from its in-memory checkpoints."""


class StepHeader(Frozen):
    """Header of the in-memory checkpoint of one step, the same on all nodes."""

    version: Literal[1] = 1
    attempt: str
    """Launch that wrote it; parts of several launches never mix."""
    world_size: PositiveInt
    """Number of ranks that wrote; the parts of all of them make up the checkpoint."""
    about: dict[str, Any]
    """Manifest without its files and tensors."""


class DirectoryOwner(Frozen):
    """Owner of a directory of in-memory checkpoints."""

    version: Literal[1] = 1
    run: str
    """Run directory."""
    id: str
    """Id of the run (`RunIdentity`)."""
    mark: str
    """Random word drawn when the directory was created; ranks that read the same one share a node's memory."""


class RunIdentity(Frozen):
    """Identity of a run. One that starts anew, or with other settings or data, becomes another run."""

    version: Literal[1] = 1
    id: str
    settings: tuple[str, ...]
    """Digests of all configurations, with their data, under which the run has been resumed."""


def claim_run_id(run_dir: Path, settings: str, resumes: bool) -> str:
    """Return the id of the run for an attempt with these `settings`: a new one unless the attempt resumes it.

    `resumes`: the attempt was found to continue what is there, or allowed to.
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
    """Return the identity that `claim_run_id` has written; None if there is none."""
    return _read_json(RunIdentity, run_dir / IDENTITY_FILE)


class InMemoryDirectory:
    """One run's directory in the memory of one node."""

    def __init__(self, parent: Path, run_dir: Path, run_id: str) -> None:
        self._owner = DirectoryOwner(run=str(run_dir.absolute()), id=run_id, mark=secrets.token_hex(8))
        key = hashlib.sha256(f"{run_id} {self._owner.run}".encode()).hexdigest()[:12]
        self.path = parent / f"muster-{key}"

    def open(self) -> str:
        """Create the directory if needed, lock it for the life of this process, and return its mark. Raises OSError."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _belongs_to_user(self.path):
            raise OSError(errno.EPERM, "it belongs to another user", str(self.path))
        self._lock = (self.path / LOCK_FILE).open("w")
        _lock_shared(self._lock.fileno())
        beside = self.path / f"owner-{self._owner.mark}"
        beside.write_text(self._owner.model_dump_json())
        with suppress(FileExistsError):  # another rank has been faster
            os.link(beside, self.path / OWNER_FILE)
        beside.unlink()
        return DirectoryOwner.model_validate_json((self.path / OWNER_FILE).read_bytes()).mark

    def tmp_dir(self, step: int) -> Path:
        """Return the folder in which the checkpoint of a step is written."""
        return self.path / f"{checkpoint_path(self.path, step).name}.tmp"

    def step_dir(self, step: int) -> Path:
        """Return the folder in which each rank writes its part of a step by itself, and create it; any may be first."""
        folder = checkpoint_path(self.path, step)
        folder.mkdir(exist_ok=True)
        return folder

    def begin_parts(self, step: int, header: StepHeader) -> None:
        """Write the header of a step of which each rank writes its part by itself."""
        write_atomically(self.step_dir(step) / HEADER_FILE, header.model_dump_json())

    def remove_steps(self, is_doomed: Callable[[int], bool]) -> None:
        """Remove the checkpoints of some steps."""
        for path in list_checkpoints(self.path):
            if is_doomed(step_of(path)):
                remove_checkpoint(path)

    def begin(self, step: int, header: StepHeader) -> None:
        """Create the temporary folder of a step. One rank of a node calls this and the following methods."""
        for path in self.path.glob("*.tmp"):
            shutil.rmtree(path)
        self.tmp_dir(step).mkdir(parents=True)
        (self.tmp_dir(step) / HEADER_FILE).write_text(header.model_dump_json())

    def commit(self, step: int) -> None:
        """Rename the complete temporary folder of a step to its final name."""
        remove_checkpoint(checkpoint_path(self.path, step))
        os.rename(self.tmp_dir(step), checkpoint_path(self.path, step))

    def discard(self, step: int) -> None:
        """Remove the temporary folder of a step that failed."""
        shutil.rmtree(self.tmp_dir(step), ignore_errors=True)

    def keep_only(self, step: int) -> None:
        """Remove the checkpoints of all other steps."""
        self.remove_steps(lambda other: other != step)

    def step_headers(self) -> Iterator[tuple[Path, StepHeader]]:
        """Yield folder and header of each step that is stored here, rising."""
        return step_headers(self.path)

    def release(self) -> None:
        """Release the lock."""
        self._lock.close()

    def delete(self) -> None:
        """Remove the directory."""
        _remove_all(self.path)


def step_headers(folder: Path) -> Iterator[tuple[Path, StepHeader]]:
    """Yield folder and header of each step that a directory holds, rising."""
    for path in list_checkpoints(folder):
        if (head := _read_json(StepHeader, path / HEADER_FILE)) is not None:
            yield path, head


def stored_ranks(folder: Path) -> list[int]:
    """Return the ranks whose part is in the folder of a step."""
    return sorted(int(path.stem.removeprefix("rank-")) for path in folder.glob("rank-*.json"))


def is_intact(folder: Path, rank: int) -> bool:
    """Return True if a rank's part is complete and all its checksums are right."""
    listed = _read_json(TensorIndex, rank_index_path(folder, rank))
    if listed is None or any(find_file_damage(folder / name, nbytes) for name, nbytes in listed.files.items()):
        return False
    chunks = [chunk for name in listed.tensors for chunk in listed.chunks(name)]
    for name, nbytes in listed.files.items():
        with open(folder / name, "rb") as file, mmap.mmap(file.fileno(), nbytes, access=mmap.ACCESS_READ) as memory:
            view = memoryview(memory)
            ok = all(crc32(view[c.offset : c.offset + c.nbytes]) == c.crc32 for c in chunks if c.file == name)
            view.release()
            if not ok:
                return False
    return True


# ----------------------------------------------------------------------------------------------------------------------
# Directories that killed runs have left


class OrphanedDirectory(NamedTuple):
    """Directory of in-memory checkpoints that no running job holds."""

    path: Path
    run_dir: Path
    nbytes: int
    step: int | None
    """Last step that is stored, at least in part."""
    is_stale: bool
    """True if no run will resume from it: its run is gone, or was started anew."""


def candidate_directories(pattern: str) -> list[Path]:
    """Return the existing directories of this machine that match `train.in_memory_checkpoint_dir`."""
    if "{rank}" not in pattern:
        return [Path(pattern)]
    head, _, tail = pattern.partition("{rank}")
    base = Path(head if head.endswith("/") else os.path.dirname(head) or ".")
    found = base.glob(f"{head.removeprefix(str(base)).lstrip('/')}*{tail}") if base.is_dir() else ()
    return sorted(path for path in found if path.is_dir())


def find_orphaned(parent: Path) -> Iterator[OrphanedDirectory]:
    """Yield the directories of in-memory checkpoints below `parent` that nobody holds."""
    for path in sorted(parent.glob("muster-*")):
        if not _belongs_to_user(path):
            continue
        if (owner := _read_json(DirectoryOwner, path / OWNER_FILE)) is None or _is_locked(path):
            continue
        run = Path(owner.run)
        try:
            nbytes = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
            steps = [head.about["step"] for _, head in step_headers(path)]
        except FileNotFoundError:  # another rank of this node is removing it
            continue
        yield OrphanedDirectory(path, run, nbytes, max(steps, default=None), _is_stale(run, owner.id))


def remove_stale(parent: Path) -> list[OrphanedDirectory]:
    """Remove the orphaned directories from which no run will resume, and return them."""
    removed = []
    for left in find_orphaned(parent):
        if left.is_stale:
            _remove_all(left.path)
            if not left.path.exists():
                removed.append(left)
    return removed


def _is_stale(run: Path, run_id: str) -> bool:
    """Return True if the run is known to be gone or to have another id.

    False if that can't be determined: the disk may be unmounted, or a later version of Muster may have written there.
    """
    if (known := read_identity(run)) is not None:
        return known.id != run_id
    try:
        return run.parent.is_dir() and not (run / IDENTITY_FILE).exists()
    except OSError:
        return False


def _remove_all(folder: Path) -> None:
    """Remove a directory, its owner file last, so that a kill meanwhile leaves something that can be found.

    Several ranks may call it at once.
    """
    for path in folder.glob("step-*"):
        shutil.rmtree(path, ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)


def _belongs_to_user(folder: Path) -> bool:
    """Return True if it is a directory of this user: anyone may write to /dev/shm, and could place links there."""
    try:
        found = folder.lstat()
    except FileNotFoundError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()


def _lock_shared(lock: int) -> None:
    """Take a shared lock; a process that checks whether the directory is locked holds it exclusively for a moment."""
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
    except OSError:  # locked, or another user's
        return True
    return False


T = TypeVar("T", bound=Frozen)


def _read_json(model: type[T], path: Path) -> T | None:
    try:
        return model.model_validate(json.loads(path.read_bytes()))
    except (OSError, ValueError, ValidationError):
        return None
