"""The host's cores at work beside a rank's passes: threads that walk the lanes `host` and `disk` of a Program."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from time import perf_counter

import torch

from muster.schedule.action import Action, Kind, Lane
from muster.schedule.program import Instruction, Wait
from muster.simulate.timeline import Event


class HostLane:
    """Runs the instructions of one rank in its own lane, step after step, and those in the lane `disk` where these wait
    for files; they wait for nothing in other lanes. Each of the two has a thread.

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
        """Lanes that the threads walk."""
        self._items = {lane: tuple(lanes[lane]) for lane in self.lanes}
        for item in (item for items in self._items.values() for item in items):
            assert all(wait.lane in self.lanes for wait in item.waits), f"{item} waits for another lane"
        self._handlers, self._copies = handlers, copies
        self._threads = {lane: ThreadPoolExecutor(1, f"{lane}-lane") for lane in self.lanes}
        self._over: dict[Wait, Future[None]] = {}
        self._events: list[tuple[Lane, Action, float, float]] = []
        self._steps: list[Future[None]] = []

    def start(self) -> None:
        """Begin a step."""
        self._over = {Wait(lane, n): Future() for lane in self.lanes for n in range(len(self._items[lane]))}
        self._events = []
        self._steps = [self._threads[lane].submit(self._walk, lane) for lane in self.lanes]

    def is_over(self, wait: Wait) -> bool:
        """Return True if an instruction is over."""
        return self._over[wait].done()

    def wait(self, wait: Wait) -> None:
        """Wait for the end of an instruction; raises what went wrong in its thread."""
        self._over[wait].result()

    def finish(self, rank: int) -> list[Event]:
        """Wait for the end of the step, and return its events."""
        wait_for(self._steps)
        for step in self._steps:
            step.result()
        return [Event(rank, *event) for event in self._events]

    @torch.no_grad()
    def _walk(self, lane: Lane) -> None:
        own = [self._over[Wait(lane, number)] for number in range(len(self._items[lane]))]
        try:
            for item, over in zip(self._items[lane], own, strict=True):
                for wait in item.waits:
                    self.wait(wait)
                start_s = perf_counter()
                self._run(lane, item.action)
                self._events.append((lane, item.action, start_s, perf_counter()))
                over.set_result(None)
        except BaseException as error:  # which whoever waits for this lane raises, too
            for future in own:
                if not future.done():
                    future.set_exception(error)
            raise

    def _run(self, lane: Lane, action: Action) -> None:
        if lane == "host":
            self._handlers[action.kind](action)
        else:
            self._copies[action.kind](action)()
