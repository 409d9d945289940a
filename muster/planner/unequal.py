"""The best plan for a cluster whose nodes or links differ, and what the naive layout would have cost."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from time import perf_counter

from muster.planner.found import Found, all_seen
from muster.planner.judge import Judge
from muster.planner.lean import leanest
from muster.planner.placement import annealed, block_orders, is_unequal, reordered
from muster.planner.request import Request
from muster.planner.search import first_look, search
from muster.planner.timed import timed
from muster.planner.verdict import Verdict
from muster.spec.plan import AXES

ANNEALING_TRIES = 400

MOST_ORDERS = 8
"""Orders of the nodes that are tried before single ones are exchanged."""

MOST_LOOKED_AT = 3
"""Of these, for how many it is asked what is likely to be good; with the others that is tried again."""

TIMED_SHARE = 0.3
"""Of the time, what is kept for orders of passes for the best plans' own times."""

AGAIN_SHARE = 0.3
"""Of that, what is kept for the same in the order of nodes that then is best."""

MOST_LIKELY = 6
"""Plans that are tried again with each of these orders, and where a search begins."""


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
    """Of the best plan with the nodes as they are listed, layers and data evenly on them and axes in the usual order;
    None where nodes are alike, or none fits."""


def arrange(request: Request, top: int, limit_s: float = inf) -> Arranged:
    """The best plans, and where nodes differ the best order of the nodes for the first of them.

    What is likely to be good is simulated for several orders of the nodes. The best of these is searched, then what
    exchanging single nodes makes of it.
    """
    if not is_unequal(request.cluster):
        judge = Judge(request)
        return Arranged(request, judge, leanest(search(request, top, limit_s, judge, exact=1), judge))
    begin_s, search_s = perf_counter(), (1 - TIMED_SHARE) * limit_s
    naive, best = _as_listed(request, top, search_s / 5)
    tried = [naive]

    def left_s() -> float:
        return max(search_s - (perf_counter() - begin_s), search_s / 10)

    def better(found: Arranged) -> Arranged:
        tried.append(found.found)
        return _better(best, found)

    orders, likely, looks = _likely_orders(request, naive), naive.best, list[tuple[float, Look]]()
    each_s = left_s() * 2 / 3 / min(len(orders), MOST_LOOKED_AT)
    for number, order in enumerate(orders):
        look, seeds = Look(request, order), [one.plan for one in likely]
        anew = number < MOST_LOOKED_AT or not seeds
        found = first_look(look.request, look.judge, max(top, MOST_LIKELY), each_s, seeds, anew)
        tried.append(found)
        looks.append((found.best[0].value if found.best else inf, look))
        likely = sorted([*found.best, *likely], key=lambda one: one.order)[:MOST_LIKELY]
    looks.sort(key=lambda pair: pair[0])
    best = better(_searched(looks[0][1], top, left_s() / 2, best, likely))
    if best.found.best and (changed := _annealed(request, best, top, left_s())) is not best:
        best = better(changed)
    for _, look in looks[1:]:
        if perf_counter() - begin_s < search_s:
            best = better(_searched(look, top, left_s(), best))
    best = _timed(best, [look for _, look in looks], likely, top, limit_s - (perf_counter() - begin_s))
    seen = all_seen(best.found, tried)
    found = replace(leanest(best.found, best.judge), seen=seen, seconds=perf_counter() - begin_s)
    return replace(best, found=found, naive_step_s=naive.best[0].prediction.step_time_s if naive.best else None)


class Look:
    """A request with its cluster's nodes in some order."""

    def __init__(self, request: Request, order: Sequence[int]) -> None:
        self.order = tuple(order)
        self.request = replace(request, cluster=reordered(request.cluster, order))
        self.judge = Judge(self.request)


