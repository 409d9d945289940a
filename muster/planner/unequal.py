"""The best plan for a cluster whose nodes or links differ, and what the naive layout would have cost."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from time import perf_counter

from muster.planner.judge import Judge
from muster.planner.placement import annealed, block_orders, is_unequal, reordered
from muster.planner.request import Request
from muster.planner.search import Found, search

ANNEALING_TRIES = 400


@dataclass(frozen=True, slots=True)
class Arranged:
    """What was found, and for which order of the nodes."""

    request: Request
    """With the cluster's nodes in that order."""
    judge: Judge
    found: Found
    order: tuple[int, ...] | None = None
    """The nodes as they were listed, in the order in which ranks are laid on them; None where nodes are alike."""
    naive_step_s: float | None = None
    """Of the best plan with the nodes as they are listed, and layers evenly on the stages; None where nodes are alike,
    or none fits."""


def arrange(request: Request, top: int, limit_s: float = inf) -> Arranged:
    """The best plans, and where nodes differ the best order of the nodes for the first of them."""
    if not is_unequal(request.cluster):
        judge = Judge(request)
        return Arranged(request, judge, search(request, top, limit_s, judge))
    begin_s = perf_counter()
    equal = replace(request, fixed={**request.fixed, "stages": (), "data_shares": ()})
    judge = Judge(equal)
    naive = search(equal, top, limit_s / 4, judge)
    best: Arranged | None = None
    if naive.best:
        best = Arranged(equal, judge, naive, tuple(range(request.cluster.num_nodes)))
    for order in block_orders(request.cluster):
        left_s = limit_s - (perf_counter() - begin_s)
        if best is not None and left_s <= 0:
            break
        best = _better(best, _searched(request, order, top, max(left_s / 2, limit_s / 10)))
    assert best is not None
    if best.found.best:
        best = _better(best, _annealed(request, best, top, max(limit_s - (perf_counter() - begin_s), limit_s / 10)))
    return replace(best, naive_step_s=naive.best[0].prediction.step_time_s if naive.best else None)


def _searched(request: Request, order: Sequence[int], top: int, limit_s: float) -> Arranged:
    changed = replace(request, cluster=reordered(request.cluster, order))
    judge = Judge(changed)
    return Arranged(changed, judge, search(changed, top, limit_s, judge), tuple(order))


def _annealed(request: Request, best: Arranged, top: int, limit_s: float) -> Arranged:
    """The order that suits the best plan most by its bound, and the best plans for that order."""
    plan = best.found.best[0].plan

    def bound(order: Sequence[int]) -> float:
        return Judge(replace(request, cluster=reordered(request.cluster, order))).bound(plan)

    order, _ = annealed(best.order or (), bound, ANNEALING_TRIES)
    return best if order == best.order else _searched(request, order, top, limit_s)


def _better(one: Arranged | None, other: Arranged) -> Arranged:
    """The one with the better first plan; the earlier of equals; one that leaves head-room before one that doesn't."""
    if one is None or not one.found.best:
        return other
    if not other.found.best:
        return one
    if one.judge.room.head_room != other.judge.room.head_room:
        return max(one, other, key=lambda arranged: arranged.judge.room.head_room)
    return other if other.found.best[0].value < one.found.best[0].value else one
