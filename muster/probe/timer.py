"""Repeated timing of calls: time of the device, or of the core that several ranks may share."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean
from time import perf_counter, process_time
from typing import Any

import torch

from muster.parallel.device_clock import synchronize

MIN_TIMED_S = 4e-3
"""Least time for which a call is repeated, unless MAX_ROUNDS comes first."""
MAX_ROUNDS = 12


@dataclass(frozen=True)
class KernelTimer:
    """Timer of calls; with `shared` cores it reads the process's CPU time, which other ranks don't affect."""

    device: torch.device
    shared: bool

    def now_s(self) -> float:
        synchronize(self.device)
        return process_time() if self.shared else perf_counter()

    def time(self, calls: Sequence[Callable[[], Any]]) -> float:
        """Return the seconds of a call."""
        return self.time_steps([(call,) for call in calls])[0]

    def time_steps(self, calls: Sequence[Sequence[Callable[[], Any]]]) -> list[float]:
        """Return the seconds of each step of a call; each call is a sequence of as many steps.

        All calls run their first step, then all the second one in reverse order, as the layers of a model do: their
        inputs are no longer in a cache, and their outputs take fresh memory. Means over the calls, and over the faster
        half of the rounds.
        """
        found: list[list[float]] = []
        begin_s = self.now_s()
        while len(found) < 3 or (self.now_s() - begin_s < MIN_TIMED_S and len(found) < MAX_ROUNDS):
            marks_s = [self.now_s()]
            for number, steps in enumerate(zip(*calls, strict=True)):
                for step in steps if number % 2 == 0 else reversed(steps):
                    step()
                marks_s.append(self.now_s())
            found.append([(end_s - start_s) / len(calls) for start_s, end_s in zip(marks_s, marks_s[1:], strict=False)])
        rounds = found[1:]  # the first one pays for one-time initialisation
        return [max(1e-9, mean(sorted(times_s)[: (len(rounds) + 1) // 2])) for times_s in zip(*rounds, strict=True)]
