"""Order of peers in a ring whose slowest link is as fast as can be, from the bandwidth of every link (PCCL,
arXiv:2505.14065: the tour is a travelling salesman's over unequal directions)."""

from collections.abc import Sequence
from random import Random

import numpy as np
from numpy.typing import NDArray

Matrix = Sequence[Sequence[float]]
"""Bandwidth from each peer (row) to each other (column); the diagonal isn't read."""

EXACT_PEERS = 14
"""Most peers for which the best order is found for certain, in a tenth of a second; each more doubles that."""
PATIENCE = 300
"""Changes without a better ring after which the local search of a larger one ends."""


def ring_order(bandwidth: Matrix, exact_peers: int = EXACT_PEERS) -> tuple[int, ...]:
    """Return the peers in the order of a ring, each of which sends to the next and the last to the first, peer 0.

    Its slowest link is the fastest possible, and of such rings the sum of its links the greatest: exactly for up to
    `exact_peers`, by local search beyond. Deterministic.
    """
    rates = np.array(bandwidth, dtype=float)
    count = len(rates)
    if rates.shape != (count, count):
        raise ValueError(f"bandwidth has {count} rows and {rates.shape[-1]} columns: expected as many of both")
    if count <= 3:
        orders = [tuple(range(count)), (0, 2, 1)] if count == 3 else [tuple(range(count))]
        return max(orders, key=lambda order: ring_value(bandwidth, order))
    np.fill_diagonal(rates, -np.inf)
    if count > exact_peers:
        return _local_search(rates)
    slowest, _ = _best_tour(rates, np.minimum, np.inf)
    return _best_tour(np.where(rates >= slowest, rates, -np.inf), np.add, 0.0)[1]


def ring_value(bandwidth: Matrix, order: Sequence[int]) -> tuple[float, float]:
    """Return a ring's slowest link and the sum of its links."""
    links = [bandwidth[one][other] for one, other in zip(order, [*order[1:], *order[:1]], strict=True) if one != other]
    return min(links, default=float("inf")), sum(links)


def _best_tour(rates: NDArray[np.float64], join: np.ufunc, nothing: float) -> tuple[float, tuple[int, ...]]:
    """Return the greatest value of a tour, and the tour, by dynamic programming over sets of peers (M. Held, R. Karp
    1962). `join`: how the links of a path make up its value, that of no link being `nothing`."""
    others = len(rates) - 1
    best = np.full((1 << others, others), -np.inf)
    before = np.zeros((1 << others, others), dtype=np.int8)
    peers = np.arange(others)
    best[1 << peers, peers] = join(nothing, rates[0, 1:])
    sets = np.arange(1 << others)
    sizes = sum((sets >> peer) & 1 for peer in range(others))
    for size in range(2, others + 1):
        for last in range(others):
            those = sets[(sizes == size) & ((sets >> last) & 1 == 1)]
            values = join(best[those ^ (1 << last)], rates[1:, last + 1])
            before[those, last] = values.argmax(axis=1)
            best[those, last] = values.max(axis=1)
    closed = join(best[-1], rates[1:, 0])
    last, left, tour = int(closed.argmax()), (1 << others) - 1, [0] * 0
    for _ in range(others):
        tour.append(last + 1)
        left, last = left ^ (1 << last), int(before[left, last])
    return float(closed.max()), (0, *reversed(tour))


# ----------------------------------------------------------------------------------------------------------------------
# Many peers


def _local_search(rates: NDArray[np.float64]) -> tuple[int, ...]:
    """Return a good order: improved by exchanging two neighbouring stretches, then shaken at three places and improved
    again, as long as that helps. No ring is better than the worst of the peers' fastest links, where it ends."""
    random = Random(0)
    bound = min(rates.max(axis=0).min(), rates.max(axis=1).min())
    best = _improve(rates, _nearest(rates, 0))
    for start in range(1, min(len(rates), 8)):
        best = max(best, _improve(rates, _nearest(rates, start)), key=lambda order: _value(rates, order))
    now, idle = best, 0
    while idle < PATIENCE and _value(rates, best)[0] < bound:
        found = _improve(rates, _shaken(now, random))
        idle += 1
        if _value(rates, found)[0] >= _value(rates, now)[0]:
            now = found
        if _value(rates, now)[0] > _value(rates, best)[0]:
            best, idle = now, 0
    best = _improve_sum(rates, best)
    first = int(np.flatnonzero(best == 0)[0])
    return tuple(map(int, np.roll(best, -first)))


