"""Random faults of a training job, many in a row, drawn from a seed: its ranks are killed, crash, raise errors, stop or
pause, at any moment or at one that is chosen by what a rank does; launchers are killed, and cables cut.

Each fault waits until the job has finished steps after the one before.
"""

import contextlib
import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from muster.launch.heartbeat import HeartbeatPage, RankStatus
from muster.launch.rank_monitor import process_state
from muster.report.run_files import read_metrics
from muster.schedule.action import KINDS
from tests.forking_launcher import FAIL
from tests.train_runs import Command

Moment = Callable[[int, RankStatus], bool]
HANG_S = 6.0
"""What the runs take for `train.hang_timeout_s`."""
_PATIENCE_S = 240.0
"""Longest time without the event that is waited for: the job hangs."""
_TAIL_BYTES = 1 << 14


def in_compute(pid: int, status: RankStatus) -> bool:
    return status.phase == "run" and not status.waiting and _lane(status) == "compute"


def in_communication(pid: int, status: RankStatus) -> bool:
    return status.phase == "run" and (status.waiting or _lane(status) in ("p2p", "collective"))


def in_copy(pid: int, status: RankStatus) -> bool:
    """True while a process writes its copy of a step."""
    return any("/muster-" in file and "/step-" in file for file in _open_files(pid))


def in_commit(pid: int, status: RankStatus) -> bool:
    """True while a rank takes part in a checkpoint on disk."""
    return status.phase == "save" or any("/checkpoints/" in file for file in _open_files(pid))


def _lane(status: RankStatus) -> str | None:
    traits = KINDS.get(status.action.kind)
    return None if traits is None else traits.lane


