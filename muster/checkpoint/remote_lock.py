"""One run at a time below a mirror's URL, as far as a store of objects can say; free of torch.

`lock.json` there names who writes, and is written anew every minute. Stores have no operation that takes a lock at
once: of two jobs that begin within the same second, on a store that shows new objects late, both may believe that they
have it. A job that was killed leaves its lock, which counts as long as it may still be at work.
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
"""A lock of another machine that was written so long ago is that of a job that is gone."""
RECHECK_AFTER_S = 1.0
"""After so long the lock is read again: it must still be the own one."""


@contextmanager
def hold_remote_lock(url: str | None, run_dir: Path, recheck_after_s: float = RECHECK_AFTER_S) -> Iterator[None]:
    """Holds a mirror for the job in `run_dir`; nothing without a URL. Raises MusterError when another job has it."""
    if url is None:
        yield
        return
    mirror, own = RemoteCheckpoints(url), _new_lock(run_dir)
    other = _read_lock(mirror)
    if other is not None and _is_active(other, own):
        raise MusterError(_refusal(mirror, other))
    _write_lock(mirror, own)
    time.sleep(recheck_after_s)
    other = _read_lock(mirror)
    if other is not None and other["word"] != own["word"]:
        raise MusterError(_refusal(mirror, other))
    done = threading.Event()
    beat = threading.Thread(target=_heartbeat, args=(mirror, own, done), name="mirror lock", daemon=True)
    beat.start()
    try:
        yield
    finally:
        done.set()
        beat.join()
        with suppress(MusterError):  # the next run in this directory takes it over
            if (found := _read_lock(mirror)) is not None and found["word"] == own["word"]:
                mirror.delete_file(LOCK)


def _new_lock(run_dir: Path) -> dict[str, Any]:
    word, host = secrets.token_hex(8), socket.gethostname()
    return {"version": 1, "host": host, "run": str(run_dir.absolute()), "pid": os.getpid(), "word": word}


def _heartbeat(remote: RemoteCheckpoints, ours: dict[str, Any], done: threading.Event) -> None:
    """Shows every minute that this job is still at work, and says when another has taken its place."""
    while not done.wait(HEARTBEAT_S):
        with suppress(MusterError):  # the copies will say that the store doesn't answer
            found = _read_lock(remote)
            if found is not None and found["word"] != ours["word"]:
                print(f"two jobs write to one mirror: {_refusal(remote, found)}", file=sys.stderr, flush=True)
                return
            _write_lock(remote, ours)


def _write_lock(remote: RemoteCheckpoints, ours: dict[str, Any]) -> None:
    remote.write_text(LOCK, json.dumps({**ours, "time": time.time()}))


def _read_lock(remote: RemoteCheckpoints) -> dict[str, Any] | None:
    """Who holds the lock; None where nobody does, or nobody can tell."""
    text = remote.read_text(LOCK)
    try:
        found = json.loads(text or "")
        return {key: found[key] for key in ("host", "run", "pid", "word", "time")}
    except (ValueError, TypeError, LookupError):
        return None


def _is_active(other: dict[str, Any], ours: dict[str, Any]) -> bool:
    """Whether the job that wrote the lock may still be running. One in the same directory can't: that is locked."""
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
        f"{remote.url} is the mirror of another job, of {other['run']} on {other['host']}, which wrote there"
        f" {age:.0f} s ago: give another train.remote_checkpoint_dir; if that job is gone, wait until"
        f" {STALE_AFTER_S:.0f} s have passed"
    )
