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

from muster.planner.found import ROUNDING, Found, all_seen
from muster.planner.judge import Judge
from muster.planner.likely import likely_plans, placed
from muster.planner.neighbours import changed_plans
from muster.planner.placement import is_unequal
from muster.planner.request import Request
from muster.planner.room import Begun
from muster.planner.space import Order, Shape, Split, data_splits, orders, plans, shapes
from muster.planner.verdict import Verdict
from muster.schedule.collector import collector_paused
from muster.spec.plan import Plan
from muster.spec.schedules import SCHEDULES

DIVES = 6
"""Depths of the pipeline that are tried before the search begins."""

DIVE_SHARE = 0.75
"""Of the time that is left then, what that may take."""

NARROWEST = 2
"""Degrees of tensor parallelism of which that is done for models with experts."""

LEAST_FILL_S = 4.0
"""For bounds of all orders, however little time there is: what is tried first is chosen among them."""

LEAST_TRIES = 4
"""Plans that are simulated first however little time there is."""

TRIES = 3
"""Plans that are tried for each of these, until one fits."""

HOPEFUL = 1.1
"""A plan that fits is simulated at once where so many times its bound, or what the last one of its schedule took over
its own, is less than the best time: the sooner a good time is known, the more can be cut."""

CLIMB_AT, CLIMBED_AT = 0.5, 0.75
"""Of the time: when a search that isn't settled looks at likely plans and at what single changes make of the best, and
until when."""

MOST_KINDS, CLIMBED = 100, 5
"""Of the shapes then, how many: room for each is looked for, which takes a few hundredths of a second. And how many of
their plans are simulated."""


@dataclass(frozen=True, slots=True)
class Opened:
    """An order whose stages' times were looked at."""

    order: Order


@dataclass(frozen=True, slots=True)
class Ready:
    """A plan that fits in memory."""

    plan: Plan


@dataclass(frozen=True, slots=True)
class Lacking:
    """A plan that doesn't fit before more is done, whose bound counts what that takes at least."""

    plan: Plan


Row = TypeVar("Row")
Node = Order | Opened | Plan | Lacking | Ready


def search(
    request: Request,
    top: int = 5,
    limit_s: float = inf,
    judge: Judge | None = None,
    ceiling: float = inf,
    seeds: Sequence[Plan] = (),
    exact: int | None = None,
) -> Found:
    """The `top` best plans for a request; those above `ceiling` need not be found. `seeds` are simulated first.

    A plan is only left out when its bound is above simulated ones, or when it doesn't fit in memory; so the first
    `exact` (all, if not said) are those of simulating them all, the others the next of those that were simulated. After
    `limit_s` the search stops with what it has: `gap` says what may be missed. Where no plan is found that leaves the
    judge's head-room, that is given up, and the search begins again.
    """
    judge = judge or Judge(request)
    found = _search(request, judge, (top, exact or top), seeds, limit_s, ceiling)
    if not found.best and judge.room.head_room and ceiling == inf:
        judge.room.head_room, first = 0.0, found
        left_s = max(limit_s - found.seconds, limit_s / 2)
        found = _search(request, judge, (top, exact or top), seeds, left_s, ceiling)
        found.cut, found.seconds = not first.proven, first.seconds + found.seconds
        found.seen = all_seen(found, [first, found])
    return found


def first_look(request: Request, judge: Judge, top: int, limit_s: float, seeds: Sequence[Plan], likely: bool) -> Found:
    """The best of `seeds`, and if wanted of what is `likely` to be good where nodes or links differ."""
    begin_s = perf_counter()
    with collector_paused():
        run = _Run(request, judge, top, top, inf)
        run.guess(seeds, likely, begin_s + limit_s)
    return Found(run.best, 0.0, run.closest[1], run.seen, perf_counter() - begin_s)


def _search(
    request: Request, judge: Judge, tops: tuple[int, int], seeds: Sequence[Plan], limit_s: float, ceiling: float
) -> Found:
    """Of the best plans, `tops` are how many are wanted, and how many of these exactly."""
    begin_s = perf_counter()
    with collector_paused():
        run = _Run(request, judge, *tops, ceiling)
        run.guess(seeds, not seeds and is_unequal(request.cluster), begin_s + limit_s / 4)
        run.fill(begin_s + max(limit_s, LEAST_FILL_S))
        now_s = perf_counter()
        run.dive(now_s + DIVE_SHARE * (begin_s + limit_s - now_s))
        run.walk(begin_s + CLIMB_AT * limit_s)
        if not run.is_settled():
            run.climb(begin_s + CLIMBED_AT * limit_s)
        run.walk(begin_s + limit_s)
        if run.unseen and not run.best and ceiling == inf:  # the shapes that there was no time for may have a plan
            run.fill(inf)
            run.dive(perf_counter())
    open_bound = 0.0 if run.unseen else run.heap[0][0] if run.heap else inf
    return Found(run.best, open_bound, run.closest[1], run.seen, perf_counter() - begin_s)


