"""Time to build, lower, check and simulate a large schedule on one core.

    python -m benchmarks.simulate_large [RANKS MICRO_BATCHES CHUNKS]

Prints the CPU seconds of the whole of each call, the better of two, as a ratio to those of `time_schedule`, the plain
walk through the passes, as well. Default: interleaved, 64 ranks, 1,024 micro-batches, 2 chunks, z1 on 2 data-parallel
ranks, a hop of a tenth of a pass.
"""

import sys
from collections.abc import Callable
from time import process_time
from typing import TypeVar

from muster.cost.time.op_times import OpTimes
from muster.schedule.check import check
from muster.schedule.lower import LoweringOptions, lower
from muster.schedule.registry import make_schedule
from muster.schedule.schedule_spec import ScheduleSpec
from muster.schedule.timing import time_schedule
from muster.simulate.simulator import simulate

T = TypeVar("T")


def timed(function: Callable[[], T]) -> tuple[T, float]:
    """Return the function's result and the CPU seconds of the better of two calls."""
    best_s = float("inf")
    for _ in range(2):
        begin_s = process_time()
        result = function()
        best_s = min(best_s, process_time() - begin_s)
    return result, best_s


def main(num_ranks: int = 64, num_micro_batches: int = 1024, chunks: int = 2) -> None:
    setting = ScheduleSpec(num_ranks, num_micro_batches, chunks, p2p_s=0.1 / chunks)
    times = OpTimes({("F", -1): 1.0 / chunks, ("B", -1): 2.0 / chunks, ("STEP", -1): 1.0}, p2p_s=setting.p2p_s)
    name = "interleaved" if chunks > 1 else "1f1b"
    schedule, make_s = timed(lambda: make_schedule(name, setting))
    timing, time_s = timed(lambda: time_schedule(schedule, setting))
    program, lower_s = timed(lambda: lower(schedule, LoweringOptions("z1", 2)))
    _, check_s = timed(lambda: check(program))
    timeline, simulate_s = timed(lambda: simulate(program, times))
    passes, instructions = sum(map(len, schedule.ranks)), len(timeline.events)
    print(f"{name}: {num_ranks} ranks × {num_micro_batches} micro-batches × {chunks} chunks")
    print(f"{passes:,} passes, {instructions:,} instructions; makespan {timing.makespan_s:g}")
    rows = {
        "make_schedule": make_s,
        "time_schedule": time_s,
        "lower": lower_s,
        "check": check_s,
        "simulate": simulate_s,
    }
    for what, seconds in rows.items():
        print(f"{what:14} {seconds:6.2f} s  {seconds / time_s:5.1f} ×")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
