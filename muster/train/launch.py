"""Muster's launcher: starts one process per rank on this machine, owns their store, and says once what went wrong."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch.distributed as dist

from muster.parallel.whereabouts import VARIABLE
from muster.spec.errors import MusterError
from muster.train.diagnosis import Finding, diagnose, table
from muster.train.errors import STOPPED, RankError, error_path, hang_path, log_path, read_error, write_exit
from muster.train.watch import LOOK_S, Watched, hangs

_POLL_S = 0.05
_REAP_LIMIT_S = 10.0
"""How long a killed process may take to disappear; only one that hangs in the kernel needs more."""


def launch(
    command_for_rank: Callable[[int, str], list[str]],
    num_ranks: int,
    run_dir: Path,
    grace_s: float = 5.0,
    port: int = 0,
    hang_s: float | None = None,
) -> int:
    """Runs `command_for_rank(rank, "host:port of the store")` for every rank and returns the job's exit code.

    0: all ranks finished; 75: they stopped because they were asked to; otherwise the code of the rank that failed
    first, with one sentence on standard error. The other ranks then have `grace_s` seconds to end by themselves.
    When for `hang_s` seconds no rank begins anything, the one that the others wait for is named, and all are killed.
    Rank 0 writes to this process's output, the others to `run_dir/logs/rank-R.txt`; `run_dir/exit.json` keeps the
    outcome. SIGTERM and SIGINT are passed on once as SIGTERM; a SIGINT after that kills. No rank outlives this call.
    Must run in the main thread. Raises MusterError when the port is taken, the run directory can't be written or a
    rank can't be started.
    """
    _clear(run_dir)
    store = open_store(port)
    job = _Job(run_dir, grace_s, hang_s)
    with _passed_on(job):
        try:
            job.start(command_for_rank, num_ranks, f"{store.host}:{store.port}")
            while job.poll():
                time.sleep(_POLL_S)
        finally:
            job.end()
    return _conclude(run_dir, job)


def open_store(port: int = 0) -> dist.TCPStore:
    """A store that only this machine can reach, on `port` (0: any free one). Raises MusterError when it is taken."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", port))
        listener.listen(1024)
    except (OSError, OverflowError) as error:
        listener.close()
        reason = error.strerror if isinstance(error, OSError) else error
        raise MusterError(f"could not listen on port {port} of 127.0.0.1 ({reason}): give another one, or 0") from error
    port = listener.getsockname()[1]
    return dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


@dataclass
class _Rank:
    """One started process and, once it has ended, how."""

    process: subprocess.Popen[bytes]
    watched: Watched
    seen_alive: float
    """When it was last known to run, in seconds since the epoch."""
    code: int | None = None
    """Its exit code, or minus the signal that killed it."""
    killed: bool = False
    """By this launcher."""

    @property
    def failed(self) -> bool:
        return self.code not in (None, 0, STOPPED)


class _Job:
    """The processes of one attempt."""

    def __init__(self, run_dir: Path, grace_s: float, hang_s: float | None) -> None:
        self.ranks: list[_Rank] = []
        self.stop_requested = False
        self.kill_requested = False
        self.hang: Finding | None = None
        self._hang_s, self._next_look = hang_s, 0.0
        self._stop_sent = False
        self._run_dir = run_dir
        self._grace_s = grace_s
        self._deadline: float | None = None
        # Each rank's standard input: it never carries anything, but ends when this process does.
        self._ranks_end, self._our_end = os.pipe()

    def start(self, command_for_rank: Callable[[int, str], list[str]], num_ranks: int, address: str) -> None:
        """Starts every rank in a session, and so a process group, of its own."""
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        for rank in range(num_ranks):
            command, watched = command_for_rank(rank, address), Watched(rank)
            try:
                with open(log_path(self._run_dir, rank) if rank else os.devnull, "ab") as log:
                    process = subprocess.Popen(
                        command,
                        stdin=self._ranks_end,
                        stdout=log if rank else None,
                        stderr=log if rank else None,
                        env={**environment, VARIABLE: str(watched.page.fd)},
                        pass_fds=(watched.page.fd,),
                        start_new_session=True,
                    )
            except OSError as error:
                raise MusterError(f"could not start rank {rank} ({error.filename}: {error.strerror})") from error
            watched.process = process.pid
            self.ranks.append(_Rank(process, watched, time.time()))

    def poll(self) -> bool:
        """Notices what happened and acts on it; False when no rank runs any more."""
        for rank in self._running():
            _look(rank)
        if self.stop_requested and not self._stop_sent:
            self._stop_sent = True
            for rank in self._running():
                os.kill(rank.process.pid, signal.SIGTERM)
        self._look_for_hang()
        if self._deadline is None and any(rank.failed for rank in self.ranks):
            self._deadline = time.monotonic() + self._grace_s
        if self.kill_requested or self.hang or (self._deadline is not None and time.monotonic() > self._deadline):
            self._kill()
        return bool(self._running())

    def _look_for_hang(self) -> None:
        if self._hang_s is None or self.hang or time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + LOOK_S
        sightings = [rank.watched.look(self._hang_s) for rank in self._running()]
        if not any(rank.failed for rank in self.ranks) and hangs(sightings, self._hang_s):
            self.hang = diagnose(sightings)
            with contextlib.suppress(OSError):
                hang_path(self._run_dir).write_text(table(sightings))

    def end(self) -> None:
        """Kills what still runs and waits until it is gone."""
        self._kill()
        limit = time.monotonic() + _REAP_LIMIT_S
        while self._running() and time.monotonic() < limit:
            for rank in self._running():
                _look(rank)
            time.sleep(_POLL_S / 10)
        for rank in self.ranks:
            rank.watched.page.close()
        os.close(self._ranks_end)
        os.close(self._our_end)

    def _running(self) -> list[_Rank]:
        return [rank for rank in self.ranks if rank.code is None]

    def _kill(self) -> None:
        for rank in self._running():
            rank.killed = True
            os.killpg(rank.process.pid, signal.SIGKILL)


