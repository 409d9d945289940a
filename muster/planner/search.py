"""Branch and bound over plans: what might be best is looked at first, and only simulated times are believed."""

import heapq
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from math import gcd, inf
from operator import itemgetter
from time import perf_counter
from typing import TypeVar

from muster.planner.evaluated_plan import EvaluatedPlan
from muster.planner.memory.budget import PendingFit
from muster.planner.neighbours import neighbour_plans
from muster.planner.node_order import is_heterogeneous
from muster.planner.plan_evaluator import PlanEvaluator
from muster.planner.request import PlanRequest
from muster.planner.search_result import ROUNDING_TOLERANCE, SearchResult, total_counts
from muster.planner.seed_plans import complete_draft, seed_plans
from muster.planner.space import (
    DataSharding,
    MeshShape,
    ScheduleChoice,
    data_shardings,
    draft_plans,
    mesh_shapes,
    schedule_choices,
)
from muster.schedule.gc_pause import gc_paused
from muster.spec.plan import Plan
from muster.spec.schedules import SCHEDULES

MAX_PROBED_DEPTHS = 6
"""Depths of the pipeline that are tried before the search begins."""

PROBE_TIME_SHARE = 0.75
"""Of the time that is left then, what that may take."""

NARROWEST_TP_DEGREES = 2
"""Degrees of tensor parallelism of which that is done for models with experts."""

MIN_EXPAND_S = 4.0
"""For bounds of all orders, however little time there is: what is tried first is chosen among them."""

MIN_SEEDS = 4
"""Plans that are simulated first however little time there is."""

FIT_ATTEMPTS = 3
"""Plans that are tried for each of these, until one fits."""

PROMISING_FACTOR = 1.1
"""A plan that fits is simulated at once where so many times its bound, or what the last one of its schedule took over
its own, is less than the best time: the sooner a good time is known, the more can be cut."""

LOCAL_SEARCH_BEGINS, LOCAL_SEARCH_ENDS = 0.5, 0.75
"""Of the time: when a search that isn't settled looks at likely plans and at what single changes make of the best, and
until when."""

MAX_LOCAL_SEARCH_SHAPES, LOCAL_SEARCH_SIMULATED = 100, 5
"""Of the shapes then, how many: room for each is looked for, which takes a few hundredths of a second. And how many of
their plans are simulated."""


@dataclass(frozen=True, slots=True)
class ExpandedChoice:
    """An order whose stages' times were looked at."""

    choice: ScheduleChoice


@dataclass(frozen=True, slots=True)
class FittingPlan:
    """A plan that fits in memory."""

    plan: Plan


@dataclass(frozen=True, slots=True)
class OverMemoryPlan:
    """A plan that doesn't fit before more is done, whose bound counts what that takes at least."""

    plan: Plan


Row = TypeVar("Row")
Node = ScheduleChoice | ExpandedChoice | Plan | OverMemoryPlan | FittingPlan


def search(
    request: PlanRequest,
    top: int = 5,
    limit_s: float = inf,
    evaluator: PlanEvaluator | None = None,
    ceiling: float = inf,
    seeds: Sequence[Plan] = (),
    exact: int | None = None,
) -> SearchResult:
    """The `top` best plans for a request; those above `ceiling` need not be found. `seeds` are simulated first.

    A plan is only left out when its bound is above simulated ones, or when it doesn't fit in memory; so the first
    `exact` (all, if not said) are those of simulating them all, the others the next of those that were simulated. After
    `limit_s` the search stops with what it has: `gap` says what may be missed. Where no plan is found that leaves the
    judge's head-room, that is given up, and the search begins again.
    """
    evaluator = evaluator or PlanEvaluator(request)
    found = _search(request, evaluator, (top, exact or top), seeds, limit_s, ceiling)
    if not found.best and evaluator.memory_budget.head_room and ceiling == inf:
        evaluator.memory_budget.head_room, first = 0.0, found
        left_s = max(limit_s - found.seconds, limit_s / 2)
        found = _search(request, evaluator, (top, exact or top), seeds, left_s, ceiling)
        found.cut, found.seconds = not first.proven, first.seconds + found.seconds
        found.seen = total_counts(found, [first, found])
    return found


