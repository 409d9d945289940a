"""Where each rank is: a page of memory that a rank shares with its launcher, who can read it whatever the rank does.

A rank writes what it begins, which costs a microsecond; nothing is sent and no file is written. Free of torch.
"""

import faulthandler
import fcntl
import mmap
import os
import signal
import struct
from dataclasses import dataclass
from typing import cast

from muster.schedule.action import Action, Kind

HEARTBEAT_FD_VARIABLE = "MUSTER_WHEREABOUTS"
"""The environment's word for the file descriptor of this rank's page."""
PAGE_BYTES = 4096
STACKS_BYTES = 1 << 16
"""Bytes after the page for the stacks of the rank's threads."""
STACKS_SIGNAL = signal.SIGUSR1
"""Makes a rank write its stacks there, even while it waits in C++."""
_RECORD = struct.Struct("<QqiiB16s32s")
"""Counts, stage, micro-batch, flag, then the phase and the instruction's kind: each fits (a test writes them all)."""
_NO_ACTION = Action(cast(Kind, ""))


@dataclass(frozen=True)
class RankStatus:
    """What a rank said last."""

    num_updates: int
    """How often it has said anything; it moves on as long as this does."""
    step: int
    """Steps made before."""
    phase: str
    """`start`, `data`, `run`, or another of `PHASES`."""
    action: Action
    """The instruction that it began, in the phase `run`."""
    waiting: bool
    """It needs the result of `action`, which another rank has a part in."""


PHASES = {
    "start": "is starting up",
    "join": "is joining the others",
    "profile": "is timing its instructions",
    "load": "is loading a checkpoint",
    "data": "is loading data",
    "run": "is training",
    "save": "is saving a checkpoint",
    "validate": "is in its first validation",
    "finish": "is finishing the run",
}
"""What a rank may be about, in words."""
SHORT_PHASES = ("data", "run")
"""The phases whose every instruction is short; the others may take long and say nothing."""


class Heartbeat:
    """A rank's own page; without a launcher that reads it, memory that nobody sees."""

    def __init__(self, memory: mmap.mmap | bytearray) -> None:
        self._memory, self._count, self.step = memory, 0, 0

    def update(self, phase: str, action: Action = _NO_ACTION, waiting: bool = False) -> None:
        """Writes down what begins now."""
        self._count += 1
        _RECORD.pack_into(
            self._memory,
            0,
            self._count,
            self.step,
            action.stage,
            action.micro_batch,
            waiting,
            phase.encode(),
            action.kind.encode(),
        )

    def begin(self, action: Action, waiting: bool = False) -> None:
        """An instruction begins, or its result is waited for."""
        self.update("run", action, waiting)


def create_page() -> int:
    """Makes a page for a rank that no launcher has given one, and returns its file descriptor; `own_whereabouts` takes
    it."""
    fd = os.memfd_create("muster-rank", os.MFD_CLOEXEC)
    os.truncate(fd, PAGE_BYTES)
    os.environ[HEARTBEAT_FD_VARIABLE] = str(fd)
    return fd


def open_heartbeat() -> Heartbeat:
    """This process's, on the page that its launcher gave it. Takes the page: there is one call for each process."""
    number = os.environ.pop(HEARTBEAT_FD_VARIABLE, None)
    if number is None:
        return Heartbeat(bytearray(_RECORD.size))
    fd = int(number)
    where = Heartbeat(mmap.mmap(fd, PAGE_BYTES))
    fcntl.fcntl(fd, fcntl.F_SETFL, os.O_APPEND)  # what is written comes after the page, wherever this stood
    faulthandler.register(STACKS_SIGNAL, file=fd, all_threads=True)
    where.update("start")
    return where


class HeartbeatPage:
    """The launcher's end of one rank's page. Nothing of it outlives the two processes."""

    def __init__(self, fd: int | None = None) -> None:
        self.fd = os.memfd_create("muster-rank", 0) if fd is None else fd
        if fd is None:
            os.truncate(self.fd, PAGE_BYTES)
        self._memory = mmap.mmap(self.fd, PAGE_BYTES, prot=mmap.PROT_READ)

    @classmethod
    def of_process(cls, pid: int, fd: int) -> "HeartbeatPage":
        """The page that another process of this user has open as `fd`. Raises OSError."""
        return cls(os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR))

    def read(self) -> RankStatus | None:
        """What the rank said last; None before it has said anything."""
        count, step, stage, micro_batch, waiting, phase, kind = _RECORD.unpack_from(self._memory)
        if not count:
            return None
        action = Action(cast(Kind, kind.rstrip(b"\0").decode()), stage, micro_batch)
        return RankStatus(count, step, phase.rstrip(b"\0").decode(), action, bool(waiting))

    def request_stacks(self, pid: int) -> None:
        """Makes the rank write its Python stacks. Raises ProcessLookupError when it is gone."""
        os.truncate(self.fd, PAGE_BYTES)
        os.kill(pid, STACKS_SIGNAL)

    def read_stacks(self) -> str:
        """The Python stacks that the rank wrote when it was asked."""
        return os.pread(self.fd, STACKS_BYTES, PAGE_BYTES).decode(errors="replace")

    def close(self) -> None:
        """Lets the page go."""
        self._memory.close()
        os.close(self.fd)
