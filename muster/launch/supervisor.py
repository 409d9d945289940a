"""Supervision of the ranks' processes on this machine: start, poll, stop, kill and reap."""

import contextlib
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from muster.launch.exit_status import ExitStatus, RankExit, determine_exit_status, launcher_exit
from muster.launch.hang_diagnosis import RankFault, RankSnapshot, diagnose, format_snapshots
from muster.launch.heartbeat import HEARTBEAT_FD_VARIABLE
from muster.launch.oom_kills import oom_kill_count
from muster.launch.output_streams import TERMINAL_FDS_VARIABLE
from muster.launch.rank_errors import hang_path, log_path
from muster.launch.rank_monitor import SNAPSHOT_INTERVAL_S, RankMonitor, is_hung
from muster.launch.rank_starter import RankStarter
from muster.launch.supervised_rank import RankProcess, SupervisedRank
from muster.spec.errors import MusterError

POLL_INTERVAL_S = 0.05
_REAP_TIMEOUT_S = 10.0
"""Longest wait for a killed process to disappear; only one that hangs in the kernel needs more."""


class RankSupervisor:
    """Processes of one attempt on this machine."""

    writes_exit_file = True
    """True when this launcher writes exit.json."""
    terminal_fds: tuple[int, ...] = ()
    """Copies of this process's outputs for ranks that may become rank 0 later."""

    def __init__(self, run_dir: Path, grace_s: float, hang_timeout_s: float | None) -> None:
        self.ranks: list[SupervisedRank] = []
        self.starter = RankStarter()
        self.run_dir = run_dir
        self.hang_timeout_s = hang_timeout_s
        self.stop_requested = False
        self.kill_requested = False
        self.hang_fault: RankFault | None = None
        self._next_snapshot = 0.0
        self._earlier_oom_kills = oom_kill_count()
        self._stop_time: float | None = None
        """Time at which the ranks were asked to stop, on this machine's monotonic clock."""
        self._grace_s = grace_s
        self._deadline: float | None = None
        self._final_step = 0
        """Last step that all ranks had finished when none ran any more."""
        self._error: MusterError | OSError | None = None
        """Error at which this launcher has ended the ranks."""
        self._error_time = 0.0

    def start(
        self, command_for_rank: Callable[[int], list[str]], ranks: range, environment: Mapping[str, str] | None = None
    ) -> None:
        """Start every rank in a session, and so a process group, of its own."""
        for local, rank in enumerate(ranks):
            variables = {"LOCAL_RANK": str(local), "LOCAL_WORLD_SIZE": str(len(ranks)), **(environment or {})}
            self.ranks.append(self._start_process(rank, command_for_rank(rank), variables))

    def _start_process(self, rank: int, command: list[str], environment: Mapping[str, str]) -> RankProcess:
        """Start the process of a rank, or of a spare, whose number is negative and whose output is that of rank 0."""
        monitor = RankMonitor(rank)
        files: dict[str, Sequence[int]] = {HEARTBEAT_FD_VARIABLE: [monitor.page.fd]}
        if self.terminal_fds:
            files[TERMINAL_FDS_VARIABLE] = self.terminal_fds
        try:
            if rank > 0:
                with open(log_path(self.run_dir, rank), "ab") as log:
                    process = self.starter.start(command, environment, files, log.fileno())
            else:
                process = self.starter.start(command, environment, files)
        except OSError as error:
            monitor.page.close()
            what = f"rank {rank}" if rank >= 0 else "a spare"
            raise MusterError(f"could not start {what} ({error.filename}: {error.strerror})") from error
        monitor.pid = process.pid
        return RankProcess(rank, process, monitor, time.time())

    def poll(self) -> bool:
        """Notice ended ranks, requests and hangs, and act on them; False when no rank runs any more, or this launcher
        can't go on, for which it has killed them."""
        if self._error is None:
            try:
                self._supervise()
            except (MusterError, OSError) as error:
                self._error, self._error_time = error, time.time()
                self.kill()
        goes_on = self._error is None and bool(self.running())
        if not goes_on:
            self._final_step = self._last_step()
        return goes_on

    def _supervise(self) -> None:
        """Notice what has happened, and act on it. Raises MusterError or OSError where this machine doesn't allow
        that."""
        for rank in self.running():
            rank.poll()
        self._recover()
        if self.stop_requested and self._stop_time is None:
            self._stop_time = time.monotonic()
            for rank in self.running():
                rank.send_signal(signal.SIGTERM)
        self._take_snapshots()
        if self.failed:
            self.start_grace_period()
        if self.kill_requested or self.hang_fault or (self._deadline is not None and time.monotonic() > self._deadline):
            self.kill()

    def _last_step(self) -> int:
        """Return the last step that all ranks had finished, as far as they have told."""
        steps = [status.step for rank in self.ranks if (status := rank.status()) is not None]
        return min(filter(None, steps), default=0)  # a spare that has no step yet has not told any

    def _recover(self) -> None:
        """Replace failed ranks, where the job can go on without those of this attempt."""

    @property
    def failed(self) -> bool:
        """True when a rank here has failed, or their launcher."""
        return self._error is not None or any(rank.failed for rank in self.ranks)

    def start_grace_period(self) -> None:
        """Give the ranks the time of grace to end by themselves."""
        if self._deadline is None:
            self._deadline = time.monotonic() + self._grace_s

    def _take_snapshots(self) -> None:
        if self.hang_timeout_s is None or self.hang_fault or time.monotonic() < self._next_snapshot:
            return
        self._next_snapshot = time.monotonic() + SNAPSHOT_INTERVAL_S
        self.check_for_hang([rank.snapshot(self.hang_timeout_s) for rank in self.running()])

    def check_for_hang(self, snapshots: list[RankSnapshot]) -> None:
        """Check for a hang, from snapshots of this machine's ranks; a single machine has all ranks."""
        self.diagnose_if_hung(snapshots)

    def diagnose_if_hung(self, snapshots: list[RankSnapshot]) -> None:
        """Diagnose a hang if there is one, from snapshots of all ranks."""
        if self.hang_timeout_s is not None and not self.failed and is_hung(snapshots, self.hang_timeout_s):
            self.hang_fault = diagnose(snapshots)
            self._write_activity(snapshots)

    def _write_activity(self, snapshots: list[RankSnapshot]) -> None:
        """Write what each rank is doing, for those who ask why nothing goes on."""
        with contextlib.suppress(OSError):
            hang_path(self.run_dir).write_text(format_snapshots(snapshots))

    def shut_down(self) -> None:
        """Kill the processes that still run and wait until they are gone."""
        self.kill()
        limit = time.monotonic() + _REAP_TIMEOUT_S
        while self.running() and time.monotonic() < limit:
            for rank in self.running():
                rank.poll()
            time.sleep(POLL_INTERVAL_S / 10)
        for rank in self.ranks:
            rank.close()

    def running(self) -> list[SupervisedRank]:
        """Return the ranks that have not ended."""
        return [rank for rank in self.ranks if rank.exit_code is None]

    def kill(self) -> None:
        """Kill the processes that still run."""
        for rank in self.running():
            rank.killed = True
            rank.kill()

    def _use_up_oom_kills(self, ended: Iterable[SupervisedRank]) -> None:
        """Explain no later end of a rank by the kills of the kernel that have explained these."""
        kills = oom_kill_count()
        if kills is None or self._earlier_oom_kills is None:
            return
        used = sum(rank.exit_code == -signal.SIGKILL for rank in ended)
        self._earlier_oom_kills = min(kills, self._earlier_oom_kills + used)

    def rank_exits(self, ranks: Sequence[SupervisedRank] | None = None) -> list[RankExit]:
        """Return how `ranks` ended; all of this launcher by default, and how it has failed itself."""
        kills = oom_kill_count()
        out_of_memory = None if kills is None else kills != self._earlier_oom_kills
        asked = self.ranks if ranks is None else ranks
        ends = [rank.end(self.run_dir, self.stop_requested, out_of_memory) for rank in asked]
        if ranks is None and self._error is not None:
            ends.append(launcher_exit(self._error, self._error_time))
        return ends

    def exit_status(self) -> ExitStatus:
        """Return how the job ended."""
        return self._determine_status(self.rank_exits())

    def _determine_status(self, ends: Sequence[RankExit]) -> ExitStatus:
        """Determine the exit status from the ends of all ranks of the job."""
        status = determine_exit_status(ends, self.stop_requested, self.kill_requested, self.hang_fault)
        if self._error is not None and status.rank is not None:  # whose loss the launcher couldn't make good
            own = launcher_exit(self._error, self._error_time)
            status = replace(status, reason=f"{status.reason}; the launcher on {own.host}: {self._error}")
        return replace(status, step=self._final_step)