def everything(request: Request, judge: Judge) -> Iterator[Verdict]:
    """Every plan of the space that fits in what the judge allows, simulated, without any bound: what `search` must
    agree with."""
    for shape in shapes(request):
        for order in orders(request, shape):
            for draft in plans(request, order):
                plan = placed(judge, draft, order)
                if plan is None:
                    continue
                yield from map(judge.verdict, judge.room.made_to_fit(plan)[0])


def _spread(rows: list[Row]) -> list[Row]:
    """In an order in which the last ones lie evenly among all, however many are taken: steps of the golden section."""
    number = len(rows)
    step = next((each for each in range(round(0.618 * number), number) if gcd(each, number) == 1), 1)
    return [rows[index * step % number] for index in range(number)]


class _Run:
    """The state of a search: a heap of nodes by the least value that a plan under each may have."""

    def __init__(self, request: Request, judge: Judge, top: int, exact: int, ceiling: float) -> None:
        self.request, self.judge, self.ceiling = request, judge, ceiling
        self.top, self.exact = top, exact
        """How many of the best plans are wanted, and how many of these exactly."""
        self.best: list[Verdict] = []
        self.closest: tuple[float, Plan | None] = (inf, None)
        self.seen: Counter[str] = Counter()
        self.numbers = count()
        self.heap: list[tuple[float, int, Node]] = []
        self.loose: dict[str, float] = {}
        """Schedule → what the last plan that was simulated at once took over its bound."""
        self.unseen: list[tuple[int, Shape]] = []
        """Shapes of which no order is on the heap yet, once `fill` began, and their numbers."""
        self.known: set[Plan] = set()
        """Those that were simulated."""
        self.early: set[Plan] = set()
        """Those that were looked at before their order was opened."""

    def fill(self, end_s: float) -> None:
        """Puts the orders of all shapes on the heap; after `end_s` only those of the shapes that were looked at."""
        request, judge = self.request, self.judge
        if not self.seen["shapes"]:
            self.unseen = _spread(list(enumerate(shapes(request))))
        found: list[tuple[int, float, Order]] = []
        while self.unseen and not (found and perf_counter() > end_s):
            index, shape = self.unseen.pop()
            self.seen["shapes"] += 1
            splits = data_splits(request, shape)
            fitting = [split for split in splits if judge.room.may_fit(shape, split)]
            if not fitting:
                self.seen["too_large"] += len(splits)
                continue
            travel = min(judge.travel_bound(shape, split) for split in fitting)
            found += ((index, max(travel, judge.order_bound(order)), order) for order in orders(request, shape))
        for _, bound, order in sorted(found, key=itemgetter(0)):
            self._push("orders", bound, order)

    def guess(self, seeds: Sequence[Plan], likely: bool, end_s: float) -> None:
        """Simulates `seeds` and, until `end_s`, what is likely to be good where nodes or links differ."""
        for plan in seeds:
            self._try(self.judge.bound(plan), plan)
        for bound, plan in likely_plans(self.request, self.judge) if likely else ():
            if self.seen["simulated"] >= LEAST_TRIES and perf_counter() > end_s:
                break
            self._try(bound, plan)

    def _try(self, bound: float, plan: Plan) -> None:
        self.seen["plans"] += 1
        self._note_early([plan])
        for fitting in [] if self._beaten(bound) else self._fitting(plan):
            self._simulate(fitting)

    def _note_early(self, plans: Sequence[Plan]) -> None:
        self.seen["drafts"] += len(set(plans) - self.early)
        self.early.update(plans)

    def dive(self, end_s: float) -> None:
        """Simulates some of what people would try first, so that bounds have a time to be cut against: the smallest
        micro-batches, no context parallelism, for each depth of the pipeline, and the widest tensor parallelism, or
        with experts the narrowest. Searches no longer than to `end_s`."""
        if self.request.model.moe is not None:
            self._search_narrow(end_s)
        if not self.best:
            self._try_wide()

    def _search_narrow(self, end_s: float) -> None:
        """Searches first among orders with the narrowest degrees of tensor parallelism, and room for parameters that
        are gathered once a step: the one that may be best for each depth of the pipeline and schedule."""
        orders = [node for _, _, node in self.heap if isinstance(node, Order)]
        narrow = sorted({order.shape.tp for order in orders})[:NARROWEST]
        least = min(((order.shape.cp, order.shape.micro_batch_size) for order in orders), default=())
        first: dict[tuple, tuple[float, int, Node]] = {}
        others: list[tuple[float, int, Node]] = []
        for row in self.heap:
            bound, number, order = row
            others.append(row)
            if not isinstance(order, Order) or order.shape.tp not in narrow:
                continue
            shape = order.shape
            if (shape.cp, shape.micro_batch_size) == least and self.judge.room.may_fit(
                shape, (1, shape.data, "z1"), order
            ):
                self.seen["opened"] += 1
                others[-1] = max(bound, self.judge.unsharded_bound(order)), number, Opened(order)
                key = shape.tp, shape.pp, order.schedule, order.balanced
                first[key] = min(first.get(key, others[-1]), others[-1])
        self.heap = sorted(first.values())
        numbers = {number for _, number, _ in self.heap}
        others = [row for row in others if row[1] not in numbers]
        while self.heap and not self.best and perf_counter() < end_s:
            self.step()
        self.heap += others
        heapq.heapify(self.heap)

    def _try_wide(self) -> None:
        """Simulates plans with the widest tensor parallelism."""
        rows = self._usual_orders()
        least = min(((-order.shape.tp, order.shape.cp, order.shape.micro_batch_size) for _, order in rows), default=())
        wide = [
            (bound, order)
            for bound, order in rows
            if (-order.shape.tp, order.shape.cp, order.shape.micro_batch_size) == least
        ]
        self._try_each(wide, lambda shape: shape.pp, DIVES, 1, inf)

    def _usual_orders(self) -> list[tuple[float, Order]]:
        """Of those on the heap that nothing was made of yet, the ones with layers evenly on stages and whole
        backwards, and their bounds."""
        return [
            (bound, node)
            for bound, _, node in self.heap
            if isinstance(node, Order) and not node.balanced and not node.shares and not SCHEDULES[node.schedule].splits
        ]

    def _try_each(
        self,
        rows: Iterable[tuple[float, Order]],
        kind: Callable[[Shape], Hashable],
        most: int,
        simulated: int,
        end_s: float,
    ) -> None:
        """Simulates the best of what the likeliest orders of each kind of shape lead to: so many `simulated` of `most`
        kinds, until `end_s`."""
        likely: dict[Hashable, tuple[float, Order]] = {}
        for bound, order in rows:
            own = kind(order.shape)
            bound = max(bound, self.judge.unsharded_bound(order))
            likely[own] = min(likely.get(own, (inf, order)), (bound, order), key=itemgetter(0))
        tried: list[list[tuple[float, int, Plan]]] = []
        for _, order in likely.values():
            fit = list(plans(self.request, order, partial(self.judge.room.may_fit, order.shape, order=order)))
            self._note_early(fit)
            tried.append(sorted((self.judge.bound(plan), next(self.numbers), plan) for plan in fit)[:TRIES])
        ready: list[tuple[float, int, Ready]] = []
        for several in sorted(filter(None, tried))[:most]:
            if perf_counter() > end_s or (
                len(ready) >= simulated and several[0][0] > max(sorted(ready)[:simulated])[0]
            ):
                break
            for fitting in next(filter(None, (self._fitting(plan) for _, _, plan in several)), ()):
                ready.append((self.judge.bound(fitting), next(self.numbers), Ready(fitting)))
        for bound, _, node in sorted(ready)[:simulated]:
            if not self._beaten(bound):
                self._simulate(node.plan)

    def is_settled(self) -> bool:
        """Whether nothing that is left can be among the first that are wanted exactly."""
        return not self.heap or self._is_above(self.heap[0][0], self.exact)

    def walk(self, end_s: float) -> None:
        """Goes through the heap until the search is settled and knows as many plans as are wanted, or it is `end_s`."""
        while self.heap and not self._beaten(self.heap[0][0]) and perf_counter() < end_s:
            self.step()

    def climb(self, end_s: float) -> None:
        """Simulates until `end_s` the likeliest plan of each shape that was not looked at, then what one change makes
        of the best, and of the better one that it may find. In a search that has no time for its proof this finds good
        plans sooner than their bounds do."""
        self._try_each(
            self._usual_orders(),
            lambda shape: (shape.tp, shape.pp, shape.cp, shape.micro_batch_size),
            MOST_KINDS,
            CLIMBED,
            end_s,
        )
        begun: Plan | None = None
        while self.best and self.best[0].plan != begun:
            begun = self.best[0].plan
            for plan in changed_plans(begun, self.judge):
                if self.judge.bound(plan) < self.best[0].value:
                    self._simulate(plan)
                if self.best[0].plan != begun or perf_counter() > end_s:
                    break
            if perf_counter() > end_s:
                return

    def step(self) -> None:
        """Takes the node that may be best apart, or simulates it."""
        bound, _, node = heapq.heappop(self.heap)
        if isinstance(node, Order):
            splits = data_splits(self.request, node.shape)
            if not any(self.judge.room.may_fit(node.shape, split, node) for split in splits):
                self.seen["too_large"] += len(splits)
                return
            self._push("opened", max(bound, self.judge.unsharded_bound(node)), Opened(node))
        elif isinstance(node, Opened):
            for draft in plans(self.request, node.order, partial(self._is_wanted, node.order)):
                self.seen["drafts"] += draft not in self.early
                plan = placed(self.judge, draft, node.order)
                if plan is not None:
                    self._push("plans", max(bound, self.judge.bound(plan)), plan)
        elif isinstance(node, Plan):
            self._fit(node, bound)
        elif isinstance(node, Lacking):
            self._weigh(node.plan, bound, self._fitting(node.plan))
        else:
            self._simulate(node.plan)

    def _is_wanted(self, order: Order, split: Split) -> bool:
        """Whether plans that share parameters and gradients so may fit, and be among the best."""
        fits = self.judge.room.may_fit(order.shape, split, order)
        wanted = fits and not self._beaten(self.judge.travel_bound(order.shape, split))
        self.seen["drafts"] += not wanted
        self.seen["too_large"] += not fits
        return wanted

    def _simulate(self, plan: Plan) -> None:
        if plan not in self.known:
            self._value(plan)

    def _value(self, plan: Plan) -> float:
        """Of a plan that was not simulated yet."""
        self.known.add(plan)
        self.seen["simulated"] += 1
        verdict = self.judge.verdict(plan)
        self.best = sorted([*self.best, verdict], key=lambda one: one.order)[: self.top]
        return verdict.value

    def _fit(self, plan: Plan, bound: float) -> None:
        """What doesn't fit is given recompute or offload: at once where what that takes at least doesn't put off the
        plan, and else when nothing else may be better."""
        room = self.judge.room
        begun, over = room.begun(plan)
        if isinstance(begun, Begun):
            bound = max(bound, self.judge.bound_with(plan, begun.added_s))
            if self.heap and bound > self.heap[0][0] and not self._is_hopeful(plan, bound):
                self._push("lacking", bound, Lacking(plan))
                return
            begun = room.finished(begun)
        self._note(plan, begun, over)
        self._weigh(plan, bound, begun)

    def _is_hopeful(self, plan: Plan, bound: float) -> bool:
        """Whether a plan with this bound promises to be far better than the best so far."""
        hope = bound * max(HOPEFUL, self.loose.get(plan.schedule, 0.0))
        return bound > 0 and bool(self.best) and hope < self.best[0].value

    def _weigh(self, plan: Plan, bound: float, found: list[Plan]) -> None:
        """What fits, of `plan`, is simulated when nothing else may be better, or at once where it is hopeful."""
        for fitting in found:
            own = bound if fitting is plan else max(bound, self.judge.bound(fitting))
            if self._is_hopeful(plan, own) and fitting not in self.known:
                self.seen["fit"] += 1
                value = self._value(fitting)
                self.loose[plan.schedule] = value / own
            else:
                self._push("fit", own, Ready(fitting))

    def _fitting(self, plan: Plan) -> list[Plan]:
        """The plan itself where it fits, else with what makes it."""
        fitting, over = self.judge.room.made_to_fit(plan)
        self._note(plan, fitting, over)
        return fitting

    def _note(self, plan: Plan, fitting: list[Plan], over: float) -> None:
        if not fitting and over < self.closest[0]:
            self.closest = over, plan

    def _push(self, kind: str, bound: float, node: Node) -> None:
        self.seen[kind] += 1
        if not self._beaten(bound):
            heapq.heappush(self.heap, (bound, next(self.numbers), node))

    def _beaten(self, bound: float) -> bool:
        """Whether nothing with this bound is wanted: as many plans are known as are asked for, and it can't be among
        the first that are wanted exactly."""
        return self._is_above(bound, self.top)

    def _is_above(self, bound: float, known: int) -> bool:
        """The same, where so many plans have to be known."""
        last = self.best[self.exact - 1].value if len(self.best) >= known else inf
        return bound > min(last, self.ceiling) * (1 + ROUNDING)
