"""Work of each rank in the tests of passes that run as one: parity cases, with the order of exchanges and turns."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from muster.cost.time.op_times import OpTimes
from muster.cost.time.pass_pairs import Turns as PassTurns
from muster.cost.time.pass_pairs import pair_s
from muster.parallel.axis import ExpertAxis, PendingTensor, TensorAxis
from muster.parallel.device_clock import HostClock
from muster.parallel.executor import Executor
from muster.parallel.p2p import direct_routes
from muster.parallel.turns import Turns
from muster.schedule.lower import LoweringOptions, lower
from muster.schedule.program import Instruction, Program
from muster.schedule.serialization import schedule_from_json
from muster.simulate.simulator import simulate
from muster.simulate.timeline import Event
from tests.logical_clock import P2P_S, Clock, LogicalExecutor, LogicalStage, seconds
from tests.parity import run_cases


def waits_at_once(axis: ExpertAxis, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
    """Sown bug: the other pass has its turn after the exchange, not beside it."""
    rows = axis.start_all_to_all(x, sent, received).wait()
    assert axis.turns is not None
    axis.turns.hand_over()
    return rows


def hands_over_forward_alone(axis: ExpertAxis, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
    """Sown bug: a backward keeps its turn."""
    pending = axis.start_all_to_all(x, sent, received)
    assert axis.turns is not None
    if axis.turns._running == 0:
        axis.turns.hand_over()
    return pending.wait()


def sums_at_once(axis: TensorAxis, x: Tensor, *op: Any) -> PendingTensor:
    """Sown bug: the other pass has its turn after a sum over the ranks, not beside it."""
    pending = SUM(axis, x, *op)
    y = replace(pending, turns=None).wait()
    return PendingTensor([], lambda: y, axis.turns)


def sums_hand_over_forward_alone(axis: TensorAxis, x: Tensor, *op: Any) -> PendingTensor:
    """Sown bug: a backward keeps its turn while its sums travel."""
    pending = SUM(axis, x, *op)
    return pending if axis.turns is None or axis.turns._running == 0 else replace(pending, turns=None)


def loses_sums(axis: TensorAxis, x: Tensor, *op: Any) -> PendingTensor:
    """Sown bug: what a pass of a pair would sum over the ranks stays that of the rank itself."""
    in_pair = axis.turns is not None and axis.turns._running is not None
    return PendingTensor([], lambda: x, axis.turns) if in_pair else SUM(axis, x, *op)


SUM = TensorAxis.all_reduce
FAULTS = {"waits at once": waits_at_once, "forwards alone hand over": hands_over_forward_alone}
TP_FAULTS = {
    "sums at once": sums_at_once,
    "sums hand over in forwards alone": sums_hand_over_forward_alone,
    "loses sums": loses_sums,
}
"""Sown bugs of pairs whose passes hide tensor-parallel collectives."""


def run_pairs(rank: int, world_size: int, store: dist.Store, payload: dict[str, Any]) -> list[dict[str, Any]]:
    """Each case in turn; what `run_case` found, and under `pairs`, for each pair that ran in it, the names of its two
    actions and its log: (event, number of the pass) of each exchange that starts and ends, and of each turn that ends.
    """
    found = []
    for case in payload["cases"]:
        log = PairLog()
        with (
            patch.object(Executor, "_run_pair", log.watched_pair(Executor._run_pair)),
            patch.object(Turns, "run", log.watched_run(Turns.run)),
            patch.object(ExpertAxis, "start_all_to_all", log.watched_start(ExpertAxis.start_all_to_all)),
            patch.object(
                ExpertAxis, "exchange", log.watched_exchange(FAULTS.get(case.get("fault"), ExpertAxis.exchange))
            ),
            patch.object(TensorAxis, "all_reduce", log.watched_sum(TP_FAULTS.get(case.get("fault"), SUM))),
        ):
            own = {key: value for key, value in case.items() if key != "fault"}
            result = run_cases(rank, world_size, dist.PrefixStore(str(case), store), payload | {"cases": [own]})[0]
        found.append(result | {"pairs": log.pairs})
    return found


class _NotedWork(dist.Work):
    """Communication under way that tells when it is waited for."""

    def __init__(self, work: dist.Work | None, note: Callable[[], None]) -> None:
        super().__init__()
        self._work, self._tell = work, note

    def wait(self, *_: Any) -> bool:
        self._tell()
        return self._work is None or self._work.wait()


class PairLog:
    """Order of what happens in the pairs of a rank."""

    def __init__(self) -> None:
        self.pairs: list[tuple[str, str, list[tuple[str, int]]]] = []
        self._events: list[tuple[str, int]] | None = None
        self._exchanging: set[int | None] = set()
        """Passes within an exchange of rows."""

    def watched_pair(self, original: Callable[..., None]) -> Callable[..., None]:
        def watched(executor: Executor, forward: Instruction, backward: Instruction) -> None:
            self._events = []
            self.pairs.append((str(forward.action), str(backward.action), self._events))
            original(executor, forward, backward)
            self._events = None

        return watched

    def watched_run(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def watched(turns: Turns, first: Any, second: Any, on_turn: Any = None) -> Any:
            def ended(index: int) -> None:
                self._note("turn", index)
                if on_turn is not None:
                    on_turn(index)

            return original(turns, first, second, ended)

        return watched

    def watched_exchange(self, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def watched(axis: ExpertAxis, *arguments: Any) -> Tensor:
            own = None if axis.turns is None else axis.turns._running
            self._exchanging.add(own)
            rows = original(axis, *arguments)
            self._exchanging.remove(own)
            return rows

        return watched

    def watched_start(self, original: Callable[..., PendingTensor]) -> Callable[..., PendingTensor]:
        def watched(axis: ExpertAxis, *arguments: Any) -> PendingTensor:
            own = None if axis.turns is None else axis.turns._running
            pending = original(axis, *arguments)
            if own not in self._exchanging:  # numbers of rows
                return pending
            self._note("start", own)

            def arrived() -> Tensor:
                self._note("wait", own)
                return pending.wait()

            return PendingTensor([], arrived)

        return watched

    def watched_sum(self, original: Callable[..., PendingTensor]) -> Callable[..., PendingTensor]:
        """Sums over tensor-parallel ranks, which count where a rank's passes take turns for them."""

        def watched(axis: TensorAxis, *arguments: Any) -> PendingTensor:
            own = None if axis.turns is None else axis.turns._running
            self._note("start", own)
            pending = original(axis, *arguments)
            if not pending.works:  # a bug has waited
                self._note("wait", own)
            return replace(
                pending, works=[_NotedWork(work, partial(self._note, "wait", own)) for work in pending.works]
            )

        return watched

    def _note(self, event: str, index: int | None) -> None:
        if self._events is not None and index is not None:
            self._events.append((event, index))


