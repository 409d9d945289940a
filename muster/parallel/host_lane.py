"""The host's cores at work beside a rank's passes: a thread that walks the lane `host` of a Program."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from time import perf_counter

import torch

from muster.schedule.action import Action, Kind, Lane
from muster.schedule.program import Instruction, Wait
from muster.simulate.timeline import Event


class HostLane:
    """Runs the instructions of one rank in its own lane, step after step, and those in the lane `disk` where these wait
    for files; they wait for nothing in other lanes.

    `handlers` execute the instructions of the lane `host`, `copies` start reads and writes; the functions that these
    return wait for the end.
    """

    def __init__(
        self,
        lanes: Mapping[Lane, Sequence[Instruction]],
        handlers: Mapping[Kind, Callable[[Action], None]],
        copies: Mapping[Kind, Callable[[Action], Callable[[], None]]],
    ) -> None:
        has_files = any(wait.lane == "disk" for item in lanes["host"] for wait in item.waits)
        self.lanes: tuple[Lane, ...] = ("host", "disk") if has_files else ("host",)
        """Lanes that the thread walks."""
        self._items = {lane: tuple(lanes[lane]) for lane in self.lanes}
        for item in (item for items in self._items.values() for item in items):
            assert all(wait.lane in self.lanes for wait in item.waits), f"{item} waits for another lane"
        self._handlers, self._copies = handlers, copies
        self._thread = ThreadPoolExecutor(1, "host-lane")
        self._over: dict[Wait, Future[None]] = {}
        self._events: list[tuple[Lane, Action, float, float]] = []
        self._step: Future[None] | None = None

    @property
    def _files(self) -> tuple[Instruction, ...]:
        return self._items.get("disk", ())

    def start(self) -> None:
        """Begin a step."""
        self._over = {Wait(lane, n): Future() for lane in self.lanes for n in range(len(self._items[lane]))}
        self._events, self._started = [], 0
        self._pending: dict[int, tuple[float, Callable[[], None]]] = {}
        self._step = self._thread.submit(self._run)

    def is_over(self, wait: Wait) -> bool:
        """Return True if an instruction is over."""
        return self._over[wait].done()

    def wait(self, wait: Wait) -> None:
        """Wait for the end of an instruction; raises what went wrong in the thread."""
        self._over[wait].result()

    def finish(self, rank: int) -> list[Event]:
        """Wait for the end of the step, and return its events."""
        assert self._step is not None
        self._step.result()
        return [Event(rank, *event) for event in self._events]

    @torch.no_grad()
    def _run(self) -> None:
        try:
            for number, item in enumerate(self._items["host"]):
                self._start_files()
                for wait in item.waits:
                    self._complete_file(wait.index)
                start_s = perf_counter()
                self._handlers[item.action.kind](item.action)
                self._events.append(("host", item.action, start_s, perf_counter()))
                self._over[Wait("host", number)].set_result(None)
            self._start_files()
            for number in range(len(self._files)):
                self._complete_file(number)
        except BaseException as error:
            for future in self._over.values():
                if not future.done():
                    future.set_exception(error)
            raise

    def _start_files(self) -> None:
        """Start the reads and writes, in their order, whose waits are over."""
        files = self._files
        while self._started < len(files) and all(self.is_over(wait) for wait in files[self._started].waits):
            action = files[self._started].action
            self._pending[self._started] = perf_counter(), self._copies[action.kind](action)
            self._started += 1

    def _complete_file(self, number: int) -> None:
        if number not in self._pending:
            return
        start_s, wait = self._pending.pop(number)
        wait()
        self._events.append(("disk", self._files[number].action, start_s, perf_counter()))
        self._over[Wait("disk", number)].set_result(None)