class Faults:
    """Faults of one running job of `size` ranks."""

    KINDS = ("kill", "crash", "error", "stop", "pause", "compute", "communication", "copy", "commit", "recovery", "two")
    MOMENTS = {"compute": in_compute, "communication": in_communication, "copy": in_copy, "commit": in_commit}
    DEADLY = (signal.SIGKILL, signal.SIGSEGV, FAIL)

    def __init__(self, job: Command, run: Path, size: int, seed: str) -> None:
        self._job, self._run, self._size, self._chance = job, run, size, random.Random(seed)
        self._furthest = 0
        self._coming: list[str] = []
        self.caused: list[str] = []

    def cause_many(self, count: int) -> None:
        """Makes faults happen one after the other, and returns when the job has recovered from the last.

        Raises AssertionError, with what was done, where it doesn't, or does more than one step again.
        """
        try:
            self._wait(lambda: self._step() >= 2, "no second step")
            while len(self.caused) < count:
                self.caused.append(self._next_kind())
                self._cause(self.caused[-1])
                if self._chance.random() < 0.5:
                    self._wait(lambda: len(self._members()) == self._size, "not as many ranks as before")
        except AssertionError as error:
            rows = "\n".join(map(str, self._recoveries()[-6:]))
            processes = [pid for one in self._launchers() for pid in one.children()]
            seen = "\n".join(f"process {pid}: {status_of(pid)}\n{stacks_of(pid)}" for pid in processes)
            raise AssertionError(f"after {', '.join(self.caused)}: {error}\n{rows}\n{seen}") from error

    def _next_kind(self) -> str:
        """Each kind as often as the others, in a random order."""
        if not self._coming:
            self._coming = self._chance.sample(self.KINDS, len(self.KINDS))
        return self._coming.pop()

    def _launchers(self) -> list[Command]:
        return [self._job]

    def _cause(self, kind: str) -> None:
        if kind in self.MOMENTS:
            self._kill_in(self.MOMENTS[kind])
            self._wait_for_steps()
            return
        self._rest(0.3)
        match kind:
            case "two":
                for victim in self._victims(2):
                    self._signal(victim, self._chance.choice(self.DEADLY))
            case "recovery":
                begun, step = len(self._recoveries()), self._step()
                self._signal(self._victims(1)[0], self._chance.choice(self.DEADLY))
                self._wait(lambda: len(self._recoveries()) > begun or self._step() > step + 2, "no recovery")
                self._rest(0.6)
                self._signal(self._victims(1)[0], signal.SIGKILL)
            case "stop" | "pause":
                self._stop(self._victims(1)[0], for_good=kind == "stop")
            case _:
                ways = {"kill": signal.SIGKILL, "crash": signal.SIGSEGV, "error": FAIL}
                self._signal(self._victims(1)[0], ways[kind])
        self._wait_for_steps()

    def _stop(self, victim: int, for_good: bool) -> None:
        """Stops a rank until the launcher has killed it, or for a moment."""
        self._signal(victim, signal.SIGSTOP)
        step = self._step()
        if for_good:  # the others may not have needed it any more
            self._wait(lambda: process_state(victim) in "XZ" or self._step() > step + 2, "nobody was missed")
        else:
            self._rest(1.0)
        self._signal(victim, signal.SIGCONT)

    def _wait_for_steps(self) -> None:
        """Returns when the job has finished two steps more: what was lost is made up for."""
        step = self._step()
        self._wait(lambda: self._step() >= step + 2, f"no two steps after step {step}")

    def _step(self) -> int:
        """The last step in the run's metrics."""
        step = last_step(self._run)
        assert step >= self._furthest - 1, f"step {step} after step {self._furthest}: more than one is done again"
        self._furthest = max(step, self._furthest)
        return step

    def _recoveries(self) -> list[dict]:
        return read_metrics(self._run / "recoveries.jsonl")

    def _wait(self, is_so: Callable[[], bool], problem: str) -> None:
        limit = time.monotonic() + _PATIENCE_S
        while not is_so():
            for launcher in self._launchers():
                if launcher.process.poll() is not None:
                    raise AssertionError(f"{problem} before the end: {launcher.wait()}")
            assert time.monotonic() < limit, f"{problem} within {_PATIENCE_S} s"
            time.sleep(0.01)

    def _rest(self, longest_s: float) -> None:
        time.sleep(self._chance.uniform(0, longest_s))

    def _members(self) -> list[int]:
        """The processes of the newest generation of ranks."""
        processes = [pid for one in self._launchers() for pid in one.children()]
        statuses = {pid: status for pid in processes if (status := status_of(pid)) and status.phase != "start"}
        newest = max((status.generation for status in statuses.values()), default=0)
        return sorted(pid for pid, status in statuses.items() if status.generation == newest)

    def _victims(self, count: int) -> list[int]:
        """Different ranks."""
        found: list[int] = []

        def are_there() -> bool:
            found[:] = self._members()
            return len(found) >= count

        self._wait(are_there, f"not {count} ranks")
        return self._chance.sample(found, count)

    def _kill_in(self, moment: Moment) -> None:
        """Kills a rank in the midst of what `moment` says: it stands still while it is looked at."""

        def is_killed() -> bool:
            victim = self._victims(1)[0]
            if not self._signal(victim, signal.SIGSTOP):
                return False
            while process_state(victim) not in "TXZ":
                pass
            status = status_of(victim)
            is_now = status is not None and moment(victim, status)
            if is_now:
                self._signal(victim, self._chance.choice(self.DEADLY))
            self._signal(victim, signal.SIGCONT)
            return is_now

        self._wait(is_killed, "no such moment")

    def _signal(self, pid: int, number: signal.Signals) -> bool:
        """False where the process has ended by itself."""
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return False
        return True