# ----------------------------------------------------------------------------------------------------------------------
# By a logical clock

EXCHANGE_S = 0.75
"""Seconds of each of the two exchanges of a pass."""
PARTS = {"F": (0.25, 0.5, 0.25), "B": (0.5, 0.25, 0.25), "I": (0.5, 0.25, 0.25), "W": (1.0,)}
"""Shares of a pass's computation before, between and behind its exchanges."""


class ExchangingStage(LogicalStage):
    """A stage whose forwards and backwards exchange twice, over links that the rank's stages share."""

    turns: Turns
    links: Clock

    def _take(self, kind: str, activations: int) -> Tensor:
        turns = turns_of(kind, self.index)
        for compute_s, exchange_s in zip_longest(turns.computed_s, turns.exchanged_s):
            self.clock.now_s += compute_s
            if exchange_s is not None:
                self.links.now_s = arrival_s = max(self.links.now_s, self.clock.now_s) + exchange_s
                self.turns.hand_over()
                self.clock.now_s = max(self.clock.now_s, arrival_s)
        self.live.append(self.live[-1] + activations)
        return torch.tensor([self.clock.now_s], dtype=torch.float64)


def turns_of(kind: str, stage: int) -> PassTurns:
    shares = PARTS[kind]
    return PassTurns(tuple(share * seconds(kind, stage) for share in shares), (EXCHANGE_S,) * (len(shares) - 1))


def run_by_clock(rank: int, world_size: int, store: dist.Store, payload: list[str]) -> list[dict[str, Any]]:
    """For each schedule with pairs, as JSON: its passes as executed and as simulated, [actions, begin, end], those of a
    pair as one."""
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    found = []
    for text in payload:
        program = lower(schedule_from_json(json.loads(text)), LoweringOptions(train=False))
        clock, links, turns = Clock(), Clock(), Turns(torch.device("cpu"))
        stages: dict[int, Any] = {
            stage: ExchangingStage(stage, clock, [0]) for stage, at in enumerate(program.placement) if at == rank
        }
        for stage in stages.values():
            stage.turns, stage.links = turns, links
        routes = direct_routes(program.placement)
        executor = LogicalExecutor(program, rank, rank, stages, routes, {}, HostClock(clock), turns=turns)
        executor.clock = clock
        numbers = range(program.num_stages)
        known = {(kind, stage): turns_of(kind, stage).alone_s for kind in PARTS for stage in numbers}
        with patch("muster.cost.time.pass_pairs.OVERLAP_SLOWDOWN", 0.0):
            pairs_s = {(f, b): pair_s(turns_of("F", f), turns_of("B", b)) for f in numbers for b in numbers}
        predicted = simulate(program, OpTimes(known, P2P_S, pairs_s=pairs_s)).events
        found.append(
            {
                "executed": passes_of(program, executor.run().events()),
                "simulated": passes_of(program, [event for event in predicted if event.rank == rank]),
            }
        )
    dist.barrier()
    dist.destroy_process_group()
    return found


def passes_of(program: Program, events: Sequence[Event]) -> list[tuple[str, float, float]]:
    passes = [event for event in events if event.lane == "compute"]
    found: list[tuple[str, float, float]] = []
    for before, event in zip([None, *passes], passes, strict=False):
        if before is not None and before.action in program.pairs:
            name, begin_s, _ = found.pop()
            found.append((f"{name} {event.action}", begin_s, event.end_s))
        else:
            found.append((str(event.action), event.start_s, event.end_s))
    return found
