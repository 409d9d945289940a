"""The best plan for a cluster whose nodes or links differ, beside what the naive layout would have cost."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf
from operator import attrgetter, itemgetter
from time import perf_counter

from muster.planner.custom_schedules import find_custom_schedules
from muster.planner.evaluated_plan import EvaluatedPlan
from muster.planner.memory.trim_offload import trim_offload
from muster.planner.node_order import anneal, block_orders, is_heterogeneous, reorder_nodes
from muster.planner.plan_evaluator import PlanEvaluator
from muster.planner.request import PlanRequest
from muster.planner.search import evaluate_seeds, search
from muster.planner.search_result import SearchResult, total_counts
from muster.spec.mesh_axes import MESH_AXES
from muster.spec.plan import Plan

ANNEALING_TRIES = 400
"""Node orders that annealing looks at."""

MAX_NODE_ORDERS = 8
"""Node orders that are tried before single nodes are swapped."""

MAX_FRESH_SEED_ORDERS = 3
"""Node orders that get a fresh seed search; the others only re-test known seeds."""

CUSTOM_SCHEDULE_TIME_SHARE = 0.3
"""Share of the time limit for schedules that are found for the best plans' own times."""

REORDERED_TIME_SHARE = 0.3
"""Share of that time for the same in the node order that is best with them."""

MAX_SEED_PLANS = 6
"""Plans that are carried from one node order to the next, and that a search begins with."""


@dataclass(frozen=True, slots=True)
class PlanSearch:
    """The best plans, and the node order that they are for."""

    result: SearchResult
    node_order: tuple[int, ...] | None = None
    """Listed nodes in the order in which ranks are laid on them; None where nodes are alike."""
    naive_step_s: float | None = None
    """Step time of the best plan with nodes as listed, layers and data evenly on them and axes in their default order;
    None where nodes are alike, or none fits."""

    @property
    def evaluator(self) -> PlanEvaluator:
        """Evaluator of the plans, for the cluster with its nodes in `node_order`."""
        return self.result.evaluator

    @property
    def request(self) -> PlanRequest:
        """Request with the cluster's nodes in `node_order`."""
        return self.result.evaluator.request


def find_best_plans(request: PlanRequest, top: int, limit_s: float = inf) -> PlanSearch:
    """Return the `top` best plans and, where nodes differ, the node order that is best for the first of them."""
    if not is_heterogeneous(request.cluster):
        return PlanSearch(trim_offload(search(request, top, limit_s, exact=1)))
    return _HeterogeneousSearch(request, top, limit_s).run()


