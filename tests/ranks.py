"""Real ranks for tests: starts processes, runs one function in each, and brings back what they return.

In the test:

    results = run_ranks(4, "tests.test_something:on_rank", {"cases": [...]})

and, in the module named there, `def on_rank(rank, world_size, store, payload)`, which returns anything that JSON can
hold. It opens its own process group on `store`, with a finite time limit.

To import PyTorch takes longer than all else. So the first call starts a *nursery*, a process that imports it and
Muster once and then does nothing but fork: for each call a parent of the ranks, which imports what they need and forks
them. A launch still costs tenths of a second, so a test should put many cases into one payload.
"""

import atexit
import contextlib
import faulthandler
import functools
import gc
import importlib
import importlib.util
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[1]
_TAIL_CHARACTERS = 3000
_SPARE_BYTES = 1024
"""Room in the nursery's command line for that of a rank, which a fork server of Muster writes there."""
_GRACE_S = 1.0
"""Seconds that the other ranks may continue after one has failed, so that all of them can report why."""


def run_ranks(num_ranks: int, target: str, payload: Any = None, timeout_s: float = 600) -> list[Any]:
    """Return the results of `target` ("package.module:function" or "path/to/file.py:function") on each rank.

    Raises AssertionError with the end of every rank's output if one fails or `timeout_s` have passed.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as name:
        folder = Path(name)
        with started(folder, num_ranks, target, payload, timeout_s) as ranks:
            in_time = ranks.end_within(timeout_s)
            results = {rank: folder / f"result-{rank}.json" for rank in range(num_ranks)}
            running = [rank for rank, path in results.items() if not path.exists()]
        if not in_time or ranks.exit_code:
            said = (folder / "parent.txt").read_text(errors="replace")[-_TAIL_CHARACTERS:]
            problem = said if in_time else f"ranks {running} still ran after {timeout_s} s"
            raise AssertionError("\n".join([problem, *(_tail(folder, rank) for rank in results)]))
        return [json.loads(path.read_text()) for path in results.values()]


@contextlib.contextmanager
def started(
    folder: Path, num_ranks: int, target: str, payload: Any = None, timeout_s: float = 600
) -> Iterator["_Nursery"]:
    """Ranks at work, who write to `folder`. What is left of them at the end of the context is killed."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    (folder / "payload.json").write_text(json.dumps(payload))
    ranks = nursery()
    ranks.start(_Job(str(folder), num_ranks, store.port, target, timeout_s, dict(os.environ), os.getcwd()))
    try:
        yield ranks
    finally:
        ranks.finish()


class _Job(NamedTuple):
    """Parameters for the parent of the ranks."""

    folder: str
    num_ranks: int
    port: int
    target: str
    timeout_s: float
    environment: dict[str, str]
    working_directory: str


