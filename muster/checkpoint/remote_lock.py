"""Lock of a remote checkpoint directory: one job at a time, as far as an object store allows; free of torch.

`lock.json` names the job that writes there, and is rewritten every minute. Object stores have no atomic operation to
take a lock: two jobs that start within the same second, on a store that shows new objects late, may both believe that
they hold it. A killed job leaves its lock, which counts until it is stale.
"""

import json
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from muster.checkpoint.remote import RemoteCheckpoints
from muster.spec.errors import MusterError

LOCK = "lock.json"
HEARTBEAT_S = 60.0
STALE_AFTER_S = 300.0
"""Age at which a lock of another machine is taken for that of a dead job."""
RECHECK_AFTER_S = 1.0
"""Delay after which a new lock is read again: it must still be ours."""


@contextmanager
def hold_remote_lock(url: str | None, run_dir: Path, recheck_after_s: float = RECHECK_AFTER_S) -> Iterator[None]:
    """Hold the lock at `url` for the job in `run_dir`; do nothing without a URL.

    Raises MusterError if another job holds it.
    """
    if url is None:
        yield
        return
    remote = RemoteCheckpoints(url)
    ours = _new_lock(run_dir)
    other = _read_lock(remote)
    if other is not None and _is_active(other, ours):
        raise MusterError(_refusal(remote, other))
    _write_lock(remote, ours)
    time.sleep(recheck_after_s)
    other = _read_lock(remote)
    if other is not None and other["word"] != ours["word"]:
        raise MusterError(_refusal(remote, other))
    done = threading.Event()
    heartbeat = threading.Thread(target=_heartbeat, args=(remote, ours, done), name="remote lock", daemon=True)
    heartbeat.start()
    try:
        yield
    finally:
        done.set()
        heartbeat.join()
        with suppress(MusterError):  # the next job in this run directory takes the lock over
            if (found := _read_lock(remote)) is not None and found["word"] == ours["word"]:
                remote.delete_file(LOCK)


def _new_lock(run_dir: Path) -> dict[str, Any]:
    return {
        "version": 1,
        "host": socket.gethostname(),
        "run": str(run_dir.absolute()),
        "pid": os.getpid(),
        "word": secrets.token_hex(8),
    }


def _heartbeat(remote: RemoteCheckpoints, ours: dict[str, Any], done: threading.Event) -> None:
    """Rewrite the lock every minute; print a message and stop if another job has replaced it."""
    while not done.wait(HEARTBEAT_S):
        with suppress(MusterError):  # uploads will report that the store fails
            found = _read_lock(remote)
            if found is not None and found["word"] != ours["word"]:
                message = f"two jobs write to one remote checkpoint directory: {_refusal(remote, found)}"
                print(message, file=sys.stderr, flush=True)
                return
            _write_lock(remote, ours)


def _write_lock(remote: RemoteCheckpoints, ours: dict[str, Any]) -> None:
    remote.write_text(LOCK, json.dumps({**ours, "time": time.time()}))


def _read_lock(remote: RemoteCheckpoints) -> dict[str, Any] | None:
    """Return the content of the lock; None if there is none or it can't be read."""
    text = remote.read_text(LOCK)
    try:
        found = json.loads(text or "")
        return {key: found[key] for key in ("host", "run", "pid", "word", "time")}
    except (ValueError, TypeError, LookupError):
        return None


def _is_active(other: dict[str, Any], ours: dict[str, Any]) -> bool:
    """Return True if the job that wrote the lock may still be running.

    A job in the same run directory can't be: that directory is locked by this one.
    """
    if other["host"] == ours["host"] and (other["run"] == ours["run"] or not _process_exists(other["pid"])):
        return False
    return time.time() - other["time"] < STALE_AFTER_S


def _process_exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        pass
    return True


def _refusal(remote: RemoteCheckpoints, other: dict[str, Any]) -> str:
    age = max(0.0, time.time() - other["time"])
    return (
        f"{remote.url} is the remote checkpoint directory of another job, of {other['run']} on {other['host']}, which"
        f" wrote there {age:.0f} s ago: give another train.remote_checkpoint_dir; if that job has ended, wait until"
        f" {STALE_AFTER_S:.0f} s have passed"
    )
