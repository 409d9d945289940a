"""Schedules found for the times of one plan, where nodes or links differ.

Registered schedules assume that all p2p transfers take the same time. Over a slow link a pipeline should have as many
micro-batches in flight as hide a round trip, and no more; and a rank's layers may form several stages one after
another, without transfers between them, so that the gradients of one are reduced while those of the next are computed.
The best choice depends on all times together and has no bound. So this is a local search: from the best plans of the
search, one thing after another is changed as long as that helps.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import inf
from operator import attrgetter
from random import Random

from muster.planner.evaluated_plan import EvaluatedPlan
from muster.planner.plan_evaluator import PlanEvaluator
from muster.planner.plan_orders import MAX_PASSES, draft_of, with_orders
from muster.planner.search_budget import SearchBudget, simulation_work
from muster.planner.space import CHUNK_COUNTS, is_admitted, micro_batch_sizes
from muster.spec.legality import plan_violations
from muster.spec.plan import Plan, StageSpec, split_evenly

MAX_START_PLANS = 3
"""Plans that a local search starts from."""

SHARE_PER_PLAN = 0.75
"""Share of the budget left that each start plan but the last may take."""

PROMISING_FACTOR = 1.08
"""Largest ratio of a first plan to the best so far with which its micro-batch size is searched on."""

MAX_SIZE_RATIO = 4
"""Largest ratio between the plan's own micro-batch size and those that are tried."""

ORDER_WORK_RATIO = 2.0
"""Work of finding an order of passes and weighing its memory, over that of simulating it."""

IN_FLIGHT_STEPS = (1.0, 0.5, 0.25)
"""Changes of the micro-batches in flight that are tried, in activations of a rank's share."""

_MIN_GAIN = 1e-6
"""Relative improvement of a step below which it is no gain."""


MAX_FAILED_TRIES = 80
"""Combined changes in a row without gain, after which the search ends."""


@dataclass(frozen=True, slots=True)
class ScheduleDraft:
    """The fields of a plan that the local search changes."""

    micro_batch_size: int
    layers: tuple[int, ...]
    """Layers of each pipeline rank."""
    chunks: int
    """Stages of each rank, one after another."""
    in_flight: float
    """Most micro-batches in flight on a rank, in activations of its share."""


def find_custom_schedules(
    plans: Iterable[Plan], evaluator: PlanEvaluator, budget: SearchBudget | None = None
) -> list[EvaluatedPlan]:
    """Return the best plan with a schedule of its own for each of the first plans with different pipelines, where one
    fits.

    Once the budget (default: endless) is spent, only what was found by then; the first plan has most of it.
    """
    budget = budget or SearchBudget()
    starts: dict[tuple, Plan] = {}
    for plan in plans:
        if len(starts) < MAX_START_PLANS and _may_have_custom_schedule(plan, evaluator):
            starts.setdefault((plan.mesh(0), plan.pp, plan.axis_order, plan.default_strategy.zero), plan)
    found: list[EvaluatedPlan] = []
    for number, plan in enumerate(starts.values(), 1):
        part = 1.0 if number == len(starts) else SHARE_PER_PLAN
        found += filter(None, [_LocalSearch(plan, evaluator, budget.share(part)).best()])
    return found


def _may_have_custom_schedule(plan: Plan, evaluator: PlanEvaluator) -> bool:
    fixed = evaluator.request.fixed
    base = evaluator.request.base
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
    if evaluator.request.cluster.device.rates is not None or base.stages or base.overrides:
        return False
    return not {"schedule", "vpp"}.intersection(fixed) and not fixed.get("stages")


def _is_better(one: EvaluatedPlan, other: EvaluatedPlan) -> bool:
    return one.value < other.value * (1 - _MIN_GAIN)


