"""Seconds of what is done over and over: of the device, or of the core that several ranks may share."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean
from time import perf_counter, process_time
from typing import Any

import torch

MIN_TIMED_S = 4e-3
"""What is timed goes on for so long, unless it was repeated often."""
MAX_ROUNDS = 12


@dataclass(frozen=True)
class KernelTimer:
    """On a CPU whose cores are shared, time is that of the process: what other ranks do doesn't count."""

    device: torch.device
    shared: bool

    def now_s(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return process_time() if self.shared else perf_counter()

    def time(self, calls: Sequence[Callable[[], Any]]) -> float:
        """Seconds of a call."""
        return self.time_steps([(call,) for call in calls])[0]

    def time_steps(self, calls: Sequence[Sequence[Callable[[], Any]]]) -> list[float]:
        """Seconds of each step of a call, of which each is a sequence of as many steps.

        All calls make the first step, then all the second one in reverse, as the layers of a model do: what they find
        is no longer in a cache, and what they leave takes fresh memory. Means over the calls, and over the faster half
        of the rounds.
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
        kept = found[1:]  # the first pays for what is made once
        return [max(1e-9, mean(sorted(times_s)[: (len(kept) + 1) // 2])) for times_s in zip(*kept, strict=True)]
