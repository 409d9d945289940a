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

from muster.cost.time.plan_times import plan_times
from muster.planner.evaluated_plan import EvaluatedPlan
from muster.planner.plan_evaluator import PlanEvaluator
from muster.planner.space import CHUNK_COUNTS, is_admitted, micro_batch_sizes
from muster.schedule.action import Kind
from muster.schedule.custom_search import search_custom_orders
from muster.schedule.schedule import Schedule
from muster.schedule.schedule_spec import ScheduleSpec
from muster.spec.errors import InfeasibleError
from muster.spec.legality import plan_violations
from muster.spec.plan import PinnedSchedule, Plan, StageSpec, split_evenly

MAX_START_PLANS = 3
"""That are begun from."""

MAX_PASSES = 60_000
"""Of an order: one of more takes seconds to find."""

TIME_SHARE_PER_PLAN = 0.75
"""Of the time that is left, for each of them but the last."""

PROMISING_FACTOR = 1.08
"""A size of micro-batches is gone on with where its first plan takes no more than so many times the best so far."""

MAX_SIZE_RATIO = 4
"""Of sizes of micro-batches that are tried, so many times the plan's own, or as small a part of it."""

IN_FLIGHT_STEPS = (1.0, 0.5, 0.25)
"""By how many micro-batches' activations of its share a rank may keep more or fewer."""

_MIN_GAIN = 1e-6
"""A step that is shorter by no more than this part is no gain."""


MAX_FAILED_TRIES = 80
"""Tries of several changes at once that don't help, after which no more are made."""


@dataclass(frozen=True, slots=True)
class ScheduleDraft:
    """What is changed of a plan."""

    micro_batch_size: int
    layers: tuple[int, ...]
    """Of each pipeline rank."""
    chunks: int
    """Stages of each rank, one after another."""
    kept: float
    """Micro-batches' activations of a rank's share that it may keep."""


def find_custom_schedules(plans: Iterable[Plan], evaluator: PlanEvaluator, limit_s: float = inf) -> list[EvaluatedPlan]:
    """What is found with an order of its own for each of the first plans that have pipelines alike, and fits. After
    `limit_s` what is found by then; the first has the most of it."""
    begin_s, wanted = perf_counter(), dict[tuple, Plan]()
    for plan in plans:
        if len(wanted) < MAX_START_PLANS and _may_have_custom_schedule(plan, evaluator):
            wanted.setdefault((plan.mesh(0), plan.pp, plan.axis_order, plan.default_strategy.zero), plan)
    found = list[EvaluatedPlan]()
    for number, plan in enumerate(wanted.values(), 1):
        left_s = limit_s - (perf_counter() - begin_s)
        end_s = perf_counter() + (left_s if number == len(wanted) else TIME_SHARE_PER_PLAN * left_s)
        found += filter(None, [_LocalSearch(plan, evaluator).best(end_s)])
    return found


def _may_have_custom_schedule(plan: Plan, evaluator: PlanEvaluator) -> bool:
    fixed, given = evaluator.request.fixed, evaluator.request.base
    if evaluator.request.objective == "memory":
        return False
    if (
        plan.pp == 1
        or plan.pipeline_replicas > 1
        or plan.vocab_parallel
        or plan.uneven_micro_batches
        or not plan.is_uniform
    ):
        return False
    if evaluator.request.cluster.device.rates is not None or given.stages or given.overrides:
        return False
    return not {"schedule", "vpp"}.intersection(fixed) and not fixed.get("stages")


def _is_better(one: EvaluatedPlan, other: EvaluatedPlan) -> bool:
    return one.value < other.value * (1 - _MIN_GAIN)


