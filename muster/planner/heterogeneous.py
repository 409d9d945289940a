"""The best plan for a cluster whose nodes or links differ, beside what the naive layout would have cost."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from operator import attrgetter, itemgetter
from time import perf_counter

from muster.planner.bucket_choice import choose_buckets
from muster.planner.custom_schedules import find_custom_schedules
from muster.planner.evaluated_plan import EvaluatedPlan
from muster.planner.late_schedules import try_late_schedules
from muster.planner.memory.trim_offload import trim_offload
from muster.planner.node_order import anneal, block_orders, is_heterogeneous, reorder_nodes
from muster.planner.plan_evaluator import PlanEvaluator
from muster.planner.request import PlanRequest
from muster.planner.search import evaluate_seeds, search
from muster.planner.search_budget import SearchBudget, simulation_work
from muster.planner.search_result import SearchResult, total_counts
from muster.planner.searched_orders import try_searched_orders
from muster.spec.cluster import ClusterSpec
from muster.spec.frameworks import runs_schedule
from muster.spec.mesh_axes import MESH_AXES
from muster.spec.plan import Plan

LATE_SHARE = 0.05
"""Share of the budget for schedules that are tried late."""

ORDER_EFFORT, ORDER_TIME_SHARE = 0.15, 0.3
"""Budget, as parts of the work and of the time left, for orders of passes found for the best plans' own times where
nodes are alike."""

FIRST_WORK = 6400.0
"""Work of the first search over node orders, that of `muster plan` by default; each after it has as much as all
before."""

NAIVE_SHARE = 0.2
"""Share of the searches over node orders for the one with nodes as listed."""

SEED_SHARE = 2 / 3
"""Share of what is left after it for seeds of several orders."""

ANNEALING_TRIES = 400
"""Node orders that annealing looks at."""

ANNEALING_SHARE = 0.5
"""Share of what is left after the best order for annealing it."""

ANNEALED_SEARCH_SHARE = 0.75
"""Share of what is left after that for a search of the annealed order."""

MAX_NODE_ORDERS = 8
"""Node orders that are tried before single nodes are swapped."""

MAX_FRESH_SEED_ORDERS = 3
"""Node orders that get a fresh seed search; the others only re-test known seeds."""

CUSTOM_SCHEDULE_SHARE = 0.3
"""Share of the budget for schedules that are found for the best plans' own times."""

REORDERED_SHARE = 0.3
"""Share of that for the same in the node order that is best with them."""

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

    @property
    def listed_cluster(self) -> ClusterSpec:
        """Cluster with its nodes as they were listed."""
        order = self.node_order
        if order is None:
            return self.request.cluster
        return reorder_nodes(self.request.cluster, sorted(range(len(order)), key=order.__getitem__))


def find_best_plans(
    request: PlanRequest, top: int, budget: SearchBudget | None = None, known: Sequence[EvaluatedPlan] = ()
) -> PlanSearch:
    """Return the `top` best plans and, where nodes differ, the node order that is best for the first of them.

    `known`: plans of the request that fit, for nodes that are alike.
    """
    budget = budget or SearchBudget()
    if not is_heterogeneous(request.island_cluster):
        result = search(request, top, budget.share(1 - LATE_SHARE), exact=1, known=known)
        late = try_late_schedules(result, top, budget.share(LATE_SHARE))
        ordered = try_searched_orders(late, top, budget.renew(ORDER_EFFORT, ORDER_TIME_SHARE))
        return PlanSearch(choose_buckets(trim_offload(ordered, budget), budget))
    found: PlanSearch | None = None
    for part in _doubling_parts(budget):
        other = _HeterogeneousSearch(request, top, part).run()
        found = other if found is None else _better(found, other)
    assert found is not None
    return found


def _doubling_parts(budget: SearchBudget) -> Iterator[SearchBudget]:
    """Yield budgets of `FIRST_WORK` units, of as many again, of twice that and so on, each as much as all before.

    Which orders of nodes are tried, and how far each, depends on the work that there is. So a larger budget searches as
    the smaller ones do before it goes on, and finds all that they find.
    """
    parts = [budget.work]
    if FIRST_WORK <= budget.work < inf:
        parts = [FIRST_WORK]
        while 2 * sum(parts) <= budget.work:
            parts.append(sum(parts))
    for number, work in enumerate(parts):
        if number and budget.is_late:
            return
        is_last = number == len(parts) - 1
        end_s = budget.end_of_share(1.0 if is_last else work / sum(parts[number:]))
        yield SearchBudget(work, end_s, budget, budget.processes)