class FaultsOfNodes(Faults):
    """Faults of a job of two launchers, either of which may be lost with its ranks, and with a node's memory, and is
    then started again; the one of the first node may also stand still for so long that the other takes it for lost."""

    KINDS = (*Faults.KINDS, "launcher", "launcher", "coordinator", "coordinator", "cable", "standstill")

    def __init__(
        self,
        launchers: list[Command],
        start: Callable[[int], Command],
        set_cable: Callable[[bool], None],
        run: Path,
        said: tuple[Path, Path],
        size: int,
        seed: str,
    ) -> None:
        """`launchers` are those of nodes 0 and 1; the list is kept up to date. `start` starts one again, `set_cable`
        takes out (False) or puts in the cable between them; `said` are the files of what they print."""
        super().__init__(launchers[0], run, size, seed)
        self._both, self._start, self._set_cable, self._said = launchers, start, set_cable, said

    def _launchers(self) -> list[Command]:
        return self._both

    def _cause(self, kind: str) -> None:
        if kind not in ("launcher", "coordinator", "cable", "standstill"):
            super()._cause(kind)
            return
        self._wait(lambda: len(self._members()) == self._size, "not as many ranks as before")
        self._wait_for_steps()  # by then each node has a copy of what the other holds, if there are ranks on both
        self._rest(0.3)
        lost = 0 if kind == "coordinator" else 1
        if not set(self._members()) & set(self._both[1 - lost].children()):  # all copies would be lost, too
            lost, kind = 1 - lost, "launcher" if lost == 0 else "coordinator"
        meetings = self._count(0, "node 1 on node-b is back") + self._count(0, "nodes: node 0")
        match kind:
            case "cable":
                self._part(partial(self._set_cable, False), partial(self._set_cable, True), nodes=(0, 1))
            case "standstill":
                first = self._both[0].process
                self._part(
                    partial(first.send_signal, signal.SIGSTOP), partial(first.send_signal, signal.SIGCONT), nodes=(1,)
                )
            case _:
                self._both[lost].kill()
                self._both[lost].process.wait(_PATIENCE_S)
                self._rest(1.0)
                self._both[lost] = self._start(lost)
        self._wait(
            lambda: self._count(0, "node 1 on node-b is back") + self._count(0, "nodes: node 0") > meetings,
            "the nodes are not together again",
        )
        self._wait_for_steps()

    def _part(self, begin: Callable[[], None], end: Callable[[], None], nodes: tuple[int, ...]) -> None:
        """Keeps the launchers apart until those of `nodes` take the other for lost."""
        lost = {node: self._count(node, "launcher has been silent") for node in nodes}
        begin()
        try:
            self._wait(
                lambda: all(self._count(node, "launcher has been silent") > count for node, count in lost.items()),
                "nobody notices that a node is gone",
            )
        finally:
            end()

    def _count(self, node: int, words: str) -> int:
        """How often a node's launcher has said something."""
        return self._said[node].read_text().count(words)


def last_step(run: Path) -> int:
    """The step of the last whole line of a run's metrics; 0: there is none."""
    try:
        with open(run / "metrics.jsonl", "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            *lines, _ = file.read().split(b"\n")
    except OSError:
        return 0
    return json.loads(lines[-1])["step"] if lines else 0


def status_of(pid: int) -> RankStatus | None:
    """What a process says of itself; None before it says something, and after its end."""
    with _page_of(pid) as page:
        return None if page is None else page.read()


def stacks_of(pid: int) -> str:
    """What a process is doing in each of its threads; nothing before it can tell."""
    with _page_of(pid) as page:
        if page is None or page.read() is None:
            return ""
        with contextlib.suppress(ProcessLookupError):
            page.request_stacks(pid)
            time.sleep(0.5)
        return page.read_stacks()


@contextlib.contextmanager
def _page_of(pid: int) -> Iterator[HeartbeatPage | None]:
    """A process's heartbeat page; None where it has none."""
    page = None
    with contextlib.suppress(OSError):
        for fd in os.listdir(f"/proc/{pid}/fd"):
            if page is None and "memfd:muster-rank" in os.readlink(f"/proc/{pid}/fd/{fd}"):
                page = HeartbeatPage.of_process(pid, int(fd))
    try:
        yield page
    finally:
        if page is not None:
            page.close()


def _open_files(pid: int) -> list[str]:
    found = []
    with contextlib.suppress(OSError):
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                found.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
    return found