class _Nursery:
    """The process that forks the ranks' parents, as the tests see it; it works for one launch at a time."""

    def __init__(self) -> None:
        paths = [str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(path for path in paths if path)}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.ranks", " " * _SPARE_BYTES],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **environment},
            start_new_session=True,
            bufsize=0,  # `select` must see all that has not been read
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._asks, self._answers = self._process.stdin, self._process.stdout
        self._parent, self.exit_code = 0, 0
        atexit.register(self._end)

    def start(self, job: _Job) -> None:
        self._asks.write(json.dumps(job).encode() + b"\n")
        self._parent = self._answer()

    def end_within(self, seconds: float) -> bool:
        """Tell if the ranks end within so many seconds from now."""
        return bool(select.select([self._answers], [], [], seconds)[0])

    def serve_commands(self, place: str) -> None:
        """Returns once the socket `place` takes commands, until this process ends: see forks.py."""
        self._asks.write(json.dumps(place).encode() + b"\n")
        self._answer()

    def finish(self) -> None:
        """Afterwards nothing of the launch is left running; `exit_code` says how it ended."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._parent, signal.SIGKILL)
        self.exit_code = self._answer()

    def _answer(self) -> int:
        line = self._answers.readline()
        assert line, "the nursery of ranks has died"
        return int(line)

    def _end(self) -> None:
        self._asks.close()
        self._process.wait()


nursery = functools.cache(_Nursery)


def _tail(folder: Path, rank: int) -> str:
    path = folder / f"output-{rank}.txt"
    output = path.read_text(errors="replace") if path.exists() else "never began"
    return f"--- rank {rank} ---\n{output[-_TAIL_CHARACTERS:]}"


def _find(target: str) -> Callable[[int, int, dist.Store, Any], Any]:
    place, _, function = target.rpartition(":")
    if place.endswith(".py"):
        spec = importlib.util.spec_from_file_location(Path(place).stem, place)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(place)
    return getattr(module, function)


def _serve() -> None:
    """The nursery: for each job the process number of its parent, then how that ended."""
    importlib.import_module("torch._dynamo")
    importlib.import_module("muster.train.loop")
    gc.freeze()  # the collector of a forked process would write to, and so copy, all that was imported
    for line in sys.stdin:
        asked = json.loads(line)
        if isinstance(asked, str):
            _serve_commands(asked)
            continue
        job = _Job(*asked)
        parent = _fork(Path(job.folder) / "parent.txt", partial(_raise_ranks, job))
        with contextlib.suppress(OSError):  # it may have done it, or be gone
            os.setpgid(parent, parent)
        print(parent, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(parent, 0)[1]), flush=True)


def _serve_commands(place: str) -> None:
    listening, ready = os.pipe()
    _fork(Path(os.devnull), partial(importlib.import_module("tests.forks").serve, place, ready))
    os.close(ready)
    os.read(listening, 1)
    os.close(listening)
    print(0, flush=True)


def _raise_ranks(job: _Job) -> int:
    """The ranks' parent, in a process group of its own: imports what they need, once, and forks them.

    Returns 1 when one of them fails.
    """
    os.setpgid(0, 0)
    os.environ.clear()
    os.environ.update(job.environment, OMP_NUM_THREADS="1")
    os.chdir(job.working_directory)
    folder, function = Path(job.folder), _find(job.target)
    run = partial(_run_rank, job, function)
    ranks = {_fork(folder / f"output-{rank}.txt", partial(run, rank)): rank for rank in range(job.num_ranks)}
    failed, limit = False, time.monotonic() + job.timeout_s
    while ranks and time.monotonic() < limit:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            time.sleep(0.01)
            continue
        rank, code = ranks.pop(pid), os.waitstatus_to_exitcode(status)
        if code != 0 and not failed:
            print(f"rank {rank} ended with {code}", flush=True)
            failed, limit = True, min(limit, time.monotonic() + _GRACE_S)
    return 1 if failed or ranks else 0


def _fork(output_path: Path, run: Callable[[], int]) -> int:
    """Starts a process that only does `run`, which gives its exit code; returns its number."""
    if pid := os.fork():
        return pid
    code = 1
    try:
        with open(os.devnull, "rb") as nothing, open(output_path, "wb") as output:
            os.dup2(nothing.fileno(), 0)
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        code = run()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run_rank(job: _Job, function: Callable[[int, int, dist.Store, Any], Any], rank: int) -> int:
    """One rank. When it hangs, its stacks are printed just before the time is up."""
    faulthandler.dump_traceback_later(max(job.timeout_s - 2, 1))
    folder = Path(job.folder)
    store = dist.TCPStore("127.0.0.1", job.port, is_master=False, timeout=timedelta(seconds=job.timeout_s))
    payload = json.loads((folder / "payload.json").read_text())
    result = function(rank, job.num_ranks, dist.PrefixStore("test", store), payload)
    (folder / f"result-{rank}.json").write_text(json.dumps(result))
    # A rank that leaves while others still use its connections can make them abort.
    if store.add("done", 1) == job.num_ranks:
        store.set("all done", "")
    store.wait(["all done"])
    if dist.is_initialized():
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    _serve()
