"""Ranks in the tests of eager reductions: what each starts and waits for, in order."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch import Tensor

from muster.parallel.axis import PendingTensor
from muster.parallel.executor import Executor
from muster.parallel.grad_reduce import AllToAllReduceScatter, DeferrableReduceScatter
from muster.parallel.pending_reduction import PendingReduction
from muster.parallel.sharded_stage import ShardedStage
from muster.parallel.world import open_world
from muster.schedule.action import Action
from muster.schedule.program import Program
from muster.spec.plan_name import parse_plan_name
from muster.train.trainer import Trainer
from tests.parity import open_data, small_run


def predicted_order(program: Program, pp_rank: int) -> list[str]:
    """Return the passes of a rank with the reductions that its Program lets begin before each, and then what the norm
    waits for: a simulation starts a reduction once the waits of its instruction are over, and nothing waits for it
    before."""
    compute, collectives = (program.ranks[pp_rank][lane] for lane in ("compute", "collective"))
    waiting = [(item.waits[0].index, item.action.stage) for item in collectives if item.action.kind == "REDUCE_GRAD"]
    starts = [stage for _, stage in waiting]
    found = []
    for index, item in enumerate(compute):
        while waiting and waiting[0][0] < index:
            found.append(f"start {waiting.pop(0)[1]}")
        found.append(str(item.action))
        if item.action.kind == "STEP":
            break
    waits = [f"{what} {stage}" for stage in starts for what in ("collective", "wait")]
    return [*found[:-1], *waits, "GRAD_NORM", found[-1]]


@contextmanager
def awaited_at_once() -> Iterator[None]:
    """Seeded bug: whoever starts a reduction waits for it."""
    start = ShardedStage.reduce_gradients

    def faulty(self: ShardedStage) -> None:
        if (pending := start(self)) is not None:
            pending.wait()

    with patch.object(ShardedStage, "reduce_gradients", faulty):
        yield


@contextmanager
def started_late() -> Iterator[None]:
    """Seeded bug: no collective is started beside passes."""
    start_ready = Executor._start_ready

    def faulty(self: Executor) -> None:
        cursor = self._cursor["collective"]
        self._cursor["collective"] = len(self.lanes["collective"])
        start_ready(self)
        self._cursor["collective"] = cursor

    with patch.object(Executor, "_start_ready", faulty):
        yield


@contextmanager
def waiting_collectives() -> Iterator[None]:
    """Seeded bug: each collective is awaited where it is started, as calls of gloo are unless they are asynchronous."""
    call = DeferrableReduceScatter.__call__

    def faulty(self: DeferrableReduceScatter, *given: Any, **options: Any) -> None:
        call(self, *given, **options)
        for pending in self.pending or ():
            pending.wait()

    with patch.object(DeferrableReduceScatter, "__call__", faulty):
        yield


FAULTS: dict[str | None, Callable[[], Any]] = {
    None: nullcontext,
    "awaited at once": awaited_at_once,
    "started late": started_late,
    "waiting collectives": waiting_collectives,
}


def trace(
    rank: int, world_size: int, store: dist.Store, payload: dict[str, Any]
) -> list[tuple[str, str | None, list[str], list[str]]]:
    """Per case: the plan, the seeded bug, the order of a second step as executed and as predicted."""
    found = []
    for number, (name, fault) in enumerate(payload["cases"]):
        with open_world(store, rank, world_size, parse_plan_name(name), number) as world, FAULTS[fault]():
            trainer = Trainer(small_run(False), world.plan, world, open_data(small_run(False), payload["cache"]))
            trainer.step()
            seen = _follow(trainer)
            found.append((name, fault, seen, predicted_order(trainer.program, world.at.pp)))
    return found


def _follow(trainer: Trainer) -> list[str]:
    """Run a step, and return what this rank starts and waits for."""
    seen: list[str] = []
    stages = {id(stage.module): index for index, stage in trainer.stages.items()}
    start, wait = PendingReduction.__init__, PendingReduction.wait
    now = [-1]

    def started(self: PendingReduction, module: Any, *given: Any) -> None:
        now[0] = stages[id(module)]
        seen.append(f"start {now[0]}")
        start(self, module, *given)
        self.stage_of_test = now[0]  # type: ignore[attr-defined]

    def awaited(self: PendingReduction) -> None:
        now[0] = self.stage_of_test  # type: ignore[attr-defined]
        wait(self)
        seen.append(f"wait {now[0]}")

    def noted(kind: type[DeferrableReduceScatter]) -> Any:
        begin = kind._start

        def begun(self: DeferrableReduceScatter, *given: Any) -> PendingTensor:
            pending, stage = begin(self, *given), now[0]

            def result() -> Tensor:
                if seen[-1:] != [f"collective {stage}"]:  # the groups of a stage are one line
                    seen.append(f"collective {stage}")
                return pending.result()

            return PendingTensor(pending.works, result)

        return patch.object(kind, "_start", begun)

    def reported(action: Action, waits: bool = False) -> None:
        if action.kind in ("F", "B", "I", "W", "STEP", "GRAD_NORM"):
            seen.append(str(action))

    follow = patch.object(trainer._executor, "_report_start", reported)
    begins = patch.object(PendingReduction, "__init__", started)
    no_release = patch.object(PendingReduction, "release", lambda self: None)  # which depends on times
    ends = patch.object(PendingReduction, "wait", awaited)
    with follow, begins, no_release, ends, noted(DeferrableReduceScatter), noted(AllToAllReduceScatter):
        trainer.step()
    return seen
