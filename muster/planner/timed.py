"""Plans whose order of passes is found for their own times, where nodes or links differ.

Schedules that stand in a book hide hops that are alike. Over a slow link a pipeline should have as many micro-batches
under way as its trips there and back last, and no more; a rank's share of the layers may lie in several stages one
after another, over which nothing travels, so that the gradients of one are reduced while those of the next are
computed. What is best depends on all times together. So it is not bounded: from the best plans that were found,
one thing after another is changed as long as that helps.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import inf
from random import Random
from time import perf_counter

from muster.cost.plan_times import plan_times
from muster.planner.judge import Judge
from muster.planner.space import CHUNKS, admitted, micro_batch_sizes
from muster.planner.verdict import Verdict
from muster.schedule.schedule import Schedule
from muster.schedule.setting import Setting
from muster.schedule.timed import timed_schedules
from muster.spec.errors import InfeasibleError
from muster.spec.legal import problems
from muster.spec.plan import Order, Plan, StageSpec, split_evenly

MOST_PLANS = 3
"""That are begun from."""

MOST_PASSES = 60_000
"""Of an order: one of more takes seconds to find."""

FIRST_SHARE = 0.75
"""Of the time that is left, for each of them but the last."""

HOPEFUL = 1.08
"""A size of micro-batches is gone on with where its first plan takes no more than so many times the best so far."""

FARTHEST = 4
"""Of sizes of micro-batches that are tried, so many times the plan's own, or as small a part of it."""

KEPT = (1.0, 0.5, 0.25)
"""By how many micro-batches' activations of its share a rank may keep more or fewer."""

_SAME = 1e-6
"""A step that is shorter by no more than this part is no gain."""


IDLE = 80
"""Tries of several changes at once that don't help, after which no more are made."""


@dataclass(frozen=True, slots=True)
class Draft:
    """What is changed of a plan."""

    micro_batch_size: int
    layers: tuple[int, ...]
    """Of each pipeline rank."""
    chunks: int
    """Stages of each rank, one after another."""
    kept: float
    """Micro-batches' activations of a rank's share that it may keep."""


def timed(plans: Iterable[Plan], judge: Judge, limit_s: float = inf) -> list[Verdict]:
    """What is found with an order of its own for each of the first plans that have pipelines alike, and fits. After
    `limit_s` what is found by then; the first has the most of it."""
    begin_s, wanted = perf_counter(), dict[tuple, Plan]()
    for plan in plans:
        if len(wanted) < MOST_PLANS and _may_be_timed(plan, judge):
            wanted.setdefault((plan.mesh(0), plan.pp, plan.axis_order, plan.default_strategy.zero), plan)
    found = list[Verdict]()
    for number, plan in enumerate(wanted.values(), 1):
        left_s = limit_s - (perf_counter() - begin_s)
        end_s = perf_counter() + (left_s if number == len(wanted) else FIRST_SHARE * left_s)
        found += filter(None, [_Climb(plan, judge).best(end_s)])
    return found


def _may_be_timed(plan: Plan, judge: Judge) -> bool:
    fixed, given = judge.request.fixed, judge.request.base
    if judge.request.objective == "memory":
        return False
    if plan.pp == 1 or plan.replicas > 1 or plan.spread_vocab or plan.data_shares or not plan.is_uniform:
        return False
    if judge.request.cluster.device.rates is not None or given.stages or given.overrides:
        return False
    return not {"schedule", "vpp"}.intersection(fixed) and not fixed.get("stages")


def _is_better(one: Verdict, other: Verdict) -> bool:
    return one.value < other.value * (1 - _SAME)


