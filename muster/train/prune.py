"""`muster checkpoint prune`: removal of a run's older checkpoints."""

import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from muster.checkpoint.checkpoint_dir import (
    RetentionPolicy,
    find_latest,
    list_checkpoints,
    prunable,
    prune,
    remove_incomplete,
    step_of,
)
from muster.checkpoint.describe import verify
from muster.checkpoint.in_memory.directory import candidate_directories, find_orphaned
from muster.config.load_config import load_run_config
from muster.spec.errors import ConfigError, MusterError
from muster.train.run_directory import locked_run_dir


def _newest_undamaged(root: Path) -> tuple[Path, list[Path]]:
    """Return the last checkpoint whose files have the right checksums, and newer ones whose haven't. Raises MusterError
    where none has."""
    damaged: dict[Path, str] = {}
    while (newest := find_latest(root, excluded=damaged)) is not None:
        (found,) = verify(newest, lambda _: None, lambda _: None)
        if not found.problems:
            return newest, list(damaged)
        damaged[newest] = found.problems[0]
    raise MusterError(f"nothing is removed, since no checkpoint can be read: {'; '.join(damaged.values())}")


def prune_run(run: Path, keep_last: int, keep_every: int | None = None, dry_run: bool = False) -> dict[str, Any]:
    """Keep the newest `keep_last` checkpoints and those at multiples of `keep_every` steps (None: as the run does).

    The last checkpoint whose checksums are right always stays; newer ones, whose aren't, don't count. All others are
    removed, and so are half-written checkpoints of killed runs, and in-memory checkpoints on this machine that
    aren't newer. Returns what was done, as JSON. Raises ConfigError where there is no checkpoint, MusterError while
    a job runs there.
    """
    root = run / "checkpoints"
    if find_latest(root) is None:
        raise ConfigError(f"{run} has no good checkpoint: expected a run directory, such as runs/demo")
    train = load_run_config(None, run / "config.yaml", []).config.train
    keep_every = train.keep_every if keep_every is None else keep_every
    keep = RetentionPolicy(last=keep_last, permanent_every=keep_every)
    with locked_run_dir(run):
        newest, damaged = _newest_undamaged(root)
        stale = sorted(root.glob("*.tmp"))
        old = [
            left.path
            for place in candidate_directories(train.in_memory_checkpoint_dir)
            for left in find_orphaned(place)
            if left.run_dir == run.absolute() and (left.is_stale or (left.step or 0) <= step_of(newest))
        ]
        doomed = [*prunable(root, keep, newest, damaged), *stale, *old]
        nbytes = sum(file.stat().st_size for path in doomed for file in [path, *path.rglob("*")] if file.is_file())
        if not dry_run:
            prune(root, keep, newest, damaged)
            remove_incomplete(root)
            for path in old:
                with suppress(OSError):
                    shutil.rmtree(path)
        kept = [path for path in list_checkpoints(root) if path not in doomed]
    return {
        "version": 1,
        "dry_run": dry_run,
        "removed": [str(path) for path in doomed if dry_run or not path.exists()],
        "failed": [str(path) for path in doomed if not dry_run and path.exists()],
        "kept": [str(path) for path in kept],
        "bytes": nbytes,
    }
