"""Random faults of a training's ranks: killed, stopped or crashed, at a moment that is chosen by what a rank does."""

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

from muster.launch.heartbeat import HeartbeatPage, RankStatus
from muster.launch.rank_monitor import process_state
from muster.report.run_files import read_metrics
from muster.schedule.action import KINDS
from tests.train_runs import Command

Moment = Callable[[int, RankStatus], bool]
HANG_S = 6.0
"""What the runs take for `train.hang_timeout_s`."""


def in_compute(pid: int, status: RankStatus) -> bool:
    return status.phase == "run" and not status.waiting and _lane(status) == "compute"


def in_communication(pid: int, status: RankStatus) -> bool:
    return status.phase == "run" and (status.waiting or _lane(status) in ("p2p", "collective"))


def in_commit(pid: int, status: RankStatus) -> bool:
    """True while a process writes its copy of a step."""
    return any("/muster-" in file and "/step-" in file for file in _open_files(pid))


def _lane(status: RankStatus) -> str | None:
    traits = KINDS.get(status.action.kind)
    return None if traits is None else traits.lane


class Faults:
    """Faults of one running job, drawn from a seed."""

    KINDS = ("kill", "crash", "stop", "compute", "communication", "commit", "recovery", "two")

    def __init__(self, job: Command, run: Path, seed: str) -> None:
        self._job, self._run, self._chance = job, run, random.Random(seed)

    def _launchers(self) -> list[Command]:
        return [self._job]

    def cause(self, kind: str) -> None:
        """Makes one fault happen."""
        self._pause()
        if kind in ("kill", "crash", "stop"):
            ways = {"kill": signal.SIGKILL, "crash": signal.SIGSEGV, "stop": signal.SIGSTOP}
            self._signal(self._victims(1)[0], ways[kind])
        elif kind == "two":
            for victim in self._victims(2):
                self._signal(victim, signal.SIGKILL)
        elif kind == "recovery":
            begun = len(self.recoveries())
            self._signal(self._victims(1)[0], signal.SIGKILL)
            while len(self.recoveries()) == begun:
                self._job.be_patient("no recovery")
            self._pause()
            self._signal(self._victims(1)[0], signal.SIGKILL)
        else:
            moments = {"compute": in_compute, "communication": in_communication, "commit": in_commit}
            self._kill_in(moments[kind])

    def recoveries(self) -> list[dict]:
        return read_metrics(self._run / "recoveries.jsonl")

    def _pause(self) -> None:
        time.sleep(self._chance.uniform(0, 0.6))

    def _victims(self, count: int) -> list[int]:
        """Different processes that train, or are about to."""
        while len(found := sorted(pid for one in self._launchers() for pid in children(one) if is_rank(pid))) < count:
            self._job.be_patient(f"not {count} ranks")
        return self._chance.sample(found, count)

    def _kill_in(self, moment: Moment) -> None:
        """Kills a rank in the midst of what `moment` says: it stands still while it is looked at."""
        while True:
            self._job.be_patient("no such moment")
            victim = self._victims(1)[0]
            if not self._signal(victim, signal.SIGSTOP):
                continue
            while process_state(victim) not in "TX":
                pass
            status = status_of(victim)
            if status is not None and moment(victim, status):
                self._signal(victim, signal.SIGKILL)
                return
            self._signal(victim, signal.SIGCONT)

    def _signal(self, pid: int, number: signal.Signals) -> bool:
        """False where the process has ended by itself."""
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return False
        return True


class FaultsOfNodes(Faults):
    """Faults of a job of two launchers, of which the second may be lost with its ranks and is then started again."""

    KINDS = (*Faults.KINDS, "launcher")

    def __init__(
        self, job: Command, second: Command, start_second: Callable[[], Command], run: Path, seed: str
    ) -> None:
        super().__init__(job, run, seed)
        self.second, self._start_second = second, start_second

    def _launchers(self) -> list[Command]:
        return [self._job, self.second]

    def cause(self, kind: str) -> None:
        if kind != "launcher":
            super().cause(kind)
            return
        self._pause()
        self.second.kill()
        self._pause()
        self.second = self._start_second()


def children(job: Command) -> list[int]:
    """The processes that a launcher has started, spares among them."""
    try:
        return [
            int(pid) for pid in Path(f"/proc/{job.process.pid}/task/{job.process.pid}/children").read_text().split()
        ]
    except OSError:
        return []


def is_rank(pid: int) -> bool:
    """False for a process that starts, or waits as a spare."""
    status = status_of(pid)
    return status is not None and status.phase != "start"


def status_of(pid: int) -> RankStatus | None:
    """What a process says of itself; None before it says something, and after its end."""
    with contextlib.suppress(OSError):
        for fd in os.listdir(f"/proc/{pid}/fd"):
            if "memfd:muster-rank" in os.readlink(f"/proc/{pid}/fd/{fd}"):
                page = HeartbeatPage.of_process(pid, int(fd))
                try:
                    return page.read()
                finally:
                    page.close()
    return None


def _open_files(pid: int) -> list[str]:
    found = []
    with contextlib.suppress(OSError):
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                found.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
    return found
