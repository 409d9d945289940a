"""The frontier of a branch-and-bound search: open nodes by their lower bounds, and the best plans so far.

A node stands for a set of plans, from coarse to fine:

    ScheduleChoice → ExpandedChoice → Plan → (OverMemoryPlan →) FittingPlan → simulated

Each has a bound that no plan below it beats. `step` takes the node with the least bound apart, or simulates it. Once
enough plans are known, nodes with a bound above the best values are pruned; when the least open bound is above them,
the best plans are proven.
"""

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from math import gcd, inf
from operator import attrgetter, itemgetter
from time import perf_counter
from typing import TypeVar

from muster.planner.evaluated_plan import EvaluatedPlan, FoundPlan
from muster.planner.memory.fitter import PendingFit
from muster.planner.notable_plans import Trait, plan_traits
from muster.planner.plan_evaluator import PlanEvaluator
from muster.planner.search_budget import (
    CHOICE_WORK,
    PLAN_WORK,
    SearchBudget,
    fit_work,
    simulation_work,
)
from muster.planner.search_result import ROUNDING_TOLERANCE
from muster.planner.space import (
    DataSharding,
    MeshShape,
    ScheduleChoice,
    data_shardings,
    draft_plans,
    mesh_shapes,
    schedule_choices,
)
from muster.planner.tiles import tiled_plan
from muster.spec.plan import Plan

PROMISING_FACTOR = 1.1
"""Least expected ratio of a plan's value to its bound. A fitting plan is simulated at once where its bound, times this
or the ratio of the last such plan of its schedule, is below the best value: an early good value prunes more."""


@dataclass(frozen=True, slots=True)
class ExpandedChoice:
    """A choice whose bound counts the times of its stages."""

    choice: ScheduleChoice


@dataclass(frozen=True, slots=True)
class FittingPlan:
    """A plan that fits in memory."""

    plan: Plan


@dataclass(frozen=True, slots=True)
class OverMemoryPlan:
    """A plan that needs recompute or offload to fit; its bound counts the least time that they add."""

    plan: Plan


T = TypeVar("T")
Node = ScheduleChoice | ExpandedChoice | Plan | OverMemoryPlan | FittingPlan
Entry = tuple[float, int, Node]
"""Bound, running number (the earlier of equal bounds is first), node."""


