"""Branch and bound over plans: what might be best is looked at first, and only simulated times are believed."""

import heapq
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from math import inf
from time import perf_counter

from muster.planner.judge import Judge
from muster.planner.placement import is_unequal
from muster.planner.request import Request
from muster.planner.space import Order, Split, data_splits, orders, plans, shapes
from muster.planner.verdict import Verdict
from muster.schedule.collector import collector_paused
from muster.spec.plan import Plan
from muster.spec.schedules import SCHEDULES

DIVES = 6
"""Depths of the pipeline that are tried before the search begins."""

GUESSES = 24
"""Plans that are simulated first where nodes or links differ."""

TRIES = 3
"""Plans that are tried for each of these, until one fits."""

ROUNDING = 1e-9
"""A bound that is above a time by no more may be one of the same length, added up in another order."""


@dataclass(frozen=True, slots=True)
class Opened:
    """An order whose stages' times were looked at."""

    order: Order


@dataclass(frozen=True, slots=True)
class Ready:
    """A plan that fits in memory."""

    plan: Plan


Node = Order | Opened | Plan | Ready


@dataclass(slots=True)
class Found:
    """What a search came to."""

    best: list[Verdict]
    """The best plans that fit, best first; equal ones by short name."""
    open_bound: float
    """The least value that a plan not yet looked at may have; infinite where none is left."""
    closest: Plan | None
    """Of the plans that can't be made to fit, the one that is over by the least."""
    seen: Counter[str] = field(default_factory=Counter)
    """shapes, orders, opened, drafts, too_large, plans, fit, simulated: how many were looked at."""
    seconds: float = 0.0
    cut: bool = False
    """Whether head-room was given up before all plans that might leave it were looked at."""

    @property
    def proven(self) -> bool:
        """Whether nothing that was not simulated can be better than the best."""
        return not self.cut and self._is_settled

    @property
    def _is_settled(self) -> bool:
        return self.open_bound == inf or (bool(self.best) and self.open_bound > self.best[0].value * (1 - ROUNDING))

    @property
    def gap(self) -> float:
        """The part by which the best may at most be improved."""
        return 0.0 if self._is_settled or not self.best else 1 - self.open_bound / self.best[0].value


def search(
    request: Request, top: int = 5, limit_s: float = inf, judge: Judge | None = None, ceiling: float = inf
) -> Found:
    """The `top` best plans for a request; those above `ceiling` need not be found.

    A plan is only left out when its bound is above `top` simulated ones, or when it doesn't fit in memory; so the
    answer is that of simulating them all. After `limit_s` the search stops with what it has: `gap` says what may be
    missed. Where no plan is found that leaves the judge's head-room, that is given up, and the search begins again.
    """
    judge = judge or Judge(request)
    found = _search(request, judge, top, limit_s, ceiling)
    if not found.best and judge.room.head_room and ceiling == inf:
        judge.room.head_room, first = 0.0, found
        found = _search(request, judge, top, max(limit_s - found.seconds, limit_s / 2), ceiling)
        found.cut = not first.proven
    return found


def _search(request: Request, judge: Judge, top: int, limit_s: float, ceiling: float) -> Found:
    begin_s = perf_counter()
    with collector_paused():
        run = _run(request, judge, top, begin_s + limit_s, ceiling)
    open_bound = run.heap[0][0] if run.heap else inf
    return Found(run.best, open_bound, run.closest[1], run.seen, perf_counter() - begin_s)


def _run(request: Request, judge: Judge, top: int, end_s: float, ceiling: float) -> "_Run":
    run = _Run(request, judge, top, ceiling)
    if is_unequal(request.cluster):
        run.guess()
    run.dive()
    while run.heap and not run.is_settled() and perf_counter() < end_s:
        run.step()
    return run


def everything(request: Request, judge: Judge) -> Iterator[Verdict]:
    """Every plan of the space that fits in what the judge allows, simulated, without any bound: what `search` must
    agree with."""
    for shape in shapes(request):
        for order in orders(request, shape):
            for draft in plans(request, order):
                plan = placed(judge, draft, order)
                if plan is None:
                    continue
                fitting, _ = judge.room.made_to_fit(plan)
                if fitting is not None:
                    yield judge.verdict(fitting)


def placed(judge: Judge, plan: Plan, order: Order) -> Plan | None:
    """The plan with its layers and shares as the order wants them; None where they are so already."""
    placed = judge.moved(plan) if order.balanced else plan
    return judge.shares.given(placed) if order.shares and placed is not None else placed