class _Climb:
    """From one plan to others that are better, change by change."""

    def __init__(self, plan: Plan, judge: Judge) -> None:
        self.judge, self.request = judge, judge.request
        self.plan = plan
        self.seen: set[Draft] = set()
        base, fixed = judge.request.base.default_strategy, judge.request.fixed
        self._bare = {name: fixed.get(name, getattr(base, name)) for name in ("recompute", "offload")}
        """What layers do unless it doesn't fit."""

    def best(self, end_s: float) -> Verdict | None:
        """The best plan from which no change leads to a better one, of those with each size of micro-batches, and what
        several changes at once make of it."""
        begun: list[tuple[Draft, Verdict]] = []
        for first in self._firsts():
            verdict = self._verdict(first) if perf_counter() < end_s else None
            begun += [(first, verdict)] if verdict else []
        begun.sort(key=lambda one: one[1].order)
        found: list[tuple[Draft, Verdict]] = []
        for draft, verdict in begun:
            if verdict.value <= HOPEFUL * min((one.value for _, one in found), default=inf):
                found.append(self._climbed(draft, verdict, end_s))
        return self._shaken(*min(found, key=lambda one: one[1].order), end_s) if found else None

    def _climbed(self, draft: Draft, best: Verdict, end_s: float) -> tuple[Draft, Verdict]:
        """Changed as long as one change helps."""
        moved = True
        while moved:
            moved = False
            for other in self._changes(draft):
                if perf_counter() >= end_s:
                    return draft, best
                verdict = self._verdict(other)
                if verdict is not None and _is_better(verdict, best):
                    draft, best, moved = other, verdict, True
                    break
        return draft, best

    def _shaken(self, draft: Draft, best: Verdict, end_s: float) -> Verdict:
        """Tries two or three changes at once, until many in a row don't help."""
        random, idle = Random(0), 0
        while idle < IDLE and perf_counter() < end_s:
            other, idle = draft, idle + 1
            for _ in range(random.choice((2, 2, 3))):
                other = random.choice(list(self._changes(other)) or [other])
            verdict = self._verdict(other)
            if verdict is not None and _is_better(verdict, best):
                draft, best = self._climbed(other, verdict, end_s)
                idle = 0
        return best

    def _firsts(self) -> list[Draft]:
        """With micro-batches of each size, the plan's own and those like it first."""
        plan, request = self.plan, self.request
        held = [0] * plan.pp
        for rank, count in zip(plan.placement, plan.layer_counts(request.model.num_layers), strict=True):
            held[rank] += count
        chunks, own = (2 if min(held) > 1 else 1), plan.micro_batch_size
        sizes = micro_batch_sizes(request, request.workload.global_batch_size // plan.mesh(0).data_ranks)
        near = sorted((max(size, own) / min(size, own), size) for size in sizes)
        return [Draft(size, tuple(held), chunks, float(plan.pp + 1)) for far, size in near if far <= FARTHEST]

    def _changes(self, draft: Draft) -> Iterator[Draft]:
        """One thing at a time."""
        request, pp = self.request, self.plan.pp
        for kept in KEPT:
            yield replace(draft, kept=draft.kept + kept)
            if draft.kept - kept >= 1:
                yield replace(draft, kept=draft.kept - kept)
        for chunks in sorted((1, *CHUNKS), key=lambda one: abs(one - draft.chunks)):
            if chunks != draft.chunks and chunks <= min(draft.layers):
                yield replace(draft, chunks=chunks)
        if "stages" not in request.fixed:
            for giver in range(pp):
                for taker in range(pp):
                    if giver != taker and draft.layers[giver] > draft.chunks:
                        moved = [count + (rank == taker) - (rank == giver) for rank, count in enumerate(draft.layers)]
                        yield replace(draft, layers=tuple(moved))

    def _verdict(self, draft: Draft) -> Verdict | None:
        """The best plan of a draft that fits; None where none does, or where it was looked at before."""
        if draft in self.seen:
            return None
        self.seen.add(draft)
        verdicts = [
            self.judge.verdict(plan)
            for drafted in self._plans(draft)
            for plan in self.judge.room.made_to_fit(drafted)[0]
            if admitted(self.request, plan)
        ]
        return min(verdicts, key=lambda one: one.order, default=None)

    def _plans(self, draft: Draft) -> Iterator[Plan]:
        """With the orders that are found for it; none where it can't be."""
        plan, request = self._laid(draft), self.request
        passes = 3 * plan.num_stages * plan.num_micro_batches(request.workload)
        if passes > MOST_PASSES or problems(plan, request.model, request.workload, request.cluster.num_devices):
            return
        times = plan_times(request.model, plan, request.workload, request.cluster)
        stages = range(plan.num_stages)
        forward_s, inputs_s, weights_s = (tuple(times.seconds[kind, stage] for stage in stages) for kind in "FIW")
        hops_s = [
            0.0 if plan.placement[stage] == plan.placement[stage + 1] else times.hop(stage, stage + 1).total_s
            for stage in stages[:-1]
        ]
        setting = Setting(
            plan.pp,
            plan.num_micro_batches(request.workload),
            plan.vpp,
            forward_s,
            inputs_s,
            weights_s,
            placement=plan.placement,
            memory_limit=draft.kept,
        )
        try:
            for schedule in timed_schedules(setting, hops_s):
                yield plan.model_copy(update={"order": _order(schedule)})
        except InfeasibleError:
            return

    def _laid(self, draft: Draft) -> Plan:
        """The plan as drafted, with its order yet to be found."""
        own, pp = self.plan, self.plan.pp
        placement = tuple(rank for rank in range(pp) for _ in range(draft.chunks))
        layers = [count for held in draft.layers for count in split_evenly(held, draft.chunks)]
        data = own.mesh(0).data_ranks
        count = self.request.workload.global_batch_size // data // draft.micro_batch_size
        empty = Order(times="predicted", micro_batches=count, placement=placement, ranks=("",) * pp)
        return own.model_copy(
            update={
                "schedule": "auto",
                "vpp": draft.chunks,
                "micro_batch_size": draft.micro_batch_size,
                "activation_limit": draft.kept,
                "stages": () if "stages" in self.request.fixed else tuple(map(_stage, layers)),
                "overrides": (),
                "default_strategy": own.default_strategy.model_copy(update=self._bare),
                "order": empty,
            }
        )


def _stage(num_layers: int) -> StageSpec:
    return StageSpec(layers=num_layers)


def _order(schedule: Schedule) -> Order:
    ranks = tuple(" ".join(map(str, passes)) for passes in schedule.ranks)
    return Order(times="predicted", micro_batches=schedule.num_micro_batches, placement=schedule.placement, ranks=ranks)