class _HeterogeneousSearch:
    """A search over node orders: seeds for several orders, a search of the best of these, then single swaps.

    Each search is a whole one over plans, so that orders are few; what one finds is the ceiling of the next.
    """

    def __init__(self, request: PlanRequest, top: int, limit_s: float) -> None:
        self.request = request
        self.top = top
        self.limit_s = limit_s
        self.search_s = (1 - CUSTOM_SCHEDULE_TIME_SHARE) * limit_s
        self.begin_s = perf_counter()
        self.results: list[SearchResult] = []

    def run(self) -> PlanSearch:
        """Return the best plans of all node orders that there is time for."""
        naive = self._search_naive()
        best = naive
        (first, *others), likely = self._seed_orders(naive.result)
        found = self._search_order(first, self._left_s() / 2, best, likely)
        evaluators = [found.evaluator]
        best = self._better(best, found)
        if best.result.best:
            annealed = self._anneal_order(best)
            if annealed is not best:
                best = self._better(best, annealed)
        for candidate in others:
            evaluators.append(candidate.evaluator)
            if self._elapsed_s() < self.search_s:
                found = self._search_order(candidate, self._left_s(), best)
                evaluators[-1] = found.evaluator
                best = self._better(best, found)
        orders = [candidate.node_order for candidate in (first, *others)]
        best = self._add_custom_schedules(best, list(zip(evaluators, orders, strict=True)), likely)
        counts = total_counts(best.result, self.results)
        result = replace(trim_offload(best.result), counts=counts, seconds=self._elapsed_s())
        naive_step_s = naive.result.best[0].prediction.step_time_s if naive.result.best else None
        return replace(best, result=result, naive_step_s=naive_step_s)

    def _elapsed_s(self) -> float:
        return perf_counter() - self.begin_s

    def _left_s(self) -> float:
        """Return the time that is left for searches, but always a tenth of it."""
        return max(self.search_s - self._elapsed_s(), self.search_s / 10)

    def _better(self, best: PlanSearch, other: PlanSearch) -> PlanSearch:
        self.results.append(other.result)
        return _better(best, other)

    def _search_naive(self) -> PlanSearch:
        """Search as if nodes were alike: as listed, layers and data evenly on them, axes in their default order."""
        even = {"stages": (), "uneven_micro_batches": (), "axis_order": MESH_AXES}
        request = replace(self.request, fixed={**even, **self.request.fixed})
        result = search(request, self.top, self.search_s / 5, exact=1)
        self.results.append(result)
        return PlanSearch(result, tuple(range(request.cluster.num_nodes)))

    def _seed_orders(self, naive: SearchResult) -> tuple[list["NodeOrderCandidate"], list[EvaluatedPlan]]:
        """Return the candidate orders, best seed first, and the best seeds of all."""
        orders = self._candidate_orders([evaluated.plan for evaluated in naive.best])
        likely = naive.best
        each_s = self._left_s() * 2 / 3 / min(len(orders), MAX_FRESH_SEED_ORDERS)
        ranked: list[tuple[float, NodeOrderCandidate]] = []
        for number, order in enumerate(orders):
            candidate = NodeOrderCandidate(self.request, order)
            seeds = [evaluated.plan for evaluated in likely]
            is_fresh = number < MAX_FRESH_SEED_ORDERS or not seeds
            result = evaluate_seeds(candidate.evaluator, max(self.top, MAX_SEED_PLANS), each_s, seeds, is_fresh)
            self.results.append(result)
            ranked.append((result.best[0].value if result.best else inf, candidate))
            likely = sorted([*result.best, *likely], key=attrgetter("sort_key"))[:MAX_SEED_PLANS]
        ranked.sort(key=itemgetter(0))
        return [candidate for _, candidate in ranked], likely

    def _candidate_orders(self, plans: Sequence[Plan]) -> list[tuple[int, ...]]:
        """Return the listed order, and orders by blocks; of many, those with the lowest bounds for `plans`."""
        listed, *others = block_orders(self.request.cluster)
        if len(others) >= MAX_NODE_ORDERS:

            def bound(order: Sequence[int]) -> float:
                evaluator = NodeOrderCandidate(self.request, order).evaluator
                return min((evaluator.bounds.of_plan(plan) for plan in plans), default=0.0)

            others = sorted(others, key=bound)[: MAX_NODE_ORDERS - 1]
        return [listed, *others]

    def _search_order(
        self,
        candidate: "NodeOrderCandidate",
        limit_s: float,
        best: PlanSearch,
        likely: Sequence[EvaluatedPlan] = (),
    ) -> PlanSearch:
        """Search one node order for plans that are better than the `best` so far."""
        head_room = candidate.evaluator.memory_budget.head_room
        ceiling = inf
        if len(best.result.best) == self.top and best.evaluator.memory_budget.head_room == head_room:
            ceiling = best.result.best[-1].value
        seeds = [evaluated.plan for evaluated in likely]
        request = candidate.evaluator.request
        result = search(request, self.top, limit_s, candidate.evaluator, ceiling, seeds, exact=1)
        return PlanSearch(result, candidate.node_order)

    def _anneal_order(self, best: PlanSearch) -> PlanSearch:
        """Swap nodes as long as the best plan gets faster, then search that order; `best` itself if none is faster."""
        plan = best.result.best[0].plan
        limit_s = self._left_s()
        begin_s = perf_counter()
        step_times_s: dict[tuple[int, ...], float] = {}

        def step_s(order: Sequence[int]) -> float:
            key = tuple(order)
            if key not in step_times_s:
                candidate = NodeOrderCandidate(self.request, order)
                is_late = perf_counter() - begin_s > limit_s / 2
                step_times_s[key] = inf if is_late else candidate.evaluator.evaluate(plan).prediction.step_time_s
            return step_times_s[key]

        order, _ = anneal(best.node_order or (), step_s, ANNEALING_TRIES)
        if order == best.node_order:
            return best
        left_s = limit_s - (perf_counter() - begin_s)
        return self._search_order(NodeOrderCandidate(self.request, order), left_s, best, best.result.best)

    def _add_custom_schedules(
        self,
        best: PlanSearch,
        orders: Sequence[tuple[PlanEvaluator, tuple[int, ...]]],
        likely: Sequence[EvaluatedPlan],
    ) -> PlanSearch:
        """Add plans with schedules found for their own times, in the node order in which the first of them is best."""
        limit_s = self.limit_s - self._elapsed_s()
        begin_s = perf_counter()
        if not best.result.best:
            return best
        plans = [evaluated.plan for evaluated in (*best.result.best, *likely)]
        found = find_custom_schedules(plans, best.evaluator, limit_s * (1 - REORDERED_TIME_SHARE))
        if not found:
            return best
        first = min(found, key=attrgetter("sort_key"))
        best = replace(best, result=replace(best.result, best=self._ranked([*best.result.best, *found])))
        elsewhere = [
            (evaluator.evaluate(first.plan), evaluator, node_order)
            for evaluator, node_order in orders
            if evaluator.memory_budget.fits(first.plan)
        ]
        if not elsewhere:
            return best
        fastest, evaluator, node_order = min(elsewhere, key=lambda row: row[0].value)
        if fastest.value >= best.result.best[0].value:
            return best
        found = find_custom_schedules([fastest.plan], evaluator, limit_s - (perf_counter() - begin_s))
        fitting = (one.plan for one in best.result.best if evaluator.memory_budget.fits(one.plan))
        found += map(evaluator.evaluate, fitting)
        ranked = self._ranked({one.plan: one for one in found}.values())
        return PlanSearch(replace(best.result, evaluator=evaluator, best=ranked), node_order)

    def _ranked(self, plans: Iterable[EvaluatedPlan]) -> list[EvaluatedPlan]:
        return sorted(plans, key=attrgetter("sort_key"))[: self.top]


class NodeOrderCandidate:
    """A node order, and an evaluator for the cluster with its nodes in that order."""

    def __init__(self, request: PlanRequest, order: Sequence[int]) -> None:
        self.node_order = tuple(order)
        self.evaluator = PlanEvaluator(replace(request, cluster=reorder_nodes(request.cluster, order)))


def _better(one: PlanSearch, other: PlanSearch) -> PlanSearch:
    """Return the search with the better first plan, the earlier of equals; head-room goes before speed."""
    if not one.result.best:
        return other
    if not other.result.best:
        return one
    if one.evaluator.memory_budget.head_room != other.evaluator.memory_budget.head_room:
        return max(one, other, key=lambda found: found.evaluator.memory_budget.head_room)
    return other if other.result.best[0].value < one.result.best[0].value else one
