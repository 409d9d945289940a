"""Redundant experts: copies of the most chosen experts on ranks that have less to do.

An expert has a home, the rank that holds its parameters, their gradients and optimizer state. Before a layer computes,
ranks get copies of experts of fuller ranks, and compute a part of their rows; gradients of the copies go back and are
summed there (Hecate's fully sharded sparse data parallelism, arXiv:2502.02581). Runtime and cost model choose by the
same functions: the one from a micro-batch's choices, the other from shares that are expected.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

TOLERATED_EXCESS = 0.1
"""Part of the mean load that the fullest rank may have above it before experts are copied: choices of a small
micro-batch scatter by so much."""
LEAST_ROWS = 0.05
"""Part of the mean load that a copy must take over, at least."""


class ExpertCopies(NamedTuple):
    """Experts that ranks have copies of, and rows that each computes."""

    copies: tuple[tuple[int, ...], ...]
    """Rank → experts of others that it gets, in the order of their places."""
    rows: Mapping[int, Mapping[int, int]]
    """Expert that has copies → rank → rows that it computes of it, home first."""
    loads: tuple[int, ...]
    """Rank → rows that it computes of all experts."""

    @property
    def width(self) -> int:
        """Copies on the rank with most of them."""
        return max(map(len, self.copies))

    @property
    def imbalance(self) -> float:
        """Load of the fullest rank relative to the mean."""
        total = sum(self.loads)
        return max(self.loads) * len(self.loads) / total if total else 1.0

    def own_share(self, experts_each: int) -> float:
        """Return the least part of a mean load that a rank computes of its own experts, while copies travel."""
        total = sum(self.loads)
        if not total:
            return 1.0
        own = list(self.loads)
        for expert, computed in self.rows.items():
            for rank, count in computed.items():
                own[rank] -= count * (rank != expert // experts_each)
        return min(own) * len(own) / total

    def sent_by(self, rank: int, experts_each: int) -> list[list[int]]:
        """Return the experts of one rank that each rank gets a copy of, numbered as the rank numbers its own."""
        first = rank * experts_each
        return [[one - first for one in own if one // experts_each == rank] for own in self.copies]

    def most_moved(self, experts_each: int) -> int:
        """Return the most copies that any rank gets or gives."""
        given = [0] * len(self.copies)
        for expert in (one for own in self.copies for one in own):
            given[expert // experts_each] += 1
        return max(*given, self.width)


def copy_experts(rows_E: Sequence[int], ranks: int, most: int) -> ExpertCopies:
    """Choose copies of experts, up to `most` on each of `ranks` with equally many experts, so that none has much more
    rows than the mean.

    Again and again the fullest rank gives rows of its most chosen expert to the emptiest rank that may have a copy, as
    many as bring one of both to the mean.

    Example: rows 60, 20, 10, 10 of 4 experts on 4 ranks, up to one copy each: ranks 2 and 3 take over 15 rows of expert
    0 each, rank 1 takes over 5, and all have 25.
    """
    each = len(rows_E) // ranks
    left, mean = list(rows_E), -(-sum(rows_E) // ranks)
    loads = [sum(rows_E[rank * each : (rank + 1) * each]) for rank in range(ranks)]
    copies: list[list[int]] = [[] for _ in range(ranks)]
    given: dict[int, dict[int, int]] = {}
    while True:
        full = max(range(ranks), key=loads.__getitem__)
        if loads[full] <= (1 + TOLERATED_EXCESS) * mean:
            break
        expert = max(range(full * each, (full + 1) * each), key=left.__getitem__)
        takers = [rank for rank in range(ranks) if rank in given.get(expert, ()) or len(copies[rank]) < most]
        taker = min(takers, key=loads.__getitem__, default=full)
        moved = min(loads[full] - mean, mean - loads[taker], left[expert])
        if moved < max(1, LEAST_ROWS * mean):
            break
        holders = given.setdefault(expert, {full: 0})
        if taker not in holders:
            copies[taker].append(expert)
        holders[taker] = holders.get(taker, 0) + moved
        left[expert] -= moved
        loads[full] -= moved
        loads[taker] += moved
    rows = {expert: holders | {expert // each: left[expert]} for expert, holders in given.items()}
    return ExpertCopies(tuple(map(tuple, copies)), rows, tuple(loads))


def rows_from(source: int, wanted_P: Sequence[int], computed: Mapping[int, int]) -> dict[int, int]:
    """Return the rows of one expert that rank `source` sends to each rank that computes some.

    `wanted_P` are the rows of all ranks for this expert, `computed` those that each computes, as many altogether. A
    rank keeps its own where it can; others take what is left, in order.
    """
    left = dict(computed)
    kept = [min(count, left.get(rank, 0)) for rank, count in enumerate(wanted_P)]
    for rank, count in enumerate(kept):
        if count:
            left[rank] -= count
    for rank, count in enumerate(wanted_P):
        away = count - kept[rank]
        sent = {rank: kept[rank]} if kept[rank] else {}
        for holder in left:
            moved = min(away, left[holder])
            if moved:
                left[holder] -= moved
                away -= moved
                sent[holder] = sent.get(holder, 0) + moved
        if rank == source:
            return sent
    raise ValueError(f"rank {source} is not among {len(wanted_P)}")
