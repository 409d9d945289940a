"""Clocks for the instructions of a step: the host's, or the device's own, which is read without waiting for kernels.

A host that launches kernels runs ahead of its device, so its clock would show when an instruction was launched. Device
events are recorded into the stream between the kernels instead, and read a step later, when they are long over.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Protocol

import torch

from muster.schedule.action import Action, Lane
from muster.simulate.timeline import Event

Mark = Any
"""A moment of a step: seconds of the host, or an event of the device."""
TimedInstruction = tuple[Lane, Action, Mark, Mark]
"""An instruction with the moments at which it started and ended."""


class StepClock(Protocol):
    """Clock that an executor takes moments from."""

    def mark(self) -> Mark:
        """Take the present moment, after all that was launched before."""
        ...

    def mark_idle(self) -> None:
        """Note that the device has just finished all its work, so that its clock can be set by the host's."""
        ...

    def take_record(self, rank: int, instructions: Sequence[TimedInstruction]) -> "StepRecord":
        """Return the record of a step with these instructions, and begin the next."""
        ...

    def device_action(self, instructions: Sequence[TimedInstruction]) -> Action | None:
        """Return the instruction that the device is in, of those that were launched; None where it has run them all."""
        ...


class StepRecord(Protocol):
    """Instructions of one step, whose times may not be known yet."""

    def is_complete(self) -> bool:
        """Return True if the times can be read without waiting."""
        ...

    def events(self) -> list[Event]:
        """Return the step's events in seconds of the host's clock; waits for the device where they aren't known."""
        ...


@dataclass(frozen=True)
class HostClock:
    """The host's clock, for devices whose kernels have finished when their calls return."""

    now_s: Callable[[], float] = perf_counter

    def mark(self) -> float:
        return self.now_s()

    def mark_idle(self) -> None:
        pass

    def take_record(self, rank: int, instructions: Sequence[TimedInstruction]) -> "HostRecord":
        return HostRecord(join_turns([Event(rank, *instruction) for instruction in instructions]))

    def device_action(self, instructions: Sequence[TimedInstruction]) -> None:
        return None


@dataclass(frozen=True)
class HostRecord:
    """Events of a step whose times are known."""

    found: list[Event]

    def is_complete(self) -> bool:
        return True

    def events(self) -> list[Event]:
        return self.found


@dataclass(frozen=True)
class RecordBesideHost:
    """Instructions of a step, and beside them those of the host's cores, whose times are known."""

    device: StepRecord
    host: list[Event]

    def is_complete(self) -> bool:
        return self.device.is_complete()

    def events(self) -> list[Event]:
        return [*self.device.events(), *self.host]


@dataclass
class DeviceClock:
    """The clock of a GPU: events in its current stream.

    It measures seconds from one event to another only. A moment at which the host knows the device to be idle (it has
    just read the gradient norm) ties them to the host's clock, which the ranks of a machine share.
    """

    device: torch.device
    now_s: Callable[[], float] = perf_counter
    _idle: tuple[float, Mark] | None = field(default=None, init=False)

    def mark(self) -> Mark:
        event = torch.get_device_module(self.device).Event(enable_timing=True)
        event.record()
        return event

    def mark_idle(self) -> None:
        self._idle = self.now_s(), self.mark()

    def take_record(self, rank: int, instructions: Sequence[TimedInstruction]) -> "DeviceRecord":
        idle, self._idle = self._idle, None
        return DeviceRecord(rank, list(instructions), *(idle or (self.now_s(), self.mark())))

    def device_action(self, instructions: Sequence[TimedInstruction]) -> Action | None:
        return next((action for _, action, _, end in tuple(instructions) if not end.query()), None)


@dataclass
class DeviceRecord:
    """Instructions of a step between events of a device."""

    rank: int
    instructions: list[TimedInstruction]
    known_s: float
    """Seconds of the host at the event `known`."""
    known: Mark

    def _last(self) -> Mark:
        return self.instructions[-1][3] if self.instructions else self.known

    def is_complete(self) -> bool:
        return self.known.query() and self._last().query()

    def events(self) -> list[Event]:
        self.known.synchronize()
        self._last().synchronize()
        if not self.instructions:
            return []
        # In milliseconds since the first event of the step: these are 32-bit numbers, too coarse over longer times.
        first = self.instructions[0][2]
        begin_s = self.known_s - first.elapsed_time(self.known) / 1e3

        def seconds(mark: Mark) -> float:
            return begin_s + (0.0 if mark is first else first.elapsed_time(mark) / 1e3)

        return join_turns(
            [
                Event(self.rank, lane, action, seconds(start), seconds(end))
                for lane, action, start, end in self.instructions
            ]
        )


def join_turns(events: Sequence[Event]) -> list[Event]:
    """Return the events of a rank with the turns of each pass as one event. Passes that took turns share the time from
    the first turn to the last, one after the other, as in predicted timelines.

    Example: a forward in [0, 1] and [3, 4], a backward in [1, 3] and [4, 6]: the forward has [0, 2], the backward
    [2, 6].
    """
    joined: list[Event] = []
    index = 0
    while index < len(events):
        pair = [event.action for event in events[index : index + 2]]
        third = events[index + 2] if index + 2 < len(events) else None
        if third is None or third.lane != "compute" or third.action != pair[0]:
            joined.append(events[index])
            index += 1
            continue
        end = index
        while end < len(events) and events[end].action in pair:
            end += 1
        turns = events[index:end]
        sums_s = [sum(turn.duration_s for turn in turns if turn.action == action) for action in pair]
        start_s, end_s = turns[0].start_s, turns[-1].end_s
        middle_s = start_s + (end_s - start_s) * (sums_s[0] / sum(sums_s) if sum(sums_s) else 0.5)
        joined.append(turns[0]._replace(end_s=middle_s))
        joined.append(turns[1]._replace(start_s=middle_s, end_s=end_s))
        index = end
    return joined


def step_clock(device: torch.device) -> StepClock:
    """Return the clock for the instructions that a device runs."""
    return HostClock() if device.type == "cpu" else DeviceClock(device)


def synchronize(device: torch.device) -> None:
    """Wait until a device has finished all its work; a CPU always has."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)
