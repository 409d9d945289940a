"""Supervision of the ranks' processes on this machine: start, poll, stop, kill and reap."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from muster.launch.exit_status import ExitStatus, RankExit, collect_rank_exit, determine_exit_status
from muster.launch.hang_diagnosis import RankFault, RankSnapshot, diagnose, format_snapshots
from muster.launch.heartbeat import HEARTBEAT_FD_VARIABLE
from muster.launch.oom_kills import oom_kill_count
from muster.launch.rank_errors import EXIT_STOPPED, hang_path, log_path
from muster.launch.rank_monitor import SNAPSHOT_INTERVAL_S, RankMonitor, is_hung
from muster.spec.errors import MusterError

POLL_INTERVAL_S = 0.05
_PF_EXITING = 0x4
"""Linux's flag of a thread that exits (PF_EXITING)."""
_REAP_TIMEOUT_S = 10.0
"""Longest wait for a killed process to disappear; only one that hangs in the kernel needs more."""


@dataclass
class _RankProcess:
    """One started process and, once it has ended, its exit code."""

    rank: int
    process: subprocess.Popen[bytes]
    monitor: RankMonitor
    last_alive: float
    """Last time at which it was known to run, in seconds since the epoch."""
    exit_code: int | None = None
    """Exit code, or minus the signal that killed it."""
    killed: bool = False
    """True when this launcher killed it."""

    @property
    def failed(self) -> bool:
        return self.exit_code not in (None, 0, EXIT_STOPPED)


class RankSupervisor:
    """Processes of one attempt on this machine."""

    writes_exit_file = True
    """True when this launcher writes exit.json."""

    def __init__(self, run_dir: Path, grace_s: float, hang_timeout_s: float | None) -> None:
        self.ranks: list[_RankProcess] = []
        self.run_dir = run_dir
        self.hang_timeout_s = hang_timeout_s
        self.stop_requested = False
        self.kill_requested = False
        self.hang_fault: RankFault | None = None
        self._next_snapshot = 0.0
        self._earlier_oom_kills = oom_kill_count()
        self._stop_sent = False
        self._grace_s = grace_s
        self._deadline: float | None = None
        # Standard input of each rank: it never carries data, but reaches its end when this process ends.
        self._ranks_end, self._our_end = os.pipe()

    def start(
        self, command_for_rank: Callable[[int], list[str]], ranks: range, environment: Mapping[str, str] | None = None
    ) -> None:
        """Start every rank in a session, and so a process group, of its own."""
        common = {"OMP_NUM_THREADS": "1", **os.environ, **(environment or {})}
        for local, rank in enumerate(ranks):
            command = command_for_rank(rank)
            monitor = RankMonitor(rank)
            rank_variables = {
                "LOCAL_RANK": str(local),
                "LOCAL_WORLD_SIZE": str(len(ranks)),
                HEARTBEAT_FD_VARIABLE: str(monitor.page.fd),
            }
            try:
                with open(log_path(self.run_dir, rank) if rank else os.devnull, "ab") as log:
                    process = subprocess.Popen(
                        command,
                        stdin=self._ranks_end,
                        stdout=log if rank else None,
                        stderr=log if rank else None,
                        env={**common, **rank_variables},
                        pass_fds=(monitor.page.fd,),
                        start_new_session=True,
                    )
            except OSError as error:
                raise MusterError(f"could not start rank {rank} ({error.filename}: {error.strerror})") from error
            monitor.pid = process.pid
            self.ranks.append(_RankProcess(rank, process, monitor, time.time()))

    def poll(self) -> bool:
        """Notice ended ranks, requests and hangs, and act on them; False when no rank runs any more."""
        for rank in self.running():
            _poll_process(rank)
        if self.stop_requested and not self._stop_sent:
            self._stop_sent = True
            for rank in self.running():
                os.kill(rank.process.pid, signal.SIGTERM)
        self._take_snapshots()
        if self.failed:
            self.start_grace_period()
        if self.kill_requested or self.hang_fault or (self._deadline is not None and time.monotonic() > self._deadline):
            self.kill()
        return bool(self.running())

    @property
    def failed(self) -> bool:
        """True when a rank here has failed."""
        return any(rank.failed for rank in self.ranks)

    def start_grace_period(self) -> None:
        """Give the ranks the time of grace to end by themselves."""
        if self._deadline is None:
            self._deadline = time.monotonic() + self._grace_s

    def _take_snapshots(self) -> None:
        if self.hang_timeout_s is None or self.hang_fault or time.monotonic() < self._next_snapshot:
            return
        self._next_snapshot = time.monotonic() + SNAPSHOT_INTERVAL_S
        self.check_for_hang([rank.monitor.snapshot(self.hang_timeout_s) for rank in self.running()])

    def check_for_hang(self, snapshots: list[RankSnapshot]) -> None:
        """Check for a hang, from snapshots of this machine's ranks; a single machine has all ranks."""
        self.diagnose_if_hung(snapshots)

    def diagnose_if_hung(self, snapshots: list[RankSnapshot]) -> None:
        """Diagnose a hang if there is one, from snapshots of all ranks."""
        if self.hang_timeout_s is not None and not self.failed and is_hung(snapshots, self.hang_timeout_s):
            self.hang_fault = diagnose(snapshots)
            with contextlib.suppress(OSError):
                hang_path(self.run_dir).write_text(format_snapshots(snapshots))

    def shut_down(self) -> None:
        """Kill the processes that still run and wait until they are gone."""
        self.kill()
        limit = time.monotonic() + _REAP_TIMEOUT_S
        while self.running() and time.monotonic() < limit:
            for rank in self.running():
                _poll_process(rank)
            time.sleep(POLL_INTERVAL_S / 10)
        for rank in self.ranks:
            rank.monitor.page.close()
        os.close(self._ranks_end)
        os.close(self._our_end)

    def running(self) -> list[_RankProcess]:
        """Return the ranks that have not ended."""
        return [rank for rank in self.ranks if rank.exit_code is None]

    def kill(self) -> None:
        """Kill the processes that still run."""
        for rank in self.running():
            rank.killed = True
            os.killpg(rank.process.pid, signal.SIGKILL)

    def rank_exits(self) -> list[RankExit]:
        """Return how the ranks here ended."""
        kills = oom_kill_count()
        out_of_memory = None if kills is None else kills != self._earlier_oom_kills
        return [
            collect_rank_exit(
                self.run_dir,
                rank.rank,
                _exit_code(rank),
                rank.killed,
                rank.last_alive,
                self.stop_requested,
                out_of_memory,
            )
            for rank in self.ranks
        ]

    def exit_status(self) -> ExitStatus:
        """Return how the job ended."""
        return determine_exit_status(self.rank_exits(), self.stop_requested, self.kill_requested, self.hang_fault)


def _poll_process(rank: _RankProcess) -> None:
    """Notice whether the process has ended; if so, kill the rest of its group, then reap it, which frees its number."""
    pid = rank.process.pid
    now = time.time()
    if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if not _is_exiting(pid):
            rank.last_alive = now
        return
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    rank.exit_code = rank.process.wait()


def _is_exiting(pid: int) -> bool:
    """Return whether the main thread of a process has begun to exit.

    Such a process can't be reaped before its last thread has ended, but its connections may be closed by then, so that
    other ranks notice.
    """
    try:
        return bool(int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[6]) & _PF_EXITING)
    except OSError:  # without /proc: a process that has not been reaped counts as running
        return False


def _exit_code(rank: _RankProcess) -> int:
    """Return the exit code; a process that hangs in the kernel counts as killed."""
    return -signal.SIGKILL if rank.exit_code is None else rank.exit_code