def _look(rank: _Rank) -> None:
    """Sees whether the process has ended; if so, kills what is left of its group and then lets its number go."""
    pid, now = rank.process.pid, time.time()
    if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        rank.seen_alive = now
        return
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    rank.code = rank.process.wait()


@contextlib.contextmanager
def _passed_on(job: _Job) -> Iterator[None]:
    """SIGTERM and SIGINT become requests to the job."""

    def on_signal(number: int, _frame: object) -> None:
        job.kill_requested |= job.stop_requested and number == signal.SIGINT
        job.stop_requested = True

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _clear(run_dir: Path) -> None:
    """Removes what an earlier attempt said about its end."""
    try:
        log_path(run_dir, 0).parent.mkdir(parents=True, exist_ok=True)
        for path in [
            run_dir / "exit.json",
            hang_path(run_dir),
            *error_path(run_dir, 0).parent.glob("rank-*.error.json"),
        ]:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise MusterError(f"can't write the run directory {run_dir}: {error.strerror}") from error


def _conclude(run_dir: Path, job: _Job) -> int:
    """Says and writes down how the job ended; its exit code."""
    cause = _cause(run_dir, job)
    if job.kill_requested and any(rank.killed for rank in job.ranks):
        code, reason = 1, "killed on request: what came after the last checkpoint is lost"
    elif cause is not None:
        joint = " " if cause.kind == _ENDED else ": "
        code, reason = cause.exit_code, f"rank {cause.rank} on {cause.host}{joint}{cause.sentence}"
    elif any(rank.code != 0 for rank in job.ranks):
        code, reason = STOPPED, "stopped on request; the same command continues the run"
    else:
        code, reason = 0, "finished"
    if code not in (0, STOPPED):
        print(f"error: {reason}", file=sys.stderr, flush=True)
    write_exit(run_dir, code, reason, cause and cause.rank, cause and cause.host)
    return code


_ENDED = "ended"
"""The kind of an error that the launcher saw from outside, because the rank could say nothing itself."""


def _cause(run_dir: Path, job: _Job) -> RankError | None:
    """What failed first, on any rank; what only followed from another rank's end counts when there is nothing else."""
    if job.hang is not None:
        return _seen_from_outside(job.hang.rank, job.hang.host, job.hang.sentence)
    found = [error for rank in range(len(job.ranks)) if (error := _error_of(run_dir, rank, job)) is not None]
    first = min(found, key=lambda error: (not error.primary, error.time), default=None)
    # A rank that was asked to stop before it could listen is gone, and the others may have felt it.
    stopped_early = job.stop_requested and any(rank.code == -signal.SIGTERM for rank in job.ranks)
    if first is None or (stopped_early and not first.primary):
        return None
    silent = [index for index, rank in enumerate(job.ranks) if rank.killed and read_error(run_dir, index) is None]
    if first.primary or len(silent) != 1:
        return first
    sentence = f"stopped answering, says rank {first.rank}: {first.sentence}"
    return replace(first, rank=silent[0], kind=_ENDED, sentence=sentence)


def _error_of(run_dir: Path, index: int, job: _Job) -> RankError | None:
    """Why one rank failed: in its own words, or by how its process ended. None for one that didn't fail by itself."""
    rank = job.ranks[index]
    if not rank.failed:
        return None
    if (said := read_error(run_dir, index)) is not None:
        return said
    code = rank.code or 0
    if rank.killed or (code == -signal.SIGTERM and job.stop_requested):
        return None
    if code < 0:
        name = next((known.name for known in signal.Signals if known == -code), signal.strsignal(-code))
        sentence = f"was killed by signal {-code} ({name})"
    else:
        log = f"; {log_path(run_dir, index)} may say more" if index else ""
        sentence = f"ended with exit code {code} and no reason{log}"
    # It died after it was last seen alive and before any other rank could feel it. The C++ runtime aborts when a
    # connection breaks at the wrong moment: seldom the first cause.
    return _seen_from_outside(index, socket.gethostname(), sentence, rank.seen_alive, code != -signal.SIGABRT)


def _seen_from_outside(rank: int, host: str, sentence: str, at: float = 0.0, primary: bool = True) -> RankError:
    return RankError(rank, host, _ENDED, sentence, "", at, primary, exit_code=1)