class _Run:
    """The state of a search: a heap of nodes by the least value that a plan under each may have."""

    def __init__(self, request: Request, judge: Judge, top: int, ceiling: float) -> None:
        self.request, self.judge, self.top, self.ceiling = request, judge, top, ceiling
        self.best: list[Verdict] = []
        self.closest: tuple[float, Plan | None] = (inf, None)
        self.seen: Counter[str] = Counter()
        self.numbers = count()
        self.heap: list[tuple[float, int, Node]] = []
        self.known: set[Plan] = set()
        """Those that were simulated."""
        for shape in shapes(request):
            self.seen["shapes"] += 1
            splits = data_splits(request, shape)
            fitting = [split for split in splits if judge.room.may_fit(shape, split)]
            if not fitting:
                self.seen["too_large"] += len(splits)
                continue
            travel = min(judge.travel_bound(shape, split) for split in fitting)
            for order in orders(request, shape):
                self._push("orders", max(travel, judge.order_bound(order)), order)

    def guess(self) -> None:
        """Where nodes or links differ: simulates the likeliest of the plans that cut the model and the batch as finely
        as can be with one sharding, in orders that keep ranks busy, for each degree of tensor and pipeline
        parallelism."""
        guesses: dict[Plan, float] = {}
        nodes = [node for _, _, node in self.heap if isinstance(node, Order) and node.shape.cp == node.shape.ep == 1]
        finest = min((node.shape.micro_batch_size for node in nodes), default=1)
        for node in nodes:
            if node.shape.micro_batch_size > finest or not (node.shape.pp == 1 or SCHEDULES[node.schedule].splits):
                continue
            for draft in plans(self.request, node, lambda split: split[0] == 1 and split[2] == "z1"):
                plan = placed(self.judge, draft, node)
                if plan is not None:
                    guesses[plan] = self.judge.bound(plan)
        for plan in sorted(guesses, key=guesses.__getitem__)[:GUESSES]:
            fitting = None if self._beaten(guesses[plan]) else self._fitting(plan)
            if fitting is not None:
                self._simulate(fitting)

    def dive(self) -> None:
        """Simulates some of what people would try first, so that bounds have a time to be cut against: the widest
        tensor parallelism, the smallest micro-batches, no context parallelism, for each depth of the pipeline."""
        likely: dict[int, tuple[float, Order]] = {}
        orders = [
            (bound, node)
            for bound, _, node in self.heap
            if isinstance(node, Order) and not node.balanced and not node.shares and not SCHEDULES[node.schedule].splits
        ]
        least = min(
            ((-order.shape.tp, order.shape.cp, order.shape.micro_batch_size) for _, order in orders), default=()
        )
        for bound, order in orders:
            shape = order.shape
            if (-shape.tp, shape.cp, shape.micro_batch_size) == least:
                bound = max(bound, self.judge.unsharded_bound(order))
                likely[shape.pp] = min(likely.get(shape.pp, (inf, order)), (bound, order), key=lambda pair: pair[0])
        tried: list[list[tuple[float, int, Plan]]] = []
        for _, order in likely.values():
            fit = plans(self.request, order, partial(self.judge.room.may_fit, order.shape, chunks=order.vpp))
            tried.append(sorted((self.judge.bound(plan), next(self.numbers), plan) for plan in fit)[:TRIES])
        ready: list[tuple[float, int, Ready]] = []
        for several in sorted(filter(None, tried))[:DIVES]:
            if len(ready) >= self.top and several[0][0] > max(sorted(ready)[: self.top])[0]:
                break
            fitting = next(filter(None, (self._fitting(plan) for _, _, plan in several)), None)
            if fitting is not None:
                ready.append((self.judge.bound(fitting), next(self.numbers), Ready(fitting)))
        for _, _, node in sorted(ready)[: self.top]:
            self._simulate(node.plan)

    def is_settled(self) -> bool:
        """Whether nothing that is left can be among the best."""
        return self._beaten(self.heap[0][0])

    def step(self) -> None:
        """Takes the node that may be best apart, or simulates it."""
        bound, _, node = heapq.heappop(self.heap)
        if isinstance(node, Order):
            self._push("opened", max(bound, self.judge.unsharded_bound(node)), Opened(node))
        elif isinstance(node, Opened):
            for draft in plans(self.request, node.order, partial(self._is_wanted, node.order)):
                self.seen["drafts"] += 1
                plan = placed(self.judge, draft, node.order)
                if plan is not None:
                    self._push("plans", max(bound, self.judge.bound(plan)), plan)
        elif isinstance(node, Plan):
            self._fit(node, bound)
        else:
            self._simulate(node.plan)

    def _is_wanted(self, order: Order, split: Split) -> bool:
        """Whether plans that share parameters and gradients so may fit, and be among the best."""
        fits = self.judge.room.may_fit(order.shape, split, order.vpp)
        wanted = fits and not self._beaten(self.judge.travel_bound(order.shape, split))
        self.seen["drafts"] += not wanted
        self.seen["too_large"] += not fits
        return wanted

    def _simulate(self, plan: Plan) -> None:
        if plan not in self.known:
            self.known.add(plan)
            self.seen["simulated"] += 1
            self.best = sorted([*self.best, self.judge.verdict(plan)], key=lambda one: one.order)[: self.top]

    def _fit(self, plan: Plan, bound: float) -> None:
        """What fits is simulated when nothing else may be better; what doesn't is given recompute, and so a bound."""
        fitting = self._fitting(plan)
        if fitting is not None:
            self._push("fit", bound if fitting is plan else self.judge.bound(fitting), Ready(fitting))

    def _fitting(self, plan: Plan) -> Plan | None:
        """The plan itself where it fits, else with the cheapest recompute that makes it."""
        fitting, over = self.judge.room.made_to_fit(plan)
        if fitting is None and over < self.closest[0]:
            self.closest = over, plan
        return fitting

    def _push(self, kind: str, bound: float, node: Node) -> None:
        self.seen[kind] += 1
        if not self._beaten(bound):
            heapq.heappush(self.heap, (bound, next(self.numbers), node))

    def _beaten(self, bound: float) -> bool:
        """Whether nothing with this bound can be among the best."""
        worst = self.best[-1].value if len(self.best) == self.top else inf
        return bound > min(worst, self.ceiling) * (1 + ROUNDING)
