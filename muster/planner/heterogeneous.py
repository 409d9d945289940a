"""The best plan for a cluster whose nodes or links differ, and what the naive layout would have cost."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
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

ANNEALING_TRIES = 400

MAX_NODE_ORDERS = 8
"""Orders of the nodes that are tried before single ones are exchanged."""

MAX_FRESH_SEED_ORDERS = 3
"""Of these, for how many it is asked what is likely to be good; with the others that is tried again."""

CUSTOM_SCHEDULE_TIME_SHARE = 0.3
"""Of the time, what is kept for orders of passes for the best plans' own times."""

REORDERED_TIME_SHARE = 0.3
"""Of that, what is kept for the same in the order of nodes that then is best."""

MAX_SEED_PLANS = 6
"""Plans that are tried again with each of these orders, and where a search begins."""


@dataclass(frozen=True, slots=True)
class PlanSearch:
    """What was found, and for which order of the nodes."""

    request: PlanRequest
    """With the cluster's nodes in that order."""
    judge: PlanEvaluator
    found: SearchResult
    node_order: tuple[int, ...] | None = None
    """The nodes as they were listed, in the order in which ranks are laid on them; None where nodes are alike."""
    naive_step_s: float | None = None
    """Of the best plan with the nodes as they are listed, layers and data evenly on them and axes in the usual order;
    None where nodes are alike, or none fits."""


def find_best_plans(request: PlanRequest, top: int, limit_s: float = inf) -> PlanSearch:
    """The best plans, and where nodes differ the best order of the nodes for the first of them.

    What is likely to be good is simulated for several orders of the nodes. The best of these is searched, then what
    exchanging single nodes makes of it.
    """
    if not is_heterogeneous(request.cluster):
        judge = PlanEvaluator(request)
        return PlanSearch(request, judge, trim_offload(search(request, top, limit_s, judge, exact=1), judge))
    begin_s, search_s = perf_counter(), (1 - CUSTOM_SCHEDULE_TIME_SHARE) * limit_s
    naive, best = _search_naive(request, top, search_s / 5)
    tried = [naive]

    def left_s() -> float:
        return max(search_s - (perf_counter() - begin_s), search_s / 10)

    def better(found: PlanSearch) -> PlanSearch:
        tried.append(found.found)
        return _better(best, found)

    orders, likely, looks = _candidate_orders(request, naive), naive.best, list[tuple[float, NodeOrderCandidate]]()
    each_s = left_s() * 2 / 3 / min(len(orders), MAX_FRESH_SEED_ORDERS)
    for number, order in enumerate(orders):
        look, seeds = NodeOrderCandidate(request, order), [one.plan for one in likely]
        anew = number < MAX_FRESH_SEED_ORDERS or not seeds
        found = evaluate_seeds(look.request, look.evaluator, max(top, MAX_SEED_PLANS), each_s, seeds, anew)
        tried.append(found)
        looks.append((found.best[0].value if found.best else inf, look))
        likely = sorted([*found.best, *likely], key=lambda one: one.sort_key)[:MAX_SEED_PLANS]
    looks.sort(key=lambda pair: pair[0])
    best = better(_search_order(looks[0][1], top, left_s() / 2, best, likely))
    if best.found.best and (changed := _anneal_order(request, best, top, left_s())) is not best:
        best = better(changed)
    for _, look in looks[1:]:
        if perf_counter() - begin_s < search_s:
            best = better(_search_order(look, top, left_s(), best))
    best = _add_custom_schedules(best, [look for _, look in looks], likely, top, limit_s - (perf_counter() - begin_s))
    seen = total_counts(best.found, tried)
    found = replace(trim_offload(best.found, best.judge), seen=seen, seconds=perf_counter() - begin_s)
    return replace(best, found=found, naive_step_s=naive.best[0].prediction.step_time_s if naive.best else None)


class NodeOrderCandidate:
    """A request with its cluster's nodes in some order."""

    def __init__(self, request: PlanRequest, order: Sequence[int]) -> None:
        self.node_order = tuple(order)
        self.request = replace(request, cluster=reorder_nodes(request.cluster, order))
        self.evaluator = PlanEvaluator(self.request)


def _search_naive(request: PlanRequest, top: int, limit_s: float) -> tuple[SearchResult, PlanSearch]:
    """What is found without regard to differences: nodes as they are listed, layers and data evenly on them, the axes
    in the order that trainers lay them out in."""
    equal = {"stages": (), "uneven_micro_batches": (), "axis_order": MESH_AXES}
    asked = replace(request, fixed={**equal, **request.fixed})
    judge = PlanEvaluator(asked)
    found = search(asked, top, limit_s, judge, exact=1)
    return found, PlanSearch(asked, judge, found, tuple(range(request.cluster.num_nodes)))


