"""Real ranks for tests: starts processes once, runs one function in each, and brings back what they return.

A launch costs seconds, so a test should put many cases into one payload. The ranks are forks of one process that has
imported PyTorch, which takes longer than all else. In the test:

    results = run_ranks(4, "tests.test_something:on_rank", {"cases": [...]})

and, in the module named there, `def on_rank(rank, world_size, store, payload)`, which returns anything that JSON can
hold. It opens its own process group on `store`, with a finite time limit.
"""

import contextlib
import faulthandler
import importlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[1]
_TAIL_CHARACTERS = 3000
_GRACE_S = 1.0
"""How long the other ranks may go on after one has failed, so that all of them can say why."""


def run_ranks(num_ranks: int, target: str, payload: Any = None, timeout_s: float = 120) -> list[Any]:
    """What `target` ("package.module:function" or "path/to/file.py:function") returned on each rank.

    Raises AssertionError with the end of every rank's output when one fails or `timeout_s` have passed.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory(prefix="ranks-") as name:
        folder = Path(name)
        (folder / "payload.json").write_text(json.dumps(payload))
        parent = _start(folder, num_ranks, store.port, target, timeout_s)
        try:
            problem = _wait(parent, folder, timeout_s)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(parent.pid, signal.SIGKILL)
            parent.wait()
        if problem:
            raise AssertionError("\n".join([problem, *(_tail(folder, rank) for rank in range(num_ranks))]))
        return [json.loads((folder / f"result-{rank}.json").read_text()) for rank in range(num_ranks)]


def _start(folder: Path, num_ranks: int, port: int, target: str, timeout_s: float) -> "subprocess.Popen[bytes]":
    """The parent of the ranks, in a process group of its own."""
    command = [sys.executable, "-m", "tests.ranks", str(folder), str(num_ranks), str(port), target, str(timeout_s)]
    paths = [str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    with open(folder / "parent.txt", "wb") as output:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment, start_new_session=True
        )


def _wait(parent: "subprocess.Popen[bytes]", folder: Path, timeout_s: float) -> str | None:
    """What went wrong, or None."""
    try:
        if parent.wait(timeout_s) == 0:
            return None
        return (folder / "parent.txt").read_text(errors="replace")[-_TAIL_CHARACTERS:]
    except subprocess.TimeoutExpired:
        running = [path.stem.rpartition("-")[2] for path in sorted(folder.glob("output-*.txt"))]
        running = [int(rank) for rank in running if not (folder / f"result-{rank}.json").exists()]
        return f"ranks {running} still ran after {timeout_s} s"


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


def _main(folder: Path, num_ranks: int, port: int, target: str, timeout_s: float) -> int:
    """The ranks' parent: imports what they need, once, and forks them. Its exit code is 1 when one of them fails."""
    function = _find(target)
    run = partial(_run_rank, folder, num_ranks, port, function, timeout_s)
    ranks = {_fork(folder / f"output-{rank}.txt", partial(run, rank)): rank for rank in range(num_ranks)}
    failed, limit = False, time.monotonic() + timeout_s
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


def _fork(output_path: Path, run: Callable[[], None]) -> int:
    """Starts a rank; returns its process id."""
    if pid := os.fork():
        return pid
    code = 1
    try:
        with open(output_path, "wb") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        run()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run_rank(
    folder: Path,
    num_ranks: int,
    port: int,
    function: Callable[[int, int, dist.Store, Any], Any],
    timeout_s: float,
    rank: int,
) -> None:
    """One rank. When it hangs, its stacks are printed just before the time is up."""
    faulthandler.dump_traceback_later(max(timeout_s - 2, 1))
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=timeout_s))
    payload = json.loads((folder / "payload.json").read_text())
    result = function(rank, num_ranks, dist.PrefixStore("test", store), payload)
    (folder / f"result-{rank}.json").write_text(json.dumps(result))
    # A rank that leaves while others still use its connections can make them abort.
    if store.add("done", 1) == num_ranks:
        store.set("all done", "")
    store.wait(["all done"])
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    folder, num_ranks, port, target, timeout_s = sys.argv[1:]
    sys.exit(_main(Path(folder), int(num_ranks), int(port), target, float(timeout_s)))
