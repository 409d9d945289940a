"""The host's cores at work beside a rank's passes: threads that walk the lane `host` of a Program, and the copies that
its instructions wait for."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from itertools import chain
from time import perf_counter

import torch

from muster.schedule.action import COPY_LANES, HOST_UPDATE_KINDS, Action, Kind, Lane
from muster.schedule.program import Instruction, Wait
from muster.simulate.timeline import Event


class HostLane:
    """Runs the instructions of one rank in its own lane, step after step, and the updates' copies in lanes for which
    these wait. Each lane has a thread.

    `handlers` execute the instructions of the lane `host`, `copies` start copies; the functions that these return wait
    for the end. Of the instructions that are left to the rank's own thread, it tells `note_over` the `awaited` ones.
    `on_failure` lets go on what a handler and the rank's own thread wait for beside the instructions, with an error.
    """

    def __init__(
        self,
        lanes: Mapping[Lane, Sequence[Instruction]],
        handlers: Mapping[Kind, Callable[[Action], object]],
        copies: Mapping[Kind, Callable[[Action], Callable[[], None]]],
        on_failure: Callable[[BaseException], None] | None = None,
    ) -> None:
        self.first: dict[Lane, int] = {"host": 0}
        """Lanes that threads walk, from this instruction of each on."""
        needed = {wait for item in lanes["host"] for wait in item.waits}
        for lane in COPY_LANES:
            own = [index for index, item in enumerate(lanes[lane]) if item.action.kind in HOST_UPDATE_KINDS]
            if any(Wait(lane, index) in needed for index in own):
                self.first[lane] = own[0]
        self._items: dict[Lane, tuple[Instruction, ...]] = {
            lane: tuple(lanes[lane][first:]) for lane, first in self.first.items()
        }
        waits = {wait for items in self._items.values() for item in items for wait in item.waits}
        self.awaited = frozenset(wait for wait in waits if not self.walks(wait))
        """Instructions of the rank's own thread that those of the lanes here wait for."""
        self._handlers, self._copies, self._on_failure = handlers, copies, on_failure
        self._threads = {lane: ThreadPoolExecutor(1, f"{lane}-lane") for lane in self.first}
        self._over: dict[Wait, Future[None]] = {}
        self._events: list[tuple[Lane, Action, float, float]] = []
        self._steps: list[Future[None]] = []

    def walks(self, wait: Wait) -> bool:
        """Return True if a thread runs an instruction."""
        return wait.lane in self.first and wait.index >= self.first[wait.lane]

    def start(self) -> None:
        """Begin a step."""
        own = (self._waits(lane) for lane in self.first)
        self._over = {wait: Future() for wait in chain(*own, self.awaited)}
        self._events = []
        self._steps = [self._threads[lane].submit(self._walk, lane) for lane in self.first]

    def note_over(self, wait: Wait) -> None:
        """Let threads go on that wait for an instruction of the rank's own."""
        if wait in self.awaited:
            self._over[wait].set_result(None)

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

    def abandon(self, error: BaseException) -> None:
        """Let the threads end the step with the rank's own error, where they wait for its instructions."""
        for wait in self.awaited:
            if not self._over[wait].done():
                self._over[wait].set_exception(error)
        if self._on_failure is not None:
            self._on_failure(error)

    def _waits(self, lane: Lane) -> list[Wait]:
        """Return the waits for the instructions of a lane here."""
        return [Wait(lane, self.first[lane] + number) for number in range(len(self._items[lane]))]

    @torch.no_grad()
    def _walk(self, lane: Lane) -> None:
        own = [self._over[wait] for wait in self._waits(lane)]
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
            if self._on_failure is not None:
                self._on_failure(error)
            raise

    def _run(self, lane: Lane, action: Action) -> None:
        if lane == "host":
            self._handlers[action.kind](action)
        else:
            self._copies[action.kind](action)()
