"""Spans of compute and of possible waits on each rank, as arrays, and the division of a rank's time among them."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Column = NDArray[np.float64]

P2P, BUBBLE = "hop", "bubble"
_ROUNDING = 1e-12
"""Part of a timeline's length below which what is left of a rank's idle time is rounding."""


@dataclass(frozen=True, slots=True)
class RankSpans:
    """Spans of one rank in a step, in seconds."""

    compute_s: Mapping[str, float]
    """Kind of compute instruction → sum of its durations."""
    begin_s: Column
    """Begins of the compute instructions in order; they don't overlap."""
    end_s: Column
    """Ends of the compute instructions."""
    waits: Sequence[tuple[str, Column, Column]]
    """(kind or P2P, begins, ends) of possible waits; idle time that lies in several belongs to the first."""


def time_by_part(ranks: Iterable[RankSpans], first_s: float, last_s: float) -> dict[str, float]:
    """Return kind, P2P or BUBBLE → seconds, as means over the ranks; they sum to last_s − first_s.

    A moment of a rank belongs to its compute instruction, else to the first of its waits that covers it, else to the
    bubble. Example: with compute in [0, 2] and [5, 6] and a transfer in [1, 4], the transfer gets the 2 s from 2 to 4,
    and the bubble the 1 s from 4 to 5.
    """
    total_s: defaultdict[str, float] = defaultdict(float)
    count = 0
    for rank in ranks:
        count += 1
        for kind, compute_s in rank.compute_s.items():
            total_s[kind] += compute_s
        edges = np.concatenate(([first_s], rank.begin_s, rank.end_s, [last_s]))
        edges.sort(kind="stable")
        idle = np.zeros(len(edges))
        # Begins and ends alternate, so every second interval between edges is idle.
        np.cumsum(np.where(np.arange(1, len(edges)) % 2, np.diff(edges), 0.0), out=idle[1:])
        begins_s, ends_s, covered_s = np.empty(0), np.empty(0), 0.0
        for kind, more_begin_s, more_end_s in rank.waits:
            begins_s, ends_s = merge_spans(np.append(begins_s, more_begin_s), np.append(ends_s, more_end_s))
            before_s = covered_s
            covered_s = float((np.interp(ends_s, edges, idle) - np.interp(begins_s, edges, idle)).sum())
            total_s[kind] += covered_s - before_s
        rest_s = float(idle[-1]) - covered_s
        total_s[BUBBLE] += rest_s if rest_s > _ROUNDING * (last_s - first_s) else 0.0
    return {part: sum_s / count for part, sum_s in total_s.items()} if count else {}


def merge_spans(begin_s: Column, end_s: Column) -> tuple[Column, Column]:
    """Return the union of spans as disjoint ascending spans; a span that ends before it begins is empty."""
    real = end_s > begin_s
    order = np.argsort(begin_s[real], kind="stable")
    begin_s, end_s = begin_s[real][order], np.maximum.accumulate(end_s[real][order])
    starts = np.ones(len(begin_s), bool)
    starts[1:] = begin_s[1:] > end_s[:-1]
    return begin_s[starts], end_s[np.append(starts[1:], True)] if len(begin_s) else end_s
