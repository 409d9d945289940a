"""The folder of a run's checkpoints: names, which is the last, and how one appears and goes as a whole.

checkpoints/latest              the name of the newest one
checkpoints/step-00000020/      complete, because it was renamed only when all of it was on disk
checkpoints/step-00000040.tmp/  being written, or left by a run that was killed
"""

import contextlib
import os
import re
import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from typing import NamedTuple

from muster.checkpoint.manifest import MANIFEST, read_manifest
from muster.config.yaml_writer import fsync_directory
from muster.spec.errors import ConfigError, MusterError

LATEST = "latest"
_NAME = re.compile(r"step-\d{8,}")


def checkpoint_path(root: Path, step: int) -> Path:
    """Where the checkpoint of `step` lies."""
    return root / f"step-{step:08}"


def step_of(folder: Path) -> int:
    """The step that a checkpoint's name says."""
    return int(folder.name.rpartition("-")[2])


def find_latest(
    root: Path, report: Callable[[str], None] | None = None, excluded: Collection[Path] = ()
) -> Path | None:
    """The last complete checkpoint under `root` that is not among `without`, or None.

    It is the one that `latest` points to; when that one is missing or damaged, the complete one with the highest step.
    `report` receives one sentence for each checkpoint that was passed over.
    """
    names = [path.name for path in reversed(list_checkpoints(root)) if path not in excluded]
    if (pointed := _read_latest(root)) in names:
        names.remove(pointed)
        names.insert(0, pointed)
    for name in names:
        problem = find_damage(root / name)
        if problem is None:
            return root / name
        if report is not None:
            report(f"passed over a damaged checkpoint: {problem}")
    return None


def list_checkpoints(root: Path) -> list[Path]:
    """The checkpoints under `root` by rising step; half-written ones are not among them."""
    if not root.is_dir():
        return []
    return sorted((path for path in root.iterdir() if _NAME.fullmatch(path.name)), key=step_of)


def find_damage(folder: Path) -> str | None:
    """Why the checkpoint can't be whole, judged by its manifest and the sizes of its files; None when it looks whole.

    One of a later schema counts as whole: opening it must fail with its own sentence, not fall back silently.
    """
    try:
        manifest = read_manifest(folder)
    except ConfigError as error:
        return str(error) if not (folder / MANIFEST).exists() else None
    except MusterError as error:
        return str(error)
    for name, expected in manifest.files.items():
        if (problem := find_file_damage(folder / name, expected)) is not None:
            return problem
    return None


def find_file_damage(path: Path, expected_bytes: int) -> str | None:
    """Why the file can't be the one that was written; None when its size is right."""
    try:
        found = path.stat().st_size
    except OSError as error:
        return f"{path} can't be opened: {error.strerror}"
    return None if found == expected_bytes else f"{path} has {found} bytes instead of {expected_bytes}"


def publish(tmp_dir: Path, folder: Path) -> None:
    """Makes the finished folder `beside` the checkpoint `folder`, and the latest one.

    The pointer is moved first: a kill before the rename leaves a pointer to nothing, from which `find_latest` falls
    back, and a kill after it leaves nothing undone. An older checkpoint of the same step, which a run repeats only
    when it could not use it, is replaced.
    """
    fsync_directory(tmp_dir)
    write_durably(folder.parent / LATEST, folder.name + "\n")
    remove_checkpoint(folder)
    os.rename(tmp_dir, folder)
    fsync_directory(folder.parent)


class RetentionPolicy(NamedTuple):
    """Which checkpoints stay when a newer one is complete."""

    last: int = 2
    """So many of the newest; 0: all."""
    permanent_every: int = 0
    """Steps that are multiples of it stay for good, and are not counted; 0: none."""
    regular_every: int = 0
    """Steps that are no multiple of it are ephemeral: they stay only until the next is complete; 0: none is."""

    def is_permanent(self, step: int) -> bool:
        return bool(self.permanent_every) and step % self.permanent_every == 0

    def is_ephemeral(self, step: int) -> bool:
        return bool(self.regular_every) and step % self.regular_every != 0


KEEP_LAST_TWO = RetentionPolicy()


def prune(root: Path, retention: RetentionPolicy, newest: Path) -> list[Path]:
    """Removes what `surplus` names, and returns it. What can't be removed now is tried again after the next save."""
    removed = []
    for path in prunable(root, retention, newest):
        with contextlib.suppress(OSError):
            remove_checkpoint(path)
            removed.append(path)
    return removed


def prunable(root: Path, retention: RetentionPolicy, newest: Path) -> list[Path]:
    """The checkpoints that `keep` doesn't keep, but never `newest`; those that can't be opened go first.

    Where all others are ephemeral the newest of them stays too, so that there is one to fall back to.
    """
    if not retention.last:
        return []
    others = [path for path in list_checkpoints(root) if path != newest and not retention.is_permanent(step_of(path))]
    regular = [path for path in others if not retention.is_ephemeral(step_of(path))]
    candidates = sorted(regular or others[-1:], key=lambda path: find_damage(path) is None)
    kept = candidates[len(candidates) - min(retention.last - 1, len(candidates)) :]
    return [path for path in others if path not in kept]


def remove_checkpoint(folder: Path) -> None:
    """Removes a checkpoint so that a kill in between leaves a `.tmp` folder, never half a checkpoint."""
    if folder.exists():
        doomed = folder.with_name(folder.name + ".old.tmp")
        shutil.rmtree(doomed, ignore_errors=True)
        os.rename(folder, doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def remove_incomplete(root: Path) -> None:
    """Removes what killed runs left half-written."""
    for path in root.glob("*.tmp"):
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def write_durably(path: Path, text: str) -> None:
    """Writes a small file so that it exists with all of `text` or as it was before, also after a power cut."""
    beside = path.with_name(path.name + ".tmp")
    with open(beside, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)


def _read_latest(root: Path) -> str | None:
    try:
        return (root / LATEST).read_text().strip()
    except (OSError, ValueError):
        return None
