"""Directory of a run's checkpoints: names, the latest one, atomic creation and removal, retention.

checkpoints/latest              name of the newest checkpoint
checkpoints/best                link to the checkpoint with the lowest validation loss (train.keep_best)
checkpoints/step-00000020/      a complete checkpoint: it was renamed once all of it was on disk
checkpoints/step-00000040.tmp/  being written, or left by a killed run
"""

import contextlib
import os
import re
import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from typing import NamedTuple

from muster.checkpoint.manifest import MANIFEST, read_manifest
from muster.config.file_writer import fsync_directory, write_durably
from muster.spec.errors import ConfigError, MusterError
from muster.spec.suggest import did_you_mean

LATEST = "latest"
BEST = "best"
AVERAGE = "ema"
"""Name of the moving average of the weights: `RUN@ema`, `RUN@best@ema`, `RUN@150@ema`."""
_NAME = re.compile(r"step-\d{8,}")


def checkpoint_path(root: Path, step: int) -> Path:
    """Return the path of the checkpoint of `step`."""
    return root / f"step-{step:08}"


def named_checkpoint(path: Path) -> Path:
    """Return the checkpoint that `RUN@best` or `RUN@STEP` names; any other path as it is.

    Raises ConfigError where the run has no such checkpoint.
    """
    run, at, name = str(path).rpartition("@")
    if not at or path.exists():
        return path
    if run.endswith(f"@{AVERAGE}") and (name == BEST or name.isdecimal()):
        first = run.removesuffix(f"@{AVERAGE}")
        raise ConfigError(f"{path}: the average comes last, write {first}@{name}@{AVERAGE}")
    whole, _, other = run.rpartition("@")
    if whole and (other == BEST or other.isdecimal()) and (name == BEST or name.isdecimal()) and Path(whole).is_dir():
        raise ConfigError(f"{path} names two checkpoints: expected {whole}@{other} or {whole}@{name}")
    if not (name == BEST or name.isdecimal()):
        if "/" in name or not Path(run).is_dir():
            return path
        legal = f"expected {run}@{BEST}, {run}@STEP or {run}@{AVERAGE}"
        raise ConfigError(f"there is no checkpoint {path}: {legal}{did_you_mean(name, (BEST, AVERAGE))}")
    root = Path(run) / "checkpoints"
    found = (root / BEST).resolve() if name == BEST else checkpoint_path(root, int(name))
    if found.is_dir():
        return found
    steps = ", ".join(str(step_of(folder)) for folder in list_checkpoints(root))
    if not steps:
        raise ConfigError(f"there is no checkpoint {path}: {run} has none")
    why = "; train.keep_best keeps the best one" if name == BEST else ""
    raise ConfigError(f"there is no checkpoint {path}: {run} has those of steps {steps}{why}")


def split_average(path: Path) -> tuple[Path, bool]:
    """Split `PLACE@ema` into the place and True: the moving average of its weights; any other path is as it is."""
    place = str(path).removesuffix(f"@{AVERAGE}")
    return (path, False) if place == str(path) or path.exists() else (Path(place), True)


def link_best(root: Path, step: int) -> bool:
    """Let `best` lead to the checkpoint of `step`, if that is complete; returns whether it is."""
    folder = checkpoint_path(root, step)
    if not folder.is_dir():
        return False
    if (root / BEST).is_symlink() and os.readlink(root / BEST) == folder.name:
        return True
    beside = root / f"{BEST}.tmp"
    beside.unlink(missing_ok=True)
    beside.symlink_to(folder.name)
    beside.replace(root / BEST)
    return True


def step_of(folder: Path) -> int:
    """Return the step in a checkpoint's name."""
    return int(folder.name.rpartition("-")[2])