def _candidate_orders(request: PlanRequest, naive: SearchResult) -> list[tuple[int, ...]]:
    """The nodes as listed, and orders by blocks; of many those that suit the plans most that are best as listed."""
    listed, *others = block_orders(request.cluster)
    if len(others) >= MAX_NODE_ORDERS:
        plans = [one.plan for one in naive.best]

        def bound(order: Sequence[int]) -> float:
            judge = NodeOrderCandidate(request, order).evaluator
            return min((judge.bound(plan) for plan in plans), default=0.0)

        others = sorted(others, key=bound)[: MAX_NODE_ORDERS - 1]
    return [listed, *others]


def _search_order(
    candidate: NodeOrderCandidate, top: int, limit_s: float, best: PlanSearch, likely: Sequence[EvaluatedPlan] = ()
) -> PlanSearch:
    """With the nodes in an order; what is no better than the `best` so far need not be found."""
    ceiling = inf
    if (
        len(best.found.best) == top
        and best.judge.memory_budget.head_room == candidate.evaluator.memory_budget.head_room
    ):
        ceiling = best.found.best[-1].value
    found = search(candidate.request, top, limit_s, candidate.evaluator, ceiling, [one.plan for one in likely], exact=1)
    return PlanSearch(candidate.request, candidate.evaluator, found, candidate.node_order)


def _anneal_order(request: PlanRequest, best: PlanSearch, top: int, limit_s: float) -> PlanSearch:
    """The order in which the best plan is fastest, and the best plans for that order."""
    plan, begin_s, known = best.found.best[0].plan, perf_counter(), dict[tuple[int, ...], float]()

    def step_s(order: Sequence[int]) -> float:
        if tuple(order) not in known:
            judge = NodeOrderCandidate(request, order).evaluator
            late = perf_counter() - begin_s > limit_s / 2
            known[tuple(order)] = inf if late else judge.evaluate(plan).prediction.step_time_s
        return known[tuple(order)]

    order, _ = anneal(best.node_order or (), step_s, ANNEALING_TRIES)
    left_s = limit_s - (perf_counter() - begin_s)
    return (
        best
        if order == best.node_order
        else _search_order(NodeOrderCandidate(request, order), top, left_s, best, best.found.best)
    )


def _add_custom_schedules(
    best: PlanSearch,
    candidates: Sequence[NodeOrderCandidate],
    likely: Sequence[EvaluatedPlan],
    top: int,
    limit_s: float,
) -> PlanSearch:
    """With those of the best plans that are better with an order of passes for their own times, in the order of nodes
    in which the first of these is fastest."""
    begin_s, own = perf_counter(), best.found.best
    found = (
        find_custom_schedules([one.plan for one in (*own, *likely)], best.judge, limit_s * (1 - REORDERED_TIME_SHARE))
        if own
        else []
    )
    if not found:
        return best
    first = min(found, key=lambda one: one.sort_key)
    best = replace(best, found=replace(best.found, best=sorted((*own, *found), key=lambda one: one.sort_key)[:top]))
    others = [
        (look.evaluator.evaluate(first.plan), look)
        for look in candidates
        if look.evaluator.memory_budget.fits(first.plan)
    ]
    verdict, look = min(others, key=lambda pair: pair[0].value, default=(first, None))
    if look is None or verdict.value >= best.found.best[0].value:
        return best
    found = find_custom_schedules([verdict.plan], look.evaluator, limit_s - (perf_counter() - begin_s))
    found += [
        look.evaluator.evaluate(one.plan) for one in best.found.best if look.evaluator.memory_budget.fits(one.plan)
    ]
    ranked = sorted({one.plan: one for one in found}.values(), key=lambda one: one.sort_key)[:top]
    return PlanSearch(look.request, look.evaluator, replace(best.found, best=ranked), look.node_order)


def _better(one: PlanSearch | None, other: PlanSearch) -> PlanSearch:
    """The one with the better first plan; the earlier of equals; one that leaves head-room before one that doesn't."""
    if one is None or not one.found.best:
        return other
    if not other.found.best:
        return one
    if one.judge.memory_budget.head_room != other.judge.memory_budget.head_room:
        return max(one, other, key=lambda arranged: arranged.judge.memory_budget.head_room)
    return other if other.found.best[0].value < one.found.best[0].value else one
