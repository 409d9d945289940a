"""Heartbeat of a rank: one page of memory that it shares with its launcher, who can read it whatever the rank does.

A rank writes there what it begins, which costs about a microsecond; nothing is sent and no file is written. Free of
torch.
"""

import faulthandler
import fcntl
import mmap
import os
import signal
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from muster.schedule.action import Action, Kind

HEARTBEAT_FD_VARIABLE = "MUSTER_HEARTBEAT_FD"
"""Environment variable with the file descriptor of this rank's page."""
PAGE_BYTES = 4096
STACKS_BYTES = 1 << 17
"""Space behind the page for the stacks of the rank's threads, and the flight record."""
STACKS_SIGNAL = signal.SIGUSR1
"""Signal at which a rank writes its stacks there, even while it waits in C++."""
_HEADER = struct.Struct("<QqiiB12sHiB")
"""Number of updates, step, stage, micro-batch, waiting, phase, length of the instruction's kind, generation, and
whether it asks for the next; the kind follows."""
_WAITING_OFFSET = struct.calcsize("<Qqii")
_DEVICE_OFFSET = PAGE_BYTES // 2
_DEVICE_HEADER = struct.Struct("<BiiH")
"""At `_DEVICE_OFFSET`: 1 if there is a device action, its stage, micro-batch, and length of its kind, which follows."""
_DEVICE_INTERVAL_S = 1.0
_MAX_KIND_BYTES = _DEVICE_OFFSET - _HEADER.size
_NO_ACTION = Action(cast(Kind, ""))


@dataclass(frozen=True)
class RankStatus:
    """Last update of a rank."""

    num_updates: int
    """Number of updates so far; it grows as long as the rank makes progress."""
    step: int
    """Steps completed before."""
    phase: str
    """One of `PHASES`."""
    action: Action
    """Instruction that the rank has begun, in the phase `run`."""
    waiting: bool
    """True while the rank waits for the result of `action`, in which another rank takes part."""
    device_action: Action | None = None
    """Instruction that the rank's GPU is in, which the rank itself has launched and left; None on a CPU, and for a GPU
    that has nothing to do."""
    generation: int = 0
    """Generation of ranks that it has joined, or is joining."""
    asks_for_next: bool = False
    """True where it asks for another generation after a step, for another plan."""

    @property
    def position(self) -> Action:
        """The instruction that the rank has got to: its GPU's where that is behind."""
        return self.device_action or self.action


PHASES = {
    "start": "is starting up",
    "join": "is joining the others",
    "profile": "is timing its instructions",
    "load": "is loading a checkpoint",
    "data": "is loading data",
    "run": "is training",
    "save": "is saving a checkpoint",
    "peers": "is waiting for its peers",
    "validate": "is in its first validation",
    "finish": "is finishing the run",
}
"""Phases of a rank, each with its words in a message."""
SHORT_PHASES = ("data", "run")
"""Phases in which every instruction is short; a rank may spend long in the others without an update."""


class Heartbeat:
    """Writer's end of a rank's page; without a launcher, memory that nobody reads."""

    def __init__(self, memory: mmap.mmap | bytearray, fd: int | None = None) -> None:
        self._memory, self._fd = memory, fd
        self._num_updates = 0
        self._device_action: Callable[[], Action | None] = lambda: None
        self._flight_record: Callable[[], str] = lambda: ""
        self._seen_bytes = self._recorded_bytes = 0
        self._follower: threading.Thread | None = None
        self.step = 0
        self.generation = 0
        self.asks_for_next = False

    def update(self, phase: str, action: Action = _NO_ACTION, waiting: bool = False) -> None:
        """Write what this rank begins now. Raises ValueError for a kind of instruction longer than the page."""
        self._num_updates += 1
        kind = action.kind.encode()
        if len(kind) > _MAX_KIND_BYTES:
            raise ValueError(f"an instruction's kind of {len(kind)} bytes: expected {_MAX_KIND_BYTES} at most")
        _HEADER.pack_into(
            self._memory,
            0,
            self._num_updates,
            self.step,
            action.stage,
            action.micro_batch,
            waiting,
            phase.encode(),
            len(kind),
            self.generation,
            self.asks_for_next,
        )
        self._memory[_HEADER.size : _HEADER.size + len(kind)] = kind

    def wait(self) -> None:
        """Write that the result of the last instruction is awaited."""
        self._memory[_WAITING_OFFSET] = 1

    def follow_device(
        self, device_action: Callable[[], Action | None], flight_record: Callable[[], str] = lambda: ""
    ) -> None:
        """Write from now on, every second, the instruction that the device is in, as `device_action` returns it, and,
        behind stacks that the launcher has asked for, the `flight_record`."""
        self._device_action, self._flight_record = device_action, flight_record
        if self._follower is None:
            self._follower = threading.Thread(target=self._follow, daemon=True, name="device position")
            self._follower.start()

    def _follow(self) -> None:
        while True:
            self.write_device_action(self._device_action())
            self.write_flight_record()
            time.sleep(_DEVICE_INTERVAL_S)

    def write_flight_record(self) -> None:
        """Write the flight record behind stacks that are complete: that have not grown since the last call."""
        size = 0 if self._fd is None else os.fstat(self._fd).st_size
        if self._fd is not None and size > PAGE_BYTES and size == self._seen_bytes != self._recorded_bytes:
            os.write(self._fd, self._flight_record().encode())
            self._recorded_bytes = size = os.fstat(self._fd).st_size
        self._seen_bytes = size

    def write_device_action(self, action: Action | None) -> None:
        """Write the instruction that the device is in."""
        known = action or _NO_ACTION
        kind = known.kind.encode()
        end = _DEVICE_OFFSET + _DEVICE_HEADER.size
        self._memory[end : end + len(kind)] = kind
        numbers = known.stage, known.micro_batch, len(kind)
        _DEVICE_HEADER.pack_into(self._memory, _DEVICE_OFFSET, action is not None, *numbers)

    def begin(self, action: Action, waiting: bool = False) -> None:
        """Write that an instruction begins or, with `waiting`, that its result is awaited."""
        self.update("run", action, waiting)


