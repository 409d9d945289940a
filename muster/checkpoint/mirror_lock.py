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

from muster.checkpoint.mirror import Mirror
from muster.spec.errors import MusterError

LOCK = "lock.json"
BEAT_S = 60.0
STALE_S = 300.0
"""A lock of another machine that was written so long ago is that of a job that is gone."""
SETTLE_S = 1.0
"""After so long the lock is read again: it must still be the own one."""


@contextmanager
def mirror_held(url: str | None, run_dir: Path, settle_s: float = SETTLE_S) -> Iterator[None]:
    """Holds a mirror for the job in `run_dir`; nothing without a URL. Raises MusterError when another job has it."""
    if url is None:
        yield
        return
    mirror, own = Mirror(url), _own(run_dir)
    other = _read(mirror)
    if other is not None and _is_at_work(other, own):
        raise MusterError(_refusal(mirror, other))
    _write(mirror, own)
    time.sleep(settle_s)
    other = _read(mirror)
    if other is not None and other["word"] != own["word"]:
        raise MusterError(_refusal(mirror, other))
    done = threading.Event()
    beat = threading.Thread(target=_beat, args=(mirror, own, done), name="mirror lock", daemon=True)
    beat.start()
    try:
        yield
    finally:
        done.set()
        beat.join()
        with suppress(MusterError):  # the next run in this directory takes it over
            if (found := _read(mirror)) is not None and found["word"] == own["word"]:
                mirror.forget(LOCK)


def _own(run_dir: Path) -> dict[str, Any]:
    word, host = secrets.token_hex(8), socket.gethostname()
    return {"version": 1, "host": host, "run": str(run_dir.absolute()), "pid": os.getpid(), "word": word}


def _beat(mirror: Mirror, own: dict[str, Any], done: threading.Event) -> None:
    """Shows every minute that this job is still at work, and says when another has taken its place."""
    while not done.wait(BEAT_S):
        with suppress(MusterError):  # the copies will say that the store doesn't answer
            found = _read(mirror)
            if found is not None and found["word"] != own["word"]:
                print(f"two jobs write to one mirror: {_refusal(mirror, found)}", file=sys.stderr, flush=True)
                return
            _write(mirror, own)


def _write(mirror: Mirror, own: dict[str, Any]) -> None:
    mirror.note(LOCK, json.dumps({**own, "time": time.time()}))


def _read(mirror: Mirror) -> dict[str, Any] | None:
    """Who holds the lock; None where nobody does, or nobody can tell."""
    text = mirror.read_note(LOCK)
    try:
        found = json.loads(text or "")
        return {key: found[key] for key in ("host", "run", "pid", "word", "time")}
    except (ValueError, TypeError, LookupError):
        return None


def _is_at_work(other: dict[str, Any], own: dict[str, Any]) -> bool:
    """Whether the job that wrote the lock may still be running. One in the same directory can't: that is locked."""
    if other["host"] == own["host"] and (other["run"] == own["run"] or not _runs(other["pid"])):
        return False
    return time.time() - other["time"] < STALE_S


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        pass
    return True


def _refusal(mirror: Mirror, other: dict[str, Any]) -> str:
    age = max(0.0, time.time() - other["time"])
    return (
        f"{mirror.url} is the mirror of another job, of {other['run']} on {other['host']}, which wrote there"
        f" {age:.0f} s ago: give another train.mirror; if that job is gone, wait until {STALE_S:.0f} s have passed"
    )
