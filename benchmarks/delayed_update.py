"""Do delayed updates by the host hide behind the passes, as predicted? Runs steps whose work sleeps.

    python -m benchmarks.delayed_update [--host 0.5 1.0 2.0] [--rounds 5] [--disk]

One stage of 8 parts: passes, updates, copies and, with --disk, reads and writes sleep, each resource in its own thread
as a device, a link and a disk would. For updates that take so many times as long as all passes it prints the step
without and with the delay, measured (median and spread) and predicted, and the step over the longest of the resources.
"""

import argparse
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from muster.cost.time.op_times import OpTimes
from muster.parallel.executor import Executor
from muster.schedule.action import Action, Kind
from muster.schedule.check import check
from muster.schedule.lower import LoweringOptions, lower
from muster.schedule.program import Program
from muster.schedule.registry import make_schedule
from muster.schedule.schedule_spec import ScheduleSpec
from muster.simulate.simulator import simulate

PARTS, MICRO_BATCHES = 8, 4
PASS_S = {Kind.F: 0.05, Kind.B: 0.1}
PASSES_S = MICRO_BATCHES * sum(PASS_S.values())
COPY_S = {Kind.OFFLOAD_GRAD: 0.004, Kind.RELOAD_PARAM: 0.002}


class SleepingStage:
    """A stage whose passes only take time."""

    def forward(self, micro_batch: int, x: Tensor | None) -> Tensor:
        time.sleep(PASS_S[Kind.F])
        return torch.zeros(1)

    def backward(self, micro_batch: int, gradient: Tensor | None) -> None:
        time.sleep(PASS_S[Kind.B])


def program_of(delayed: bool, on_disk: bool) -> Program:
    """Return the program of a step of one rank, whose updates the host makes."""
    tiers = ("disk" if on_disk else "host",) * PARTS
    schedule = make_schedule("1f1b", ScheduleSpec(1, MICRO_BATCHES))
    program = lower(schedule, LoweringOptions(host_updates=(tiers,), delayed_update=delayed))  # type: ignore[arg-type]
    check(program)
    return program


def executor_of(program: Program, seconds: dict[Kind, float]) -> Executor:
    """Return an executor in which each kind sleeps, copies in threads of their link's."""
    links = {"host_copy": ThreadPoolExecutor(1), "disk": ThreadPoolExecutor(1)}

    def start(link: ThreadPoolExecutor, kind: Kind, action: Action) -> Callable[[], Any]:
        return link.submit(time.sleep, seconds[kind]).result

    copies = {kind: partial(start, links["host_copy"], kind) for kind in COPY_S}
    copies |= {kind: partial(start, links["disk"], kind) for kind in (Kind.READ_STATE, Kind.WRITE_STATE)}
    sleeping = (Kind.UPDATE, Kind.DELAYED_UPDATE)
    handlers: dict[Kind, Callable[[Action], None]] = {
        kind: lambda _: time.sleep(seconds[Kind.UPDATE]) for kind in sleeping
    }
    handlers |= {kind: lambda _: None for kind in (Kind.GRAD_NORM, Kind.CLIP, Kind.STEP)}
    return Executor(program, 0, 0, {0: SleepingStage()}, {}, handlers, copies=copies)  # type: ignore[dict-item]


def measure_s(executor: Executor, rounds: int) -> tuple[float, float, float]:
    """Return median, least and most seconds of a step."""
    found = []
    for _ in range(rounds + 1):
        start_s = time.perf_counter()
        executor.run()
        found.append(time.perf_counter() - start_s)
    return median(found[1:]), min(found[1:]), max(found[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", type=float, nargs="+", default=[0.5, 1.0, 2.0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--disk", action="store_true")
    args = parser.parse_args()
    print(f"{'host/passes':>11} {'step':8} {'measured':>10} {'spread':>15} {'predicted':>10} {'over longest':>13}")
    for share in args.host:
        host_s = share * PASSES_S
        file_s = 0.4 * host_s / PARTS if args.disk else 0.0
        seconds = {**PASS_S, **COPY_S, Kind.UPDATE: host_s / PARTS, Kind.READ_STATE: file_s, Kind.WRITE_STATE: file_s}
        times = OpTimes({(kind, 0): time_s for kind, time_s in seconds.items()})
        longest_s = max(PASSES_S, host_s, 2 * PARTS * file_s, PARTS * sum(COPY_S.values()))
        for delayed in (False, True):
            program = program_of(delayed, args.disk)
            middle, least, most = measure_s(executor_of(program, seconds), args.rounds)
            predicted = simulate(program, times).makespan_s
            name = "delayed" if delayed else "at once"
            spread = f"{least:.3f}–{most:.3f}"
            over = middle / longest_s
            print(f"{share:11.2f} {name:8} {middle:9.3f}s {spread:>15} {predicted:9.3f}s {over:13.2f}", flush=True)


if __name__ == "__main__":
    main()