def find_latest(
    root: Path, report: Callable[[str], None] | None = None, excluded: Collection[Path] = ()
) -> Path | None:
    """Return the last complete checkpoint under `root` that is not `excluded`, or None.

    It is the one that `latest` points to, or if that is missing or damaged, the complete one with the highest step.
    `report` receives one sentence for each damaged checkpoint that is skipped.
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
            report(f"skipped a damaged checkpoint: {problem}")
    return None


def list_checkpoints(root: Path) -> list[Path]:
    """Return the checkpoints under `root` by rising step, without incomplete ones."""
    if not root.is_dir():
        return []
    return sorted((path for path in root.iterdir() if _NAME.fullmatch(path.name)), key=step_of)


def find_damage(folder: Path) -> str | None:
    """Return a sentence about the damage of a checkpoint; None if its manifest and file sizes look right.

    A checkpoint of a later schema counts as undamaged: opening it must fail with a message of its own instead of
    falling back silently to an older one.
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
    """Return a sentence about a file that is missing or has the wrong size; None if its size is right."""
    try:
        found = path.stat().st_size
    except OSError as error:
        return f"{path} can't be opened: {error.strerror}"
    return None if found == expected_bytes else f"{path} has {found} bytes instead of {expected_bytes}"


def publish(tmp_dir: Path, folder: Path) -> None:
    """Rename the finished folder `tmp_dir` to the checkpoint `folder`, and make it the latest one.

    The pointer `latest` is moved first. A kill before the rename leaves a dangling pointer, from which `find_latest`
    falls back; a kill after it leaves nothing undone. An older checkpoint of the same step is replaced: a run repeats a
    step only if it could not use that checkpoint.
    """
    fsync_directory(tmp_dir)
    write_durably(folder.parent / LATEST, folder.name + "\n")
    remove_checkpoint(folder)
    os.rename(tmp_dir, folder)
    fsync_directory(folder.parent)


class RetentionPolicy(NamedTuple):
    """Checkpoints that are kept once a newer one is complete."""

    last: int = 2
    """Number of newest checkpoints to keep; 0: all."""
    permanent_every: int = 0
    """Interval of steps whose checkpoints are kept for good, and don't count as `last`; 0: none."""
    regular_every: int = 0
    """Interval of regular checkpoints. Others are ephemeral, kept until the next is complete; 0: all are regular."""
    best_step: int | None = None
    """Step with the lowest validation loss, whose checkpoint is kept."""

    def is_permanent(self, step: int) -> bool:
        return step == self.best_step or (bool(self.permanent_every) and step % self.permanent_every == 0)

    def is_ephemeral(self, step: int) -> bool:
        return bool(self.regular_every) and step % self.regular_every != 0


KEEP_LAST_TWO = RetentionPolicy()


def prune(root: Path, retention: RetentionPolicy, newest: Path, damaged: Collection[Path] = ()) -> list[Path]:
    """Remove the checkpoints that `prunable` lists, and return them.

    One that can't be removed now is tried again after the next save.
    """
    removed = []
    for path in prunable(root, retention, newest, damaged):
        with contextlib.suppress(OSError):
            remove_checkpoint(path)
            removed.append(path)
    return removed


def prunable(root: Path, retention: RetentionPolicy, newest: Path, damaged: Collection[Path] = ()) -> list[Path]:
    """Return the checkpoints that `retention` doesn't keep, damaged ones first; never `newest` or the linked best.
    `damaged` are known to be, beside those that look so.

    If all others are ephemeral, the newest of them is kept too, so that there is one to fall back to.
    """
    if not retention.last:
        return []
    best = (root / BEST).resolve().name
    others = [
        path
        for path in list_checkpoints(root)
        if path != newest and path.name != best and not retention.is_permanent(step_of(path))
    ]
    regular = [path for path in others if not retention.is_ephemeral(step_of(path))]
    usable = [path for path in regular or others[-1:] if path not in damaged]
    candidates = sorted(usable, key=lambda path: find_damage(path) is None)
    kept = candidates[len(candidates) - min(retention.last - 1, len(candidates)) :]
    return [path for path in others if path not in kept]


def remove_checkpoint(folder: Path) -> None:
    """Remove a checkpoint so that a kill meanwhile leaves a `.tmp` folder, never half a checkpoint."""
    if folder.exists():
        doomed = folder.with_name(folder.name + ".old.tmp")
        shutil.rmtree(doomed, ignore_errors=True)
        os.rename(folder, doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def remove_incomplete(root: Path) -> None:
    """Remove incomplete checkpoints that killed runs left."""
    for path in root.glob("*.tmp"):
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def _read_latest(root: Path) -> str | None:
    try:
        return (root / LATEST).read_text().strip()
    except (OSError, ValueError):
        return None
