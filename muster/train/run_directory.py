"""The run directory for the launcher: locked for one job, cleared of earlier results, its errors explained."""

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO

from muster.checkpoint.in_memory.directory import IDENTITY_FILE
from muster.checkpoint.remote_lock import hold_remote_lock
from muster.config.attempt_files import SCRATCH_PREFIX, adopt_attempt_files
from muster.config.grouped_matmul_file import FILE_NAME as GROUPED_MATMULS_FILE
from muster.config.routing_load_file import FILE_NAME as LOAD_FILE
from muster.launch.rank_errors import error_path
from muster.report.run_files import RECOVERIES_FILE, RESTARTS_FILE
from muster.report.wall_time import ATTEMPTS_FILE
from muster.spec.errors import MusterError
from muster.train.tracking import TENSORBOARD, WANDB

_LOCK = ".lock"
"""File of the run directory that a job locks."""


@contextmanager
def locked_run_dir(run_dir: Path, remote_checkpoint_dir: str | None = None) -> Iterator[None]:
    """Lock the run directory, and the remote checkpoint directory if there is one, for one job.

    A directory that is new and has got no file by the end, as of a refused request, is removed. Raises MusterError when
    another job holds one of them.
    """
    is_new = not run_dir.exists()
    with _open_locked(run_dir):
        try:
            with hold_remote_lock(remote_checkpoint_dir, run_dir):
                yield
        finally:
            if is_new:
                with suppress(OSError):
                    _remove_without_files(run_dir)


def _remove_without_files(run_dir: Path) -> None:
    if [path.name for path in run_dir.iterdir()] == [_LOCK]:
        (run_dir / _LOCK).unlink()
        run_dir.rmdir()


def _open_locked(run_dir: Path) -> IO[str]:
    """Return the open lock file of a run directory, which is made. Raises MusterError when another job holds it."""
    while True:
        with explain_write_errors(run_dir):
            run_dir.mkdir(parents=True, exist_ok=True)
            with suppress(FileNotFoundError), ExitStack() as opened:  # removed by a job that ended at this moment
                lock = opened.enter_context((run_dir / _LOCK).open("w"))
                _lock(lock, run_dir)
                if os.path.samestat(os.fstat(lock.fileno()), (run_dir / _LOCK).stat()):
                    opened.pop_all()
                    return lock


def require_unlocked(run_dir: Path) -> None:
    """Check that a job could lock the run directory now and write to it, and change nothing. Raises MusterError."""
    with explain_write_errors(run_dir):
        require_writable(run_dir)
        lock = run_dir / _LOCK
        if lock.exists():
            with lock.open("a") as file:
                _lock(file, run_dir)


def require_writable(directory: Path) -> None:
    """Raise OSError where a directory, which may not exist yet, can't be made or written to."""
    place = directory.absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    if not place.is_dir():
        kind = errno.EEXIST if place == directory.absolute() else errno.ENOTDIR
        raise OSError(kind, os.strerror(kind), str(directory))
    if not os.access(place, os.W_OK | os.X_OK):
        kind = errno.EROFS if os.statvfs(place).f_flag & os.ST_RDONLY else errno.EACCES
        raise OSError(kind, os.strerror(kind), str(directory))


def _lock(file: IO[str], run_dir: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise MusterError(f"another job is running in {run_dir}: wait for it or choose another --run") from None


@contextmanager
def explain_write_errors(run_dir: Path) -> Iterator[None]:
    """Turn an OSError into a MusterError that says that the run directory can't be written."""
    try:
        yield
    except OSError as error:
        raise run_directory_error(run_dir, error) from error


def run_directory_error(run_dir: Path, error: OSError) -> MusterError:
    """Return the error about a run directory that can't be written."""
    return MusterError(f"can't write the run directory {run_dir}: {error.strerror}; choose another with --run")


def begin_attempt(run_dir: Path) -> None:
    """Make the directory that of an attempt whose ranks have loaded: its configuration and plan, no earlier results.

    Raises MusterError where they can't be written.
    """
    with explain_write_errors(run_dir):
        remove_previous_results(run_dir)
        adopt_attempt_files(run_dir)


def remove_last_exit(run_dir: Path) -> None:
    """Remove all that says how the last attempt ended, and the scratch files that its end may have left."""
    errors = error_path(run_dir, 0).parent.glob("rank-*.error.json")
    for path in (run_dir / "exit.json", *errors, *run_dir.glob(f"{SCRATCH_PREFIX}*")):
        path.unlink(missing_ok=True)


def remove_previous_results(run_dir: Path, everything: bool = False) -> None:
    """Remove the final results of an earlier attempt or, with `everything`, all files that an earlier run left.

    Files that Muster didn't write stay.
    """
    doomed = [run_dir / name for name in ("report.html", "result.json", "timeline.json")]
    if everything:
        records = (
            "metrics.jsonl",
            LOAD_FILE,
            GROUPED_MATMULS_FILE,
            "samples.sha256",
            IDENTITY_FILE,
            RESTARTS_FILE,
            RECOVERIES_FILE,
            ATTEMPTS_FILE,
        )
        doomed += [run_dir / name for name in records]
        for folder in ("checkpoints", "failed", "logs", TENSORBOARD, WANDB):
            if (run_dir / folder).exists():
                shutil.rmtree(run_dir / folder)
    for path in doomed:
        path.unlink(missing_ok=True)