def _as_listed(request: Request, top: int, limit_s: float) -> tuple[Found, Arranged]:
    """What is found without regard to differences: nodes as they are listed, layers and data evenly on them, the axes
    in the order that trainers lay them out in."""
    equal = {"stages": (), "data_shares": (), "axis_order": AXES}
    asked = replace(request, fixed={**equal, **request.fixed})
    judge = Judge(asked)
    found = search(asked, top, limit_s, judge, exact=1)
    return found, Arranged(asked, judge, found, tuple(range(request.cluster.num_nodes)))


def _likely_orders(request: Request, naive: Found) -> list[tuple[int, ...]]:
    """The nodes as listed, and orders by blocks; of many those that suit the plans most that are best as listed."""
    listed, *others = block_orders(request.cluster)
    if len(others) >= MOST_ORDERS:
        plans = [one.plan for one in naive.best]

        def bound(order: Sequence[int]) -> float:
            judge = Look(request, order).judge
            return min((judge.bound(plan) for plan in plans), default=0.0)

        others = sorted(others, key=bound)[: MOST_ORDERS - 1]
    return [listed, *others]


def _searched(look: Look, top: int, limit_s: float, best: Arranged, likely: Sequence[Verdict] = ()) -> Arranged:
    """With the nodes in an order; what is no better than the `best` so far need not be found."""
    ceiling = inf
    if len(best.found.best) == top and best.judge.room.head_room == look.judge.room.head_room:
        ceiling = best.found.best[-1].value
    found = search(look.request, top, limit_s, look.judge, ceiling, [one.plan for one in likely], exact=1)
    return Arranged(look.request, look.judge, found, look.order)


def _annealed(request: Request, best: Arranged, top: int, limit_s: float) -> Arranged:
    """The order in which the best plan is fastest, and the best plans for that order."""
    plan, begin_s, known = best.found.best[0].plan, perf_counter(), dict[tuple[int, ...], float]()

    def step_s(order: Sequence[int]) -> float:
        if tuple(order) not in known:
            judge = Look(request, order).judge
            late = perf_counter() - begin_s > limit_s / 2
            known[tuple(order)] = inf if late else judge.verdict(plan).prediction.step_time_s
        return known[tuple(order)]

    order, _ = annealed(best.order or (), step_s, ANNEALING_TRIES)
    left_s = limit_s - (perf_counter() - begin_s)
    return best if order == best.order else _searched(Look(request, order), top, left_s, best, best.found.best)


def _timed(best: Arranged, looks: Sequence[Look], likely: Sequence[Verdict], top: int, limit_s: float) -> Arranged:
    """With those of the best plans that are better with an order of passes for their own times, in the order of nodes
    in which the first of these is fastest."""
    begin_s, own = perf_counter(), best.found.best
    found = timed([one.plan for one in (*own, *likely)], best.judge, limit_s * (1 - AGAIN_SHARE)) if own else []
    if not found:
        return best
    first = min(found, key=lambda one: one.order)
    best = replace(best, found=replace(best.found, best=sorted((*own, *found), key=lambda one: one.order)[:top]))
    others = [(look.judge.verdict(first.plan), look) for look in looks if look.judge.room.fits(first.plan)]
    verdict, look = min(others, key=lambda pair: pair[0].value, default=(first, None))
    if look is None or verdict.value >= best.found.best[0].value:
        return best
    found = timed([verdict.plan], look.judge, limit_s - (perf_counter() - begin_s))
    found += [look.judge.verdict(one.plan) for one in best.found.best if look.judge.room.fits(one.plan)]
    ranked = sorted({one.plan: one for one in found}.values(), key=lambda one: one.order)[:top]
    return Arranged(look.request, look.judge, replace(best.found, best=ranked), look.order)


def _better(one: Arranged | None, other: Arranged) -> Arranged:
    """The one with the better first plan; the earlier of equals; one that leaves head-room before one that doesn't."""
    if one is None or not one.found.best:
        return other
    if not other.found.best:
        return one
    if one.judge.room.head_room != other.judge.room.head_room:
        return max(one, other, key=lambda arranged: arranged.judge.room.head_room)
    return other if other.found.best[0].value < one.found.best[0].value else one
