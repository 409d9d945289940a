"""Placement of weight backwards: an order of F and I is given, and W goes where it costs least.

F and I carry data to other ranks, so that delaying them delays others; W only has to be done by the end, and frees its
micro-batch's activations. So the order of F and I is kept, and W fills the gaps (zero bubble, Qi et al. 2023,
arXiv:2401.10241, §3.1). The run is event-driven: an event is a moment at which a rank becomes free or an input arrives.

A waiting rank begins a W unless the W delays the next pass by more than it gains: `patience` weighs the two. With a W
of 1 s and the next input in 0.6 s, W fills 0.6 s of idle time and delays the pass by 0.4 s: the rank runs W if
0.6 ≥ patience · 0.4.
"""

from heapq import heappop, heappush
from math import inf

from muster.schedule.search_problem import SearchProblem, TimedPasses

_EPSILON_S = 1e-9


def place_weight_grads(
    problem: SearchProblem, orders: list[list[int]], patience: float, overtake: int, deadline_s: float = inf
) -> TimedPasses | None:
    """Run a given order of F and I, and place each W while its rank waits or where an F needs the memory.

    `orders` holds the codes of F and I, per rank. An I may overtake up to `overtake` passes whose inputs are missing.
    Returns None if the order gets stuck (for memory or at all) or can't end by `deadline_s`.
    """
    count, times_s, placement, p2p_s = problem.num_micro_batches, problem.times_s, problem.placement, problem.p2p_s
    depth = problem.depth
    num_passes = problem.num_stages * count
    capacity = problem.capacity
    come_s = _first_arrivals_s(problem)
    todo = [order[::-1] for order in orders]
    weights: list[list[int]] = [[] for _ in orders]
    """Per rank, the W that have become possible; the first `begun[rank]` of them have begun."""
    begun = [0] * len(orders)
    kept = [0] * len(orders)
    free_s = [0.0] * len(orders)
    passes = []
    left_s = [count * sum(kind[stage] for kind in times_s for stage in held) for held in problem.stages]
    events = [(0.0, rank) for rank in range(len(orders))]
    while events:
        now_s, rank = heappop(events)
        if free_s[rank] > now_s + _EPSILON_S:
            continue
        order = todo[rank]
        code = -1
        place = 1
        next_s = inf
        urgent = False
        if order:
            head = order[-1]
            if come_s[head] > now_s + _EPSILON_S:
                next_s = come_s[head]
            elif head >= num_passes or kept[rank] < capacity:
                code = head
            else:
                urgent = True
            if code < 0 and overtake:
                place = _overtaking_place(order[-overtake - 1 : -1], num_passes, come_s, now_s)
                code = order[-place] if place else -1
        if code < 0:
            if begun[rank] == len(weights[rank]):
                continue
            code = weights[rank][begun[rank]]
            time_s = times_s[2][code // count - 2 * problem.num_stages]
            if not urgent and next_s < inf and next_s - now_s < patience * (now_s + time_s - next_s):
                continue
        kind = code // num_passes
        stage = code % num_passes // count
        time_s = times_s[kind][stage]
        end_s = arrival_s = now_s + time_s
        to = -1
        if kind == 2:
            begun[rank] += 1
            kept[rank] -= 1
        else:
            del order[-place]
        if kind == 0:
            kept[rank] += 1
            if (stage + 1) % depth == 0:
                come_s[code + num_passes] = end_s
            else:
                arrival_s += p2p_s[stage]
                come_s[code + count], to = arrival_s, placement[stage + 1]
        elif kind == 1:
            weights[rank].append(code + num_passes)
            if stage % depth:
                arrival_s += p2p_s[stage - 1]
                come_s[code - count], to = arrival_s, placement[stage - 1]
        left_s[rank] -= time_s
        if end_s + left_s[rank] > deadline_s:
            return None
        free_s[rank] = end_s
        passes.append(code)
        heappush(events, (end_s, rank))
        if to >= 0 and to != rank and free_s[to] <= arrival_s:
            heappush(events, (arrival_s, to))
    return TimedPasses(max(free_s), passes) if len(passes) == problem.num_passes else None


def _first_arrivals_s(problem: SearchProblem) -> list[float]:
    """Return when the input of each F and I arrives, by code: at once on the first stage of a replica, else unknown."""
    count = problem.num_micro_batches
    come_s = [inf] * (2 * problem.num_stages * count)
    for stage in problem.first_stages:
        come_s[stage * count : (stage + 1) * count] = [0.0] * count
    return come_s


def _overtaking_place(waiting: list[int], num_passes: int, come_s: list[float], now_s: float) -> int:
    """Return the place from the end of the order of the first I behind its head that could run now, or 0."""
    for place, code in enumerate(reversed(waiting), 2):
        if code >= num_passes and come_s[code] <= now_s + _EPSILON_S:
            return place
    return 0