class _LocalSearch:
    """A local search from one plan to better ones, change by change."""

    def __init__(self, plan: Plan, evaluator: PlanEvaluator, budget: SearchBudget) -> None:
        self.evaluator = evaluator
        self.budget = budget
        self.request = evaluator.request
        self.plan = plan
        self.seen: set[ScheduleDraft] = set()

    def best(self) -> EvaluatedPlan | None:
        """Return the best local optimum over all micro-batch sizes, after combined changes too."""
        starts: list[tuple[ScheduleDraft, EvaluatedPlan]] = []
        for first in self._start_drafts():
            evaluated = self._evaluate(first) if not self.budget.is_spent else None
            starts += [(first, evaluated)] if evaluated else []
        starts.sort(key=lambda pair: pair[1].sort_key)
        found: list[tuple[ScheduleDraft, EvaluatedPlan]] = []
        for draft, evaluated in starts:
            if evaluated.value <= PROMISING_FACTOR * min((one.value for _, one in found), default=inf):
                found.append(self._climb(draft, evaluated))
        return self._perturb(*min(found, key=lambda pair: pair[1].sort_key)) if found else None

    def _climb(self, draft: ScheduleDraft, best: EvaluatedPlan) -> tuple[ScheduleDraft, EvaluatedPlan]:
        """Make single changes as long as one helps."""
        moved = True
        while moved:
            moved = False
            for other in self._changes(draft):
                if self.budget.is_spent:
                    return draft, best
                evaluated = self._evaluate(other)
                if evaluated is not None and _is_better(evaluated, best):
                    draft, best = other, evaluated
                    moved = True
                    break
        return draft, best

    def _perturb(self, draft: ScheduleDraft, best: EvaluatedPlan) -> EvaluatedPlan:
        """Make two or three changes at once, until many in a row don't help."""
        random = Random(0)
        idle = 0
        while idle < MAX_FAILED_TRIES and not self.budget.is_spent:
            idle += 1
            other = draft
            for _ in range(random.choice((2, 2, 3))):
                other = random.choice(list(self._changes(other)) or [other])
            evaluated = self._evaluate(other)
            if evaluated is not None and _is_better(evaluated, best):
                draft, best = self._climb(other, evaluated)
                idle = 0
        return best

    def _start_drafts(self) -> list[ScheduleDraft]:
        """Return a draft for each micro-batch size, the sizes like the plan's own first."""
        plan = self.plan
        request = self.request
        held = [0] * plan.pp
        for rank, count in zip(plan.placement, plan.layer_counts(request.model.num_layers), strict=True):
            held[rank] += count
        chunks = 2 if min(held) > 1 else 1
        current = plan.micro_batch_size
        sizes = micro_batch_sizes(request, request.island_sequences // plan.mesh(0).dp_size)
        near = sorted((max(size, current) / min(size, current), size) for size in sizes)
        return [
            ScheduleDraft(size, tuple(held), chunks, float(plan.pp + 1)) for far, size in near if far <= MAX_SIZE_RATIO
        ]

    def _changes(self, draft: ScheduleDraft) -> Iterator[ScheduleDraft]:
        """Yield drafts with one change."""
        request = self.request
        pp = self.plan.pp
        for step in IN_FLIGHT_STEPS:
            yield replace(draft, in_flight=draft.in_flight + step)
            if draft.in_flight - step >= 1:
                yield replace(draft, in_flight=draft.in_flight - step)
        for chunks in sorted((1, *CHUNK_COUNTS), key=lambda count: abs(count - draft.chunks)):
            if chunks != draft.chunks and chunks <= min(draft.layers):
                yield replace(draft, chunks=chunks)
        if "stages" not in request.fixed:
            for giver in range(pp):
                for taker in range(pp):
                    if giver != taker and draft.layers[giver] > draft.chunks:
                        moved = [count + (rank == taker) - (rank == giver) for rank, count in enumerate(draft.layers)]
                        yield replace(draft, layers=tuple(moved))

    def _evaluate(self, draft: ScheduleDraft) -> EvaluatedPlan | None:
        """Return the best plan of a draft that fits; None where none does, or the draft was evaluated before."""
        if draft in self.seen:
            return None
        self.seen.add(draft)
        candidates: list[EvaluatedPlan] = []
        for drafted in self._plans(draft):
            self.budget.spend(ORDER_WORK_RATIO * simulation_work(drafted, self.request.workload))
            for plan in self.evaluator.memory_budget.fit(drafted)[0]:
                if is_admitted(self.request, plan):
                    self.budget.spend(simulation_work(plan, self.request.workload))
                    candidates.append(self.evaluator.evaluate(plan))
        return min(candidates, key=attrgetter("sort_key"), default=None)

    def _plans(self, draft: ScheduleDraft) -> Iterator[Plan]:
        """Yield the plan with each schedule that is found for it; none where it is illegal."""
        request = self.request
        plan = self._drafted_plan(draft)
        passes = 3 * plan.num_stages * plan.num_micro_batches(request.workload)
        if passes > MAX_PASSES or plan_violations(plan, request.model, request.workload, request.cluster.num_devices):
            return
        yield from with_orders(plan, request)

    def _drafted_plan(self, draft: ScheduleDraft) -> Plan:
        """Return the drafted plan, with its schedule yet to be found."""
        placement = tuple(rank for rank in range(self.plan.pp) for _ in range(draft.chunks))
        layers = [count for held in draft.layers for count in split_evenly(held, draft.chunks)]
        stages = () if "stages" in self.request.fixed else tuple(map(_stage, layers))
        plan = self.plan.model_copy(update={"micro_batch_size": draft.micro_batch_size})
        return draft_of(plan, self.request, placement, stages, draft.in_flight)


def _stage(num_layers: int) -> StageSpec:
    return StageSpec(layers=num_layers)
