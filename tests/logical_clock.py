"""Ranks in the tests of executed schedules: real processes and messages, passes that move a clock."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from muster.cost.time.op_times import OpTimes
from muster.parallel.device_clock import HostClock
from muster.parallel.executor import Executor
from muster.parallel.p2p import direct_routes
from muster.schedule.action import Action
from muster.schedule.check import check
from muster.schedule.exact import solve
from muster.schedule.lower import LoweringOptions, lower
from muster.schedule.program import Wait
from muster.schedule.registry import make_schedule
from muster.schedule.schedule import Schedule
from muster.schedule.schedule_spec import ScheduleSpec
from muster.schedule.serialization import schedule_from_json, schedule_to_json
from muster.schedule.timing import time_schedule
from muster.simulate.simulator import simulate
from muster.spec.errors import InfeasibleError
from muster.spec.schedules import SCHEDULES

SECONDS = {"F": 1.0, "B": 2.25, "I": 1.25, "W": 0.75}
"""Seconds by kind; each stage takes an eighth more than the one before it. Sums of all of them are exact."""
P2P_S = 0.125
COPY_S = 0.375
PASSES = ("F", "B", "I", "W")


class Clock:
    """Time of a rank: what it has computed and waited for."""

    now_s = 0.0
    copied_s = 0.0
    """When the last of its copies ends."""

    def __call__(self) -> float:
        return self.now_s


class LogicalStage:
    """A stage whose passes move the clock, and whose messages say when they were made."""

    def __init__(self, index: int, clock: Clock, live: list[int]) -> None:
        self.index, self.clock, self.live = index, clock, live

    def _take(self, kind: str, activations: int) -> Tensor:
        self.clock.now_s += seconds(kind, self.index)
        self.live.append(self.live[-1] + activations)
        return torch.tensor([self.clock.now_s], dtype=torch.float64)

    def forward(self, micro_batch: int, x: Tensor | None) -> Tensor:
        return self._take("F", 1)

    def backward(self, micro_batch: int, gradient: Tensor | None) -> Tensor:
        return self._take("B", -1)

    def backward_input(self, micro_batch: int, gradient: Tensor | None) -> Tensor:
        return self._take("I", 0)

    def backward_weight(self, micro_batch: int) -> None:
        self._take("W", -1)

    def offload(self, micro_batch: int) -> Callable[[], None]:
        return self._copy(0, -1)

    def reload(self, micro_batch: int) -> Callable[[], None]:
        return self._copy(1, 0)

    def _copy(self, at_begin: int, at_end: int) -> Callable[[], None]:
        """After the rank's copies before it, beside the passes."""
        self.clock.copied_s = end_s = max(self.clock.copied_s, self.clock.now_s) + COPY_S
        self.live.append(self.live[-1] + at_begin)

        def finish() -> None:
            self.clock.now_s = max(self.clock.now_s, end_s)
            self.live.append(self.live[-1] + at_end)

        return finish

    def receive_buffer(self, micro_batch: int) -> Tensor:
        return torch.empty(1, dtype=torch.float64)

    def unshard(self) -> None: ...

    def reduce_gradients(self) -> None: ...

    def all_reduce_replicated_grads(self) -> None: ...


class LogicalExecutor(Executor):
    """Executor in which a message arrives a p2p time after it was made."""

    clock: Clock
    p2p_s = P2P_S

    def _complete(self, wait: Wait) -> None:
        super()._complete(wait)
        action = self.lanes[wait.lane][wait.index].action
        kept = self._inputs if action.kind == "RECV_F" else self._output_gradients
        message = kept[action.stage, self.program.unit(action)]
        self.clock.now_s = max(self.clock.now_s, message.item() + self.p2p_s)


def seconds(kind: str, stage: int) -> float:
    return SECONDS[kind] * (1 + stage / 8)


def on_rank(rank: int, world_size: int, store: dist.Store, payload: list[Any]) -> list[dict[str, Any]]:
    """For each schedule, as JSON and whether to "offload": the compute lane as executed and as simulated, and the
    activations held at most, as counted and as predicted."""
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    found = [run_case(rank, case) for case in payload]
    dist.barrier()
    dist.destroy_process_group()
    return found