def create_page() -> int:
    """Create a page for this process, which no launcher has given one; returns its file descriptor.

    `open_heartbeat` opens it.
    """
    fd = os.memfd_create("muster-rank", os.MFD_CLOEXEC)
    os.truncate(fd, PAGE_BYTES)
    os.environ[HEARTBEAT_FD_VARIABLE] = str(fd)
    return fd


def tell_ready() -> None:
    """Write that this process has started, for one that waits for a place before it opens its heartbeat."""
    if (number := os.environ.get(HEARTBEAT_FD_VARIABLE)) is not None:
        fd = int(number)
        _answer_stack_requests(fd)
        Heartbeat(mmap.mmap(fd, PAGE_BYTES)).update("start")


def _answer_stack_requests(fd: int) -> None:
    """Let this process write its stacks when its launcher asks for them, which would end it otherwise: to be called
    before its first update."""
    fcntl.fcntl(fd, fcntl.F_SETFL, os.O_APPEND)  # stacks are written behind the page, whatever the file's position
    faulthandler.register(STACKS_SIGNAL, file=fd, all_threads=True)


def open_heartbeat() -> Heartbeat:
    """Open the heartbeat of this process on the page that its launcher gave it; once in each process."""
    number = os.environ.pop(HEARTBEAT_FD_VARIABLE, None)
    if number is None:
        return Heartbeat(bytearray(PAGE_BYTES))
    fd = int(number)
    heartbeat = Heartbeat(mmap.mmap(fd, PAGE_BYTES), fd)
    _answer_stack_requests(fd)
    heartbeat.update("start")
    return heartbeat


class HeartbeatPage:
    """Launcher's end of one rank's page. No trace of it outlives the two processes."""

    def __init__(self, fd: int | None = None) -> None:
        self.fd = os.memfd_create("muster-rank", 0) if fd is None else fd
        if fd is None:
            os.truncate(self.fd, PAGE_BYTES)
        self._memory = mmap.mmap(self.fd, PAGE_BYTES, prot=mmap.PROT_READ)

    @classmethod
    def of_process(cls, pid: int, fd: int) -> "HeartbeatPage":
        """Open the page that another process of this user has open as `fd`. Raises OSError."""
        return cls(os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR))

    def read(self) -> RankStatus | None:
        """Return the rank's last update; None before the first."""
        header = _HEADER.unpack_from(self._memory)
        num_updates, step, stage, micro_batch, waiting, phase, length, generation, asks = header
        if not num_updates:
            return None
        kind = self._memory[_HEADER.size : _HEADER.size + length].decode(errors="replace")
        phase_name = phase.rstrip(b"\0").decode()
        action = Action(cast(Kind, kind), stage, micro_batch)
        device_action = self._read_device_action()
        return RankStatus(num_updates, step, phase_name, action, bool(waiting), device_action, generation, bool(asks))

    def _read_device_action(self) -> Action | None:
        is_known, stage, micro_batch, length = _DEVICE_HEADER.unpack_from(self._memory, _DEVICE_OFFSET)
        begin = _DEVICE_OFFSET + _DEVICE_HEADER.size
        kind = self._memory[begin : begin + length].decode(errors="replace")
        return Action(cast(Kind, kind), stage, micro_batch) if is_known else None

    def request_stacks(self, pid: int) -> None:
        """Make the rank write its Python stacks. Raises ProcessLookupError when it has ended."""
        os.truncate(self.fd, PAGE_BYTES)
        os.kill(pid, STACKS_SIGNAL)

    def read_stacks(self) -> str:
        """Return the Python stacks that the rank has written on request."""
        return os.pread(self.fd, STACKS_BYTES, PAGE_BYTES).decode(errors="replace")

    def close(self) -> None:
        """Release the page."""
        self._memory.close()
        os.close(self.fd)