class _HeterogeneousSearch:
    """A search over node orders: seeds for several orders, a search of the best of these, then single swaps.

    Each search is a whole one over plans, so that orders are few; what one finds is the ceiling of the next.
    """

    def __init__(self, request: PlanRequest, top: int, budget: SearchBudget) -> None:
        self.request = request
        self.top = top
        self.budget = budget
        self.orders_budget = budget.share(1 - CUSTOM_SCHEDULE_SHARE)
        """Budget of the searches over node orders."""
        self.begin_s = perf_counter()
        self.results: list[SearchResult] = []

    def run(self) -> PlanSearch:
        """Return the best plans of all node orders that the budget is enough for."""
        naive = self._search_naive()
        best = naive
        (first, *others), likely = self._seed_orders(naive.result)
        found = self._search_order(first, self.orders_budget.share(0.5), best, likely)
        evaluators = [found.evaluator]
        best = self._better(best, found)
        if best.result.best:
            annealed = self._anneal_order(best)
            if annealed is not best:
                best = self._better(best, annealed)
        for candidate in others:
            evaluators.append(candidate.evaluator)
            if not self.orders_budget.is_spent:
                found = self._search_order(candidate, self.orders_budget.share(1.0), best)
                evaluators[-1] = found.evaluator
                best = self._better(best, found)
        orders = [candidate.node_order for candidate in (first, *others)]
        best = self._add_custom_schedules(best, list(zip(evaluators, orders, strict=True)), likely)
        counts = total_counts(best.result, self.results)
        chosen = choose_buckets(trim_offload(best.result, self.budget), self.budget)
        result = replace(chosen, counts=counts, seconds=self._elapsed_s())
        naive_step_s = naive.result.best[0].prediction.step_time_s if naive.result.best else None
        return replace(best, result=result, naive_step_s=naive_step_s)

    def _elapsed_s(self) -> float:
        return perf_counter() - self.begin_s

    def _better(self, best: PlanSearch, other: PlanSearch) -> PlanSearch:
        self.results.append(other.result)
        return _better(best, other)

    def _search_naive(self) -> PlanSearch:
        """Search as if nodes were alike: as listed, layers and data evenly on them, axes in their default order."""
        even = {"stages": (), "uneven_micro_batches": (), "axis_order": MESH_AXES}
        request = replace(self.request, fixed={**even, **self.request.fixed})
        result = search(request, self.top, self.orders_budget.share(NAIVE_SHARE), exact=1)
        self.results.append(result)
        return PlanSearch(result, tuple(range(request.cluster.num_nodes)))

    def _seed_orders(self, naive: SearchResult) -> tuple[list["NodeOrderCandidate"], list[EvaluatedPlan]]:
        """Return the candidate orders, best seed first, and the best seeds of all."""
        orders = self._candidate_orders([evaluated.plan for evaluated in naive.best])
        likely = naive.best
        seeding = self.orders_budget.share(SEED_SHARE)
        ranked: list[tuple[float, NodeOrderCandidate]] = []
        for number, order in enumerate(orders):
            if ranked and self.budget.is_late:
                break
            candidate = NodeOrderCandidate(self.request, order)
            seeds = [evaluated.plan for evaluated in likely]
            is_fresh = number < MAX_FRESH_SEED_ORDERS or not seeds
            part = 1 / max(1, min(len(orders), MAX_FRESH_SEED_ORDERS) - number)
            result = evaluate_seeds(
                candidate.evaluator, max(self.top, MAX_SEED_PLANS), seeding.share(part), seeds, is_fresh
            )
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
        budget: SearchBudget,
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
        result = search(request, self.top, budget, candidate.evaluator, ceiling, seeds, exact=1)
        return PlanSearch(result, candidate.node_order)

    def _anneal_order(self, best: PlanSearch) -> PlanSearch:
        """Swap nodes as long as the best plan gets faster, then search that order; `best` itself if none is faster."""
        plan = best.result.best[0].plan
        budget = self.orders_budget.share(ANNEALING_SHARE)
        step_times_s: dict[tuple[int, ...], float] = {}

        def step_s(order: Sequence[int]) -> float:
            key = tuple(order)
            if key not in step_times_s:
                candidate = NodeOrderCandidate(self.request, order)
                is_late = budget.is_spent
                budget.spend(simulation_work(plan, self.request.workload))
                step_times_s[key] = inf if is_late else candidate.evaluator.evaluate(plan).prediction.step_time_s
            return step_times_s[key]

        order, _ = anneal(best.node_order or (), step_s, ANNEALING_TRIES)
        if order == best.node_order:
            return best
        budget = self.orders_budget.share(ANNEALED_SEARCH_SHARE)
        return self._search_order(NodeOrderCandidate(self.request, order), budget, best, best.result.best)

    def _add_custom_schedules(
        self,
        best: PlanSearch,
        orders: Sequence[tuple[PlanEvaluator, tuple[int, ...]]],
        likely: Sequence[EvaluatedPlan],
    ) -> PlanSearch:
        """Add plans with schedules found for their own times, in the node order in which the first of them is best."""
        if not best.result.best or not runs_schedule(self.request.framework, "auto"):
            return best
        plans = [evaluated.plan for evaluated in (*best.result.best, *likely)]
        found = find_custom_schedules(plans, best.evaluator, self.budget.share(1 - REORDERED_SHARE))
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
        found = find_custom_schedules([fastest.plan], evaluator, self.budget.share(1.0))
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