class Frontier:
    """State of one search. The phases (`search_phases`) work on it in turn."""

    def __init__(
        self,
        evaluator: PlanEvaluator,
        top: int,
        exact: int,
        ceiling: float = inf,
        budget: SearchBudget | None = None,
        part: tuple[int, int] = (0, 1),
        must_answer: bool = True,
    ) -> None:
        """`top` plans are wanted, the first `exact` of them proven; values above `ceiling` are of no interest. `part`:
        number of this part of the space, and number of parts. `must_answer`: simulate a first plan even where its
        simulation ends after the time limit."""
        self.evaluator = evaluator
        self.request = evaluator.request
        self.memory_budget = evaluator.memory_budget
        self.budget = budget or SearchBudget()
        """Work that was done and may be done."""
        self.part = part
        self.must_answer = must_answer
        self.top = top
        self.exact = exact
        self.ceiling = ceiling
        self.best: list[FoundPlan] = []
        """Best plans of all parts, as far as they are known here."""
        self.evaluated: dict[Plan, EvaluatedPlan] = {}
        """Best plans that were simulated here."""
        self.notable: dict[Trait, FoundPlan] = {}
        """Best plan that was simulated here of those with each trait."""
        self.heap: list[Entry] = []
        self.numbers = count()
        self.counts: Counter[str] = Counter()
        """Nodes of each kind that were seen (`search_result.COUNTERS`)."""
        self.nearest_miss: tuple[float, Plan | None] = (inf, None)
        """Excess bytes and plan: of all plans that can't be made to fit, the one with the least excess."""
        self.simulated: set[Plan] = set()
        self.predrafted: set[Plan] = set()
        """Drafts that were counted before their choice was expanded."""
        self.unexpanded: list[tuple[int, MeshShape]] = []
        """Numbered shapes without choices on the heap, once `expand` began."""
        self.bound_ratios: dict[str, float] = {}
        """Schedule → value over bound of the last plan that was simulated because it was promising."""

    def expand(self) -> None:
        """Push the choices of all shapes, however little work there is for them: the probes are chosen among them. When
        the time is over, only of the shapes that were reached."""
        if not self.counts["shapes"]:
            self.unexpanded = _evenly_spread(list(enumerate(self.shapes())))
        found: list[tuple[int, float, ScheduleChoice]] = []
        while self.unexpanded and not (found and self.budget.is_late):
            index, shape = self.unexpanded.pop()
            self.budget.spend(self.evaluator.shape_work)
            self.counts["shapes"] += 1
            found += ((index, bound, choice) for bound, choice in self._bounded_choices(shape))
        for _, bound, choice in sorted(found, key=itemgetter(0)):
            self.push("orders", bound, choice)

    def shapes(self) -> Iterator[MeshShape]:
        """Yield the shapes of this part: the degrees are dealt out in turn, with all their micro-batch sizes."""
        number, parts = self.part
        degrees: dict[MeshShape, int] = {}
        for shape in mesh_shapes(self.request):
            if degrees.setdefault(replace(shape, micro_batch_size=1), len(degrees)) % parts == number:
                yield shape

    def _bounded_choices(self, shape: MeshShape) -> list[tuple[float, ScheduleChoice]]:
        """Return bound and choice for the choices of a shape; none where its state alone doesn't fit."""
        bounds = self.evaluator.bounds
        shardings = data_shardings(self.request, shape)
        fitting = [sharding for sharding in shardings if self.memory_budget.may_fit(shape, sharding)]
        if not fitting:
            self.counts["too_large"] += len(shardings)
            return []
        comm = min(bounds.communication(shape, sharding) for sharding in fitting)
        return [(max(comm, bounds.of_choice(choice)), choice) for choice in schedule_choices(self.request, shape)]

    def is_past(self, end: float) -> bool:
        """Return True if `end` units of work are spent, or the time is over."""
        return self.budget.spent >= end or self.budget.is_late

    def push(self, counter: str, bound: float, node: Node) -> None:
        """Count a node, and put it on the heap unless it is pruned."""
        self.counts[counter] += 1
        if not self.is_pruned(bound):
            heapq.heappush(self.heap, (bound, next(self.numbers), node))

    def step(self) -> None:
        """Take the node with the least bound apart, or simulate it."""
        bound, _, node = heapq.heappop(self.heap)
        if isinstance(node, ScheduleChoice):
            self._expand_choice(node, bound)
        elif isinstance(node, ExpandedChoice):
            self._draft_plans(node.choice, bound)
        elif isinstance(node, Plan):
            self._fit_or_defer(node, bound)
        elif isinstance(node, OverMemoryPlan):
            self._queue_or_simulate(node.plan, bound, self.fit(node.plan))
        elif self.has_time_for(node.plan):
            self.simulate(node.plan)
        else:
            heapq.heappush(self.heap, (bound, next(self.numbers), node))
            self.budget.end_s = 0.0

    def _expand_choice(self, choice: ScheduleChoice, bound: float) -> None:
        shardings = data_shardings(self.request, choice.shape)
        if any(self.memory_budget.may_fit(choice.shape, sharding, choice) for sharding in shardings):
            self.budget.spend(CHOICE_WORK)
            bound = max(bound, self.evaluator.bounds.unsharded(choice))
            self.push("opened", bound, ExpandedChoice(choice))
        else:
            self.counts["too_large"] += len(shardings)

    def _draft_plans(self, choice: ScheduleChoice, bound: float) -> None:
        for draft in draft_plans(self.request, choice, partial(self._is_wanted, choice)):
            self.counts["drafts"] += draft not in self.predrafted
            plan = self.evaluator.complete_draft(draft, choice)
            self.budget.spend(PLAN_WORK)
            if plan is not None:
                self.push("plans", max(bound, self.evaluator.bounds.of_plan(plan)), plan)

    def _is_wanted(self, choice: ScheduleChoice, sharding: DataSharding) -> bool:
        """Return True if plans with a data sharding may fit and be among the best."""
        fits = self.memory_budget.may_fit(choice.shape, sharding, choice)
        wanted = fits and not self.is_pruned(self.evaluator.bounds.communication(choice.shape, sharding))
        self.counts["drafts"] += not wanted
        self.counts["too_large"] += not fits
        return wanted

    def _fit_or_defer(self, plan: Plan, bound: float) -> None:
        """Make a plan fit, or push it back where the least time that this adds puts other nodes before it."""
        tiled = tiled_plan(self.request, plan)
        if tiled is not None and not self.memory_budget.logits_fit(plan):
            self._push_tiled(tiled, bound)
            return
        self.budget.spend(fit_work(plan, self.request.workload))
        fit, excess = self.memory_budget.start_fit(plan, self.nearest_miss[0])
        if fit != [plan] and tiled is not None:
            self._push_tiled(tiled, bound)
        if isinstance(fit, PendingFit):
            bound = max(bound, self.evaluator.bounds.with_added(plan, fit.added_s))
            if self.heap and bound > self.heap[0][0] and not self._is_promising(plan, bound):
                self.push("lacking", bound, OverMemoryPlan(plan))
                return
            self.budget.spend(fit_work(plan, self.request.workload, by_layer=True))
            fit = self.memory_budget.finish_fit(fit)
        self._note_nearest_miss(plan, fit, excess)
        self._queue_or_simulate(plan, bound, fit)

    def _push_tiled(self, tiled: Plan, bound: float) -> None:
        """Push a plan with tiles in place of, or beside, the one without, which has a bound."""
        self.push("plans", max(bound, self.evaluator.bounds.of_plan(tiled)), tiled)

    def _queue_or_simulate(self, plan: Plan, bound: float, fitting: list[Plan]) -> None:
        """Push what became of a plan so that it fits; simulate at once what is promising."""
        for fit in fitting:
            fit_bound = bound if fit is plan else max(bound, self.evaluator.bounds.of_plan(fit))
            if self._is_promising(plan, fit_bound) and fit not in self.simulated:
                self.counts["fit"] += 1
                self.bound_ratios[plan.schedule] = self._simulate_new(fit) / fit_bound
            else:
                self.push("fit", fit_bound, FittingPlan(fit))

    def has_time_for(self, plan: Plan) -> bool:
        """Return True if there is time to simulate a plan, or a plan is needed and there is none yet."""
        is_needed = self.must_answer and not self.best
        return is_needed or self.budget.has_time_for(simulation_work(plan, self.request.workload))

    def _is_promising(self, plan: Plan, bound: float) -> bool:
        """Return True if a plan with this bound is expected to be better than the best so far."""
        expected = bound * max(PROMISING_FACTOR, self.bound_ratios.get(plan.schedule, 0.0))
        return bound > 0 and bool(self.best) and expected < self.best[0].value and self.has_time_for(plan)

    def fit(self, plan: Plan) -> list[Plan]:
        """Return the plan where it fits, else the plans with recompute or offload, or with tiles, that do."""
        tiled = tiled_plan(self.request, plan)
        fitting: list[Plan] = []
        excess = inf
        if tiled is None or self.memory_budget.logits_fit(plan):
            fitting, excess = self.memory_budget.fit(plan, self.nearest_miss[0])
            self.budget.spend(fit_work(plan, self.request.workload, by_layer=plan not in fitting))
        if not fitting and tiled is not None:
            fitting, excess = self.memory_budget.fit(tiled, self.nearest_miss[0])
            self.budget.spend(fit_work(plan, self.request.workload, by_layer=tiled not in fitting))
        self._note_nearest_miss(plan, fitting, excess)
        return fitting

    def _note_nearest_miss(self, plan: Plan, fitting: list[Plan], excess: float) -> None:
        if not fitting and excess < self.nearest_miss[0]:
            self.nearest_miss = excess, plan

    def note_predrafted(self, drafts: Sequence[Plan]) -> None:
        """Count drafts that are looked at before their choice is expanded."""
        self.counts["drafts"] += len(set(drafts) - self.predrafted)
        self.predrafted.update(drafts)

    def simulate(self, plan: Plan) -> None:
        """Simulate a plan once, and keep it where it is among the best."""
        if plan not in self.simulated:
            self._simulate_new(plan)

    def _simulate_new(self, plan: Plan) -> float:
        self.simulated.add(plan)
        self.counts["simulated"] += 1
        work = simulation_work(plan, self.request.workload)
        self.budget.spend(work)
        begin_s = perf_counter()
        evaluated = self.evaluator.evaluate(plan)
        SearchBudget.note_pace(work, perf_counter() - begin_s)
        self.evaluated[plan] = evaluated
        found = FoundPlan(evaluated.sort_key, plan)
        self.keep([found])
        for trait in plan_traits(plan):
            self.notable[trait] = min(self.notable.get(trait, found), found, key=attrgetter("sort_key"))
        return evaluated.value

    def keep(self, found: Iterable[FoundPlan]) -> None:
        """Add simulated plans, of this part or others, to the best so far."""
        known = {one.plan: one for one in (*self.best, *found)}
        self.simulated.update(known)
        self.best = sorted(known.values(), key=attrgetter("sort_key"))[: self.top]
        self.evaluated = {one.plan: self.evaluated[one.plan] for one in self.best if one.plan in self.evaluated}

    def is_pruned(self, bound: float) -> bool:
        """Return True if no node with this bound is wanted: `top` plans are known, and it can't be among the first
        `exact`."""
        return self._is_above(bound, self.top)

    @property
    def is_settled(self) -> bool:
        """True if no open node can be among the first `exact` plans."""
        return not self.heap or self._is_above(self.heap[0][0], self.exact)

    def _is_above(self, bound: float, required: int) -> bool:
        """Return True if a bound is above the `exact`-th value, where at least `required` plans are known."""
        last = self.best[self.exact - 1].value if len(self.best) >= required else inf
        return bound > min(last, self.ceiling) * (1 + ROUNDING_TOLERANCE)

    @property
    def open_bound(self) -> float:
        """Least value that an open plan of this part may have; infinite where none is left."""
        return 0.0 if self.unexpanded else self.heap[0][0] if self.heap else inf


def _evenly_spread(rows: list[T]) -> list[T]:
    """Return the rows in an order whose every tail is spread evenly over them: steps of the golden section.

    `expand` pops from the end: when its time is over, the shapes that it has seen are a fair sample of all.
    """
    length = len(rows)
    step = next((each for each in range(round(0.618 * length), length) if gcd(each, length) == 1), 1)
    return [rows[index * step % length] for index in range(length)]