def evaluate_seeds(
    request: PlanRequest, evaluator: PlanEvaluator, top: int, limit_s: float, seeds: Sequence[Plan], add_likely: bool
) -> SearchResult:
    """The best of `seeds`, and if wanted of what is `likely` to be good where nodes or links differ."""
    begin_s = perf_counter()
    with gc_paused():
        run = Frontier(request, evaluator, top, top, inf)
        run.seed(seeds, add_likely, begin_s + limit_s)
    return SearchResult(run.best, 0.0, run.nearest_miss[1], run.counts, perf_counter() - begin_s)


def _search(
    request: PlanRequest,
    evaluator: PlanEvaluator,
    tops: tuple[int, int],
    seeds: Sequence[Plan],
    limit_s: float,
    ceiling: float,
) -> SearchResult:
    """Of the best plans, `tops` are how many are wanted, and how many of these exactly."""
    begin_s = perf_counter()
    with gc_paused():
        run = Frontier(request, evaluator, *tops, ceiling)
        run.seed(seeds, not seeds and is_heterogeneous(request.cluster), begin_s + limit_s / 4)
        run.expand(begin_s + max(limit_s, MIN_EXPAND_S))
        now_s = perf_counter()
        run.probe(now_s + PROBE_TIME_SHARE * (begin_s + limit_s - now_s))
        run.best_first(begin_s + LOCAL_SEARCH_BEGINS * limit_s)
        if not run.is_settled():
            run.local_search(begin_s + LOCAL_SEARCH_ENDS * limit_s)
        run.best_first(begin_s + limit_s)
        if run.unexpanded and not run.best and ceiling == inf:  # the shapes that there was no time for may have a plan
            run.expand(inf)
            run.probe(perf_counter())
    open_bound = 0.0 if run.unexpanded else run.heap[0][0] if run.heap else inf
    return SearchResult(run.best, open_bound, run.nearest_miss[1], run.counts, perf_counter() - begin_s)


def exhaustive_search(request: PlanRequest, evaluator: PlanEvaluator) -> Iterator[EvaluatedPlan]:
    """Every plan of the space that fits in what the judge allows, simulated, without any bound: what `search` must
    agree with."""
    for shape in mesh_shapes(request):
        for order in schedule_choices(request, shape):
            for draft in draft_plans(request, order):
                plan = complete_draft(evaluator, draft, order)
                if plan is None:
                    continue
                yield from map(evaluator.evaluate, evaluator.memory_budget.fit(plan)[0])


def _evenly_spread(rows: list[Row]) -> list[Row]:
    """In an order in which the last ones lie evenly among all, however many are taken: steps of the golden section."""
    number = len(rows)
    step = next((each for each in range(round(0.618 * number), number) if gcd(each, number) == 1), 1)
    return [rows[index * step % number] for index in range(number)]