class _LocalSearch:
    """From one plan to others that are better, change by change."""

    def __init__(self, plan: Plan, evaluator: PlanEvaluator) -> None:
        self.evaluator, self.request = evaluator, evaluator.request
        self.plan = plan
        self.seen: set[ScheduleDraft] = set()
        base, fixed = evaluator.request.base.default_strategy, evaluator.request.fixed
        self._bare = {name: fixed.get(name, getattr(base, name)) for name in ("recompute", "offload")}
        """What layers do unless it doesn't fit."""

    def best(self, end_s: float) -> EvaluatedPlan | None:
        """The best plan from which no change leads to a better one, of those with each size of micro-batches, and what
        several changes at once make of it."""
        begun: list[tuple[ScheduleDraft, EvaluatedPlan]] = []
        for first in self._start_drafts():
            verdict = self._evaluate(first) if perf_counter() < end_s else None
            begun += [(first, verdict)] if verdict else []
        begun.sort(key=lambda one: one[1].sort_key)
        found: list[tuple[ScheduleDraft, EvaluatedPlan]] = []
        for draft, verdict in begun:
            if verdict.value <= PROMISING_FACTOR * min((one.value for _, one in found), default=inf):
                found.append(self._climb(draft, verdict, end_s))
        return self._perturb(*min(found, key=lambda one: one[1].sort_key), end_s) if found else None

    def _climb(self, draft: ScheduleDraft, best: EvaluatedPlan, end_s: float) -> tuple[ScheduleDraft, EvaluatedPlan]:
        """Changed as long as one change helps."""
        moved = True
        while moved:
            moved = False
            for other in self._changes(draft):
                if perf_counter() >= end_s:
                    return draft, best
                verdict = self._evaluate(other)
                if verdict is not None and _is_better(verdict, best):
                    draft, best, moved = other, verdict, True
                    break
        return draft, best

    def _perturb(self, draft: ScheduleDraft, best: EvaluatedPlan, end_s: float) -> EvaluatedPlan:
        """Tries two or three changes at once, until many in a row don't help."""
        random, idle = Random(0), 0
        while idle < MAX_FAILED_TRIES and perf_counter() < end_s:
            other, idle = draft, idle + 1
            for _ in range(random.choice((2, 2, 3))):
                other = random.choice(list(self._changes(other)) or [other])
            verdict = self._evaluate(other)
            if verdict is not None and _is_better(verdict, best):
                draft, best = self._climb(other, verdict, end_s)
                idle = 0
        return best

    def _start_drafts(self) -> list[ScheduleDraft]:
        """With micro-batches of each size, the plan's own and those like it first."""
        plan, request = self.plan, self.request
        held = [0] * plan.pp
        for rank, count in zip(plan.placement, plan.layer_counts(request.model.num_layers), strict=True):
            held[rank] += count
        chunks, own = (2 if min(held) > 1 else 1), plan.micro_batch_size
        sizes = micro_batch_sizes(request, request.workload.global_batch_size // plan.mesh(0).dp_size)
        near = sorted((max(size, own) / min(size, own), size) for size in sizes)
        return [
            ScheduleDraft(size, tuple(held), chunks, float(plan.pp + 1)) for far, size in near if far <= MAX_SIZE_RATIO
        ]

    def _changes(self, draft: ScheduleDraft) -> Iterator[ScheduleDraft]:
        """One thing at a time."""
        request, pp = self.request, self.plan.pp
        for kept in IN_FLIGHT_STEPS:
            yield replace(draft, kept=draft.kept + kept)
            if draft.kept - kept >= 1:
                yield replace(draft, kept=draft.kept - kept)
        for chunks in sorted((1, *CHUNK_COUNTS), key=lambda one: abs(one - draft.chunks)):
            if chunks != draft.chunks and chunks <= min(draft.layers):
                yield replace(draft, chunks=chunks)
        if "stages" not in request.fixed:
            for giver in range(pp):
                for taker in range(pp):
                    if giver != taker and draft.layers[giver] > draft.chunks:
                        moved = [count + (rank == taker) - (rank == giver) for rank, count in enumerate(draft.layers)]
                        yield replace(draft, layers=tuple(moved))

    def _evaluate(self, draft: ScheduleDraft) -> EvaluatedPlan | None:
        """The best plan of a draft that fits; None where none does, or where it was looked at before."""
        if draft in self.seen:
            return None
        self.seen.add(draft)
        verdicts = [
            self.evaluator.evaluate(plan)
            for drafted in self._plans(draft)
            for plan in self.evaluator.memory_budget.fit(drafted)[0]
            if is_admitted(self.request, plan)
        ]
        return min(verdicts, key=lambda one: one.sort_key, default=None)

    def _plans(self, draft: ScheduleDraft) -> Iterator[Plan]:
        """With the orders that are found for it; none where it can't be."""
        plan, request = self._drafted_plan(draft), self.request
        passes = 3 * plan.num_stages * plan.num_micro_batches(request.workload)
        if passes > MAX_PASSES or plan_violations(plan, request.model, request.workload, request.cluster.num_devices):
            return
        times = plan_times(request.model, plan, request.workload, request.cluster, cache=request.cost_cache)
        stages = range(plan.num_stages)
        forward_s, inputs_s, weights_s = (
            tuple(times.seconds[kind, stage] for stage in stages) for kind in (Kind.F, Kind.I, Kind.W)
        )
        hops_s = [
            0.0 if plan.placement[stage] == plan.placement[stage + 1] else times.p2p_time(stage, stage + 1).total_s
            for stage in stages[:-1]
        ]
        setting = ScheduleSpec(
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
            for schedule in search_custom_orders(setting, hops_s):
                yield plan.model_copy(update={"pinned_schedule": _pinned_schedule(schedule)})
        except InfeasibleError:
            return

    def _drafted_plan(self, draft: ScheduleDraft) -> Plan:
        """The plan as drafted, with its order yet to be found."""
        own, pp = self.plan, self.plan.pp
        placement = tuple(rank for rank in range(pp) for _ in range(draft.chunks))
        layers = [count for held in draft.layers for count in split_evenly(held, draft.chunks)]
        data = own.mesh(0).dp_size
        count = self.request.workload.global_batch_size // data // draft.micro_batch_size
        empty = PinnedSchedule(times="predicted", micro_batches=count, placement=placement, ranks=("",) * pp)
        return own.model_copy(
            update={
                "schedule": "auto",
                "vpp": draft.chunks,
                "micro_batch_size": draft.micro_batch_size,
                "max_in_flight_micro_batches": draft.kept,
                "stages": () if "stages" in self.request.fixed else tuple(map(_stage, layers)),
                "overrides": (),
                "default_strategy": own.default_strategy.model_copy(update=self._bare),
                "pinned_schedule": empty,
            }
        )


def _stage(num_layers: int) -> StageSpec:
    return StageSpec(layers=num_layers)


def _pinned_schedule(schedule: Schedule) -> PinnedSchedule:
    ranks = tuple(" ".join(map(str, passes)) for passes in schedule.ranks)
    return PinnedSchedule(
        times="predicted", micro_batches=schedule.num_micro_batches, placement=schedule.placement, ranks=ranks
    )
