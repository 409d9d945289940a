"""A rank as a launcher sees it: a process on this machine, or one that another node's launcher runs for it."""

import contextlib
import os
import signal
import time
from abc import ABC, abstractmethod
from pathlib import Path

from muster.launch.exit_status import RankExit, collect_rank_exit
from muster.launch.hang_diagnosis import RankFault, RankSnapshot
from muster.launch.heartbeat import RankStatus
from muster.launch.rank_errors import EXIT_STOPPED
from muster.launch.rank_monitor import RankMonitor
from muster.launch.rank_starter import Process

_PF_EXITING = 0x4
"""Linux's flag of a thread that exits (PF_EXITING)."""


class SupervisedRank(ABC):
    """One started process and, once it has ended, its exit code."""

    node = 0
    """Number of the node that it runs on."""

    def __init__(self, rank: int, last_alive: float) -> None:
        self.rank = rank
        """Number of the rank; -1: none, as a spare."""
        self.last_alive = last_alive
        """Last time at which it was known to run, in seconds since the epoch."""
        self.exit_code: int | None = None
        """Exit code, or minus the signal that killed it."""
        self.killed = False
        """True when this launcher killed it, with the others."""
        self.fault: RankFault | None = None
        """Fault for which it alone was killed: the others waited for it."""

    @property
    def failed(self) -> bool:
        return self.exit_code not in (None, 0, EXIT_STOPPED)

    @abstractmethod
    def poll(self) -> None:
        """Notice whether the process has ended."""

    @abstractmethod
    def status(self) -> RankStatus | None:
        """Return the rank's last update; None before the first."""

    @abstractmethod
    def snapshot(self, hang_timeout_s: float | None) -> RankSnapshot:
        """Take a snapshot of the rank, as `RankMonitor.snapshot` does."""

    @abstractmethod
    def tell(self, word: bytes) -> None:
        """Send a word to the process; one that has ended needs none."""

    @abstractmethod
    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the process."""

    @abstractmethod
    def kill(self) -> None:
        """Kill the process and its children."""

    @abstractmethod
    def renumber(self, rank: int) -> None:
        """Take another number among the ranks, -1 for none."""

    @abstractmethod
    def end(self, run_dir: Path, stop_requested: bool, ran_out_of_memory: bool | None) -> RankExit:
        """Return how the process ended; see `collect_rank_exit`."""

    @abstractmethod
    def close(self) -> None:
        """Free what this launcher holds for a process that has ended."""


class RankProcess(SupervisedRank):
    """A process that this launcher has started."""

    def __init__(self, rank: int, process: Process, monitor: RankMonitor, last_alive: float) -> None:
        super().__init__(rank, last_alive)
        self.process, self.monitor = process, monitor

    def poll(self) -> None:
        """Notice whether the process has ended; if so, kill the rest of its group, then reap it, which frees its
        number."""
        pid = self.process.pid
        now = time.time()
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            if not _is_exiting(pid):
                self.last_alive = now
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
        self.exit_code = self.process.wait()

    def status(self) -> RankStatus | None:
        return self.monitor.page.read()

    def snapshot(self, hang_timeout_s: float | None) -> RankSnapshot:
        return self.monitor.snapshot(hang_timeout_s)

    def tell(self, word: bytes) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.write(word)
            self.process.stdin.flush()

    def send_signal(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)

    def renumber(self, rank: int) -> None:
        self.rank = self.monitor.rank = rank

    def end(self, run_dir: Path, stop_requested: bool, ran_out_of_memory: bool | None) -> RankExit:
        # A process that hangs in the kernel counts as killed.
        code = -signal.SIGKILL if self.exit_code is None else self.exit_code
        own = self.killed, self.last_alive, stop_requested, ran_out_of_memory
        return collect_rank_exit(run_dir, self.rank, code, *own)

    def close(self) -> None:
        self.monitor.page.close()
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()


def _is_exiting(pid: int) -> bool:
    """Return whether the main thread of a process has begun to exit.

    Such a process can't be reaped before its last thread has ended, but its connections may be closed by then, so that
    other ranks notice.
    """
    try:
        return bool(int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[6]) & _PF_EXITING)
    except OSError:  # without /proc: a process that has not been reaped counts as running
        return False