class SlicedStage(LogicalStage):
    """A stage whose passes over slices take their shares of the time of a micro-batch."""

    shares: list[float]

    def _take_slice(self, kind: str, part: int) -> Tensor:
        self.clock.now_s += SECONDS[kind] * self.shares[part]
        return torch.tensor([self.clock.now_s], dtype=torch.float64)

    def forward(self, micro_batch: int, x: Tensor | None) -> Tensor:
        return self._take_slice("F", micro_batch % len(self.shares))

    def backward(self, micro_batch: int, gradient: Tensor | None) -> Tensor:
        return self._take_slice("B", micro_batch % len(self.shares))


def run_slices(rank: int, world_size: int, store: dist.Store, payload: dict[str, list[float]]) -> tuple[float, float]:
    """The end of this rank's last pass, and the time of all of its passes, over one micro-batch in slices."""
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    shares = payload["seconds"]
    program = lower(make_schedule("1f1b", ScheduleSpec(world_size, 1, num_slices=len(shares))), LoweringOptions())
    clock = Clock()
    stage = SlicedStage(rank, clock, [0])
    stage.shares = shares
    handlers: dict[str, Callable[[Action], None]] = {"GRAD_NORM": lambda _: dist.barrier(), "STEP": lambda _: None}
    routes = direct_routes(program.placement)
    executor = LogicalExecutor(program, rank, rank, {rank: stage}, routes, handlers, HostClock(clock))
    executor.clock, executor.p2p_s = clock, 0.0
    passes = [event for event in executor.run().events() if event.action.kind in PASSES]
    dist.barrier()
    dist.destroy_process_group()
    return passes[-1].end_s, sum(event.duration_s for event in passes)


def schedules_that_run(num_ranks: int, num_micro_batches: int) -> list[dict[str, Any]]:
    """Every registered schedule that serves the numbers, as `muster schedule --json` has it; `exact` with what it
    finds in a few seconds, where its solver is installed."""
    found = []
    for name, entry in SCHEDULES.items():
        for chunks in [entry.chunks] if entry.chunks else [1] if entry.slow else [1, 2]:
            try:
                setting = setting_of(name, num_ranks, num_micro_batches, chunks)
                schedule = _exact(setting) if name == "exact" else make_schedule(name, setting)
            except (InfeasibleError, ModuleNotFoundError):
                continue
            found.append({**schedule_to_json(schedule, time_schedule(schedule, setting)), "offload": False})
    return found


def _exact(setting: ScheduleSpec) -> Schedule:
    import_module("ortools")
    return solve(setting, make_schedule("auto", setting), limit_s=3).schedule


def setting_of(name: str, num_ranks: int, num_micro_batches: int, chunks: int) -> ScheduleSpec:
    return ScheduleSpec(num_ranks, num_micro_batches, chunks, p2p_s=P2P_S, replicas=SCHEDULES[name].default_replicas)


def run_case(rank: int, case: dict[str, Any]) -> dict[str, Any]:
    schedule = schedule_from_json(case)
    offloaded = range(schedule.num_stages) if case["offload"] else ()
    program = lower(schedule, LoweringOptions(offload=frozenset(offloaded)))
    clock, live = Clock(), [0]
    stages = {index: LogicalStage(index, clock, live) for index, place in enumerate(program.placement) if place == rank}
    handlers: dict[str, Callable[[Action], None]] = {"GRAD_NORM": lambda _: dist.barrier()}
    handlers |= dict.fromkeys(("ALL_REDUCE_REPLICAS", "STEP"), lambda _: None)
    executor = LogicalExecutor(
        program, rank, rank, stages, direct_routes(program.placement), handlers, HostClock(clock)
    )
    executor.clock = clock
    executed = [
        [str(event.action), event.start_s, event.end_s]
        for event in executor.run().events()
        if event.action.kind in PASSES
    ]
    known = {(k, s): seconds(k, s) for k in PASSES for s in range(program.num_stages)}
    known |= dict.fromkeys((("OFFLOAD", -1), ("RELOAD", -1)), COPY_S)
    times = OpTimes(known, p2p_s=P2P_S)
    simulated = [
        [str(event.action), event.start_s, event.end_s]
        for event in simulate(program, times).events
        if event.rank == rank and event.action.kind in PASSES
    ]
    return {
        "executed": executed,
        "simulated": simulated,
        "counted": max(live),
        "predicted": check(program).peak_activations[rank],
    }