def _nearest(rates: NDArray[np.float64], start: int) -> NDArray[np.intp]:
    """Return the order in which each peer is followed by the one that it reaches fastest among those left."""
    order = [start]
    left = set(range(len(rates))) - {start}
    while left:
        order.append(max(left, key=lambda peer: (rates[order[-1], peer], -peer)))
        left.remove(order[-1])
    return np.array(order)


def _value(rates: NDArray[np.float64], order: NDArray[np.intp]) -> tuple[float, float]:
    links = _links(rates, order)
    return float(links.min()), float(links.sum())


def _links(rates: NDArray[np.float64], order: NDArray[np.intp]) -> NDArray[np.float64]:
    return rates[order, np.roll(order, -1)]


def _exchanged(order: NDArray[np.intp], one: int, other: int) -> NDArray[np.intp]:
    """Return the ring with the stretches behind its first link exchanged: those from 1 to `one` and to `other`. No
    stretch is turned round, since links differ by direction."""
    return np.concatenate([order[:1], order[one + 1 : other + 1], order[1 : one + 1], order[other + 1 :]])


def _exchanges(rates: NDArray[np.float64], order: NDArray[np.intp]) -> tuple[NDArray[np.float64], ...]:
    """Return the three new links of each exchange of stretches behind the first link, as matrices over the last places
    of both stretches."""
    ends, nexts = order, np.roll(order, -1)
    first = np.broadcast_to(rates[order[0], nexts][:, None], (len(order),) * 2)  # then the second stretch begins
    second = np.broadcast_to(rates[ends, order[1]][None, :], (len(order),) * 2)  # behind it the first one
    third = rates[np.ix_(ends, nexts)]
    return first, second, third


def _allowed(count: int) -> NDArray[np.bool_]:
    """Return which places may end the first (row) and the second stretch (column)."""
    places = np.arange(count)
    return (places[:, None] >= 1) & (places[None, :] > places[:, None])


def _improve(rates: NDArray[np.float64], order: NDArray[np.intp]) -> NDArray[np.intp]:
    """Return the ring after replacing its slowest link, with two others, by faster ones, as long as there are any."""
    allowed = _allowed(len(order))
    while True:
        links = _links(rates, order)
        order = np.roll(order, -int(links.argmin()))
        slowest = links.min()
        gained = np.where(allowed, np.minimum.reduce(_exchanges(rates, order)), -np.inf)
        one, other = np.unravel_index(int(gained.argmax()), gained.shape)
        if gained[one, other] <= slowest:
            return order
        order = _exchanged(order, int(one), int(other))


def _improve_sum(rates: NDArray[np.float64], order: NDArray[np.intp]) -> NDArray[np.intp]:
    """Return the ring after exchanges that raise the sum of its links, none of which gets slower than the slowest."""
    allowed, since = _allowed(len(order)), 0
    slowest = _links(rates, order).min()
    while since < len(order):
        order = np.roll(order, -1)
        new = _exchanges(rates, order)
        links = _links(rates, order)
        lost = links[0] + links[:, None] + links[None, :]
        may = allowed & (np.minimum.reduce(new) >= slowest)
        gained = np.where(may, sum(new) - lost, -np.inf)
        one, other = np.unravel_index(int(gained.argmax()), gained.shape)
        since += 1
        if gained[one, other] > 1e-9 * abs(lost[one, other]):
            order, since = _exchanged(order, int(one), int(other)), 0
    return order


def _shaken(order: NDArray[np.intp], random: Random) -> NDArray[np.intp]:
    """Return the ring with two random stretches exchanged, twice."""
    for _ in range(2):
        order = np.roll(order, -random.randrange(len(order)))
        one, other = sorted(random.sample(range(1, len(order)), 2))
        order = _exchanged(order, one, other)
    return order