class Frontier:
    """The state of a search: a heap of nodes by the least value that a plan under each may have."""

    def __init__(self, request: PlanRequest, evaluator: PlanEvaluator, top: int, exact: int, ceiling: float) -> None:
        self.request, self.evaluator, self.ceiling = request, evaluator, ceiling
        self.top, self.exact = top, exact
        """How many of the best plans are wanted, and how many of these exactly."""
        self.best: list[EvaluatedPlan] = []
        self.nearest_miss: tuple[float, Plan | None] = (inf, None)
        self.counts: Counter[str] = Counter()
        self.numbers = count()
        self.heap: list[tuple[float, int, Node]] = []
        self.bound_ratios: dict[str, float] = {}
        """Schedule → what the last plan that was simulated at once took over its bound."""
        self.unexpanded: list[tuple[int, MeshShape]] = []
        """Shapes of which no order is on the heap yet, once `fill` began, and their numbers."""
        self.simulated: set[Plan] = set()
        """Those that were simulated."""
        self.predrafted: set[Plan] = set()
        """Those that were looked at before their order was opened."""

    def expand(self, end_s: float) -> None:
        """Puts the orders of all shapes on the heap; after `end_s` only those of the shapes that were looked at."""
        request, judge = self.request, self.evaluator
        if not self.counts["shapes"]:
            self.unexpanded = _evenly_spread(list(enumerate(mesh_shapes(request))))
        found: list[tuple[int, float, ScheduleChoice]] = []
        while self.unexpanded and not (found and perf_counter() > end_s):
            index, shape = self.unexpanded.pop()
            self.counts["shapes"] += 1
            splits = data_shardings(request, shape)
            fitting = [split for split in splits if judge.memory_budget.may_fit(shape, split)]
            if not fitting:
                self.counts["too_large"] += len(splits)
                continue
            travel = min(judge.comm_bound(shape, split) for split in fitting)
            found += (
                (index, max(travel, judge.choice_bound(order)), order) for order in schedule_choices(request, shape)
            )
        for _, bound, order in sorted(found, key=itemgetter(0)):
            self._push("orders", bound, order)

    def seed(self, seeds: Sequence[Plan], add_likely: bool, end_s: float) -> None:
        """Simulates `seeds` and, until `end_s`, what is likely to be good where nodes or links differ."""
        for plan in seeds:
            self._try_seed(self.evaluator.bound(plan), plan)
        for bound, plan in seed_plans(self.request, self.evaluator) if add_likely else ():
            if self.counts["simulated"] >= MIN_SEEDS and perf_counter() > end_s:
                break
            self._try_seed(bound, plan)

    def _try_seed(self, bound: float, plan: Plan) -> None:
        self.counts["plans"] += 1
        self._note_predrafted([plan])
        for fitting in [] if self._is_pruned(bound) else self._fitting(plan):
            self._simulate(fitting)

    def _note_predrafted(self, plans: Sequence[Plan]) -> None:
        self.counts["drafts"] += len(set(plans) - self.predrafted)
        self.predrafted.update(plans)

    def probe(self, end_s: float) -> None:
        """Simulates some of what people would try first, so that bounds have a time to be cut against: the smallest
        micro-batches, no context parallelism, for each depth of the pipeline, and the widest tensor parallelism, or
        with experts the narrowest. Searches no longer than to `end_s`."""
        if self.request.model.moe is not None:
            self._probe_narrow(end_s)
        if not self.best:
            self._probe_wide()

    def _probe_narrow(self, end_s: float) -> None:
        """Searches first among orders with the narrowest degrees of tensor parallelism, and room for parameters that
        are gathered once a step: the one that may be best for each depth of the pipeline and schedule."""
        orders = [node for _, _, node in self.heap if isinstance(node, ScheduleChoice)]
        narrow = sorted({order.shape.tp for order in orders})[:NARROWEST_TP_DEGREES]
        least = min(((order.shape.cp, order.shape.micro_batch_size) for order in orders), default=())
        first: dict[tuple, tuple[float, int, Node]] = {}
        others: list[tuple[float, int, Node]] = []
        for row in self.heap:
            bound, number, order = row
            others.append(row)
            if not isinstance(order, ScheduleChoice) or order.shape.tp not in narrow:
                continue
            shape = order.shape
            if (shape.cp, shape.micro_batch_size) == least and self.evaluator.memory_budget.may_fit(
                shape, (1, shape.data, "z1"), order
            ):
                self.counts["opened"] += 1
                others[-1] = max(bound, self.evaluator.unsharded_bound(order)), number, ExpandedChoice(order)
                key = shape.tp, shape.pp, order.schedule, order.balances_layers
                first[key] = min(first.get(key, others[-1]), others[-1])
        self.heap = sorted(first.values())
        numbers = {number for _, number, _ in self.heap}
        others = [row for row in others if row[1] not in numbers]
        while self.heap and not self.best and perf_counter() < end_s:
            self.step()
        self.heap += others
        heapq.heapify(self.heap)

    def _probe_wide(self) -> None:
        """Simulates plans with the widest tensor parallelism."""
        rows = self._plain_choices()
        least = min(((-order.shape.tp, order.shape.cp, order.shape.micro_batch_size) for _, order in rows), default=())
        wide = [
            (bound, order)
            for bound, order in rows
            if (-order.shape.tp, order.shape.cp, order.shape.micro_batch_size) == least
        ]
        self._simulate_likeliest(wide, lambda shape: shape.pp, MAX_PROBED_DEPTHS, 1, inf)

    def _plain_choices(self) -> list[tuple[float, ScheduleChoice]]:
        """Of those on the heap that nothing was made of yet, the ones with layers evenly on stages and whole
        backwards, and their bounds."""
        return [
            (bound, node)
            for bound, _, node in self.heap
            if isinstance(node, ScheduleChoice)
            and not node.balances_layers
            and not node.uneven_batch
            and not SCHEDULES[node.schedule].split_backward
        ]

    def _simulate_likeliest(
        self,
        rows: Iterable[tuple[float, ScheduleChoice]],
        group_by: Callable[[MeshShape], Hashable],
        max_groups: int,
        num_simulated: int,
        end_s: float,
    ) -> None:
        """Simulates the best of what the likeliest orders of each kind of shape lead to: so many `simulated` of `most`
        kinds, until `end_s`."""
        likely: dict[Hashable, tuple[float, ScheduleChoice]] = {}
        for bound, order in rows:
            own = group_by(order.shape)
            bound = max(bound, self.evaluator.unsharded_bound(order))
            likely[own] = min(likely.get(own, (inf, order)), (bound, order), key=itemgetter(0))
        tried: list[list[tuple[float, int, Plan]]] = []
        for _, order in likely.values():
            fit = list(
                draft_plans(
                    self.request, order, partial(self.evaluator.memory_budget.may_fit, order.shape, choice=order)
                )
            )
            self._note_predrafted(fit)
            tried.append(sorted((self.evaluator.bound(plan), next(self.numbers), plan) for plan in fit)[:FIT_ATTEMPTS])
        ready: list[tuple[float, int, FittingPlan]] = []
        for several in sorted(filter(None, tried))[:max_groups]:
            if perf_counter() > end_s or (
                len(ready) >= num_simulated and several[0][0] > max(sorted(ready)[:num_simulated])[0]
            ):
                break
            for fitting in next(filter(None, (self._fitting(plan) for _, _, plan in several)), ()):
                ready.append((self.evaluator.bound(fitting), next(self.numbers), FittingPlan(fitting)))
        for bound, _, node in sorted(ready)[:num_simulated]:
            if not self._is_pruned(bound):
                self._simulate(node.plan)

    def is_settled(self) -> bool:
        """Whether nothing that is left can be among the first that are wanted exactly."""
        return not self.heap or self._is_above(self.heap[0][0], self.exact)

    def best_first(self, end_s: float) -> None:
        """Goes through the heap until the search is settled and knows as many plans as are wanted, or it is `end_s`."""
        while self.heap and not self._is_pruned(self.heap[0][0]) and perf_counter() < end_s:
            self.step()

    def local_search(self, end_s: float) -> None:
        """Simulates until `end_s` the likeliest plan of each shape that was not looked at, then what one change makes
        of the best, and of the better one that it may find. In a search that has no time for its proof this finds good
        plans sooner than their bounds do."""
        self._simulate_likeliest(
            self._plain_choices(),
            lambda shape: (shape.tp, shape.pp, shape.cp, shape.micro_batch_size),
            MAX_LOCAL_SEARCH_SHAPES,
            LOCAL_SEARCH_SIMULATED,
            end_s,
        )
        begun: Plan | None = None
        while self.best and self.best[0].plan != begun:
            begun = self.best[0].plan
            for plan in neighbour_plans(begun, self.evaluator):
                if self.evaluator.bound(plan) < self.best[0].value:
                    self._simulate(plan)
                if self.best[0].plan != begun or perf_counter() > end_s:
                    break
            if perf_counter() > end_s:
                return

    def step(self) -> None:
        """Takes the node that may be best apart, or simulates it."""
        bound, _, node = heapq.heappop(self.heap)
        if isinstance(node, ScheduleChoice):
            splits = data_shardings(self.request, node.shape)
            if not any(self.evaluator.memory_budget.may_fit(node.shape, split, node) for split in splits):
                self.counts["too_large"] += len(splits)
                return
            self._push("opened", max(bound, self.evaluator.unsharded_bound(node)), ExpandedChoice(node))
        elif isinstance(node, ExpandedChoice):
            for draft in draft_plans(self.request, node.choice, partial(self._is_wanted, node.choice)):
                self.counts["drafts"] += draft not in self.predrafted
                plan = complete_draft(self.evaluator, draft, node.choice)
                if plan is not None:
                    self._push("plans", max(bound, self.evaluator.bound(plan)), plan)
        elif isinstance(node, Plan):
            self._fit_or_defer(node, bound)
        elif isinstance(node, OverMemoryPlan):
            self._queue_or_simulate(node.plan, bound, self._fitting(node.plan))
        else:
            self._simulate(node.plan)

    def _is_wanted(self, order: ScheduleChoice, split: DataSharding) -> bool:
        """Whether plans that share parameters and gradients so may fit, and be among the best."""
        fits = self.evaluator.memory_budget.may_fit(order.shape, split, order)
        wanted = fits and not self._is_pruned(self.evaluator.comm_bound(order.shape, split))
        self.counts["drafts"] += not wanted
        self.counts["too_large"] += not fits
        return wanted

    def _simulate(self, plan: Plan) -> None:
        if plan not in self.simulated:
            self._value(plan)

    def _value(self, plan: Plan) -> float:
        """Of a plan that was not simulated yet."""
        self.simulated.add(plan)
        self.counts["simulated"] += 1
        verdict = self.evaluator.evaluate(plan)
        self.best = sorted([*self.best, verdict], key=lambda one: one.sort_key)[: self.top]
        return verdict.value

    def _fit_or_defer(self, plan: Plan, bound: float) -> None:
        """What doesn't fit is given recompute or offload: at once where what that takes at least doesn't put off the
        plan, and else when nothing else may be better."""
        room = self.evaluator.memory_budget
        begun, over = room.start_fit(plan)
        if isinstance(begun, PendingFit):
            bound = max(bound, self.evaluator.bound_with_added(plan, begun.added_s))
            if self.heap and bound > self.heap[0][0] and not self._is_promising(plan, bound):
                self._push("lacking", bound, OverMemoryPlan(plan))
                return
            begun = room.finish_fit(begun)
        self._note_nearest_miss(plan, begun, over)
        self._queue_or_simulate(plan, bound, begun)

    def _is_promising(self, plan: Plan, bound: float) -> bool:
        """Whether a plan with this bound promises to be far better than the best so far."""
        hope = bound * max(PROMISING_FACTOR, self.bound_ratios.get(plan.schedule, 0.0))
        return bound > 0 and bool(self.best) and hope < self.best[0].value

    def _queue_or_simulate(self, plan: Plan, bound: float, found: list[Plan]) -> None:
        """What fits, of `plan`, is simulated when nothing else may be better, or at once where it is hopeful."""
        for fitting in found:
            own = bound if fitting is plan else max(bound, self.evaluator.bound(fitting))
            if self._is_promising(plan, own) and fitting not in self.simulated:
                self.counts["fit"] += 1
                value = self._value(fitting)
                self.bound_ratios[plan.schedule] = value / own
            else:
                self._push("fit", own, FittingPlan(fitting))

    def _fitting(self, plan: Plan) -> list[Plan]:
        """The plan itself where it fits, else with what makes it."""
        fitting, over = self.evaluator.memory_budget.fit(plan)
        self._note_nearest_miss(plan, fitting, over)
        return fitting

    def _note_nearest_miss(self, plan: Plan, fitting: list[Plan], over: float) -> None:
        if not fitting and over < self.nearest_miss[0]:
            self.nearest_miss = over, plan

    def _push(self, kind: str, bound: float, node: Node) -> None:
        self.counts[kind] += 1
        if not self._is_pruned(bound):
            heapq.heappush(self.heap, (bound, next(self.numbers), node))

    def _is_pruned(self, bound: float) -> bool:
        """Whether nothing with this bound is wanted: as many plans are known as are asked for, and it can't be among
        the first that are wanted exactly."""
        return self._is_above(bound, self.top)

    def _is_above(self, bound: float, required: int) -> bool:
        """The same, where so many plans have to be known."""
        last = self.best[self.exact - 1].value if len(self.best) >= required else inf
        return bound > min(last, self.ceiling) * (1 + ROUNDING_TOLERANCE)
