"""Sweeps: layouts of one model on the same devices, scored by their predicted ranking."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import inf
from statistics import mean

from muster.cost.memory.forecast import MEMORY_HEADROOM
from muster.validate.comparison import RowResult

MIN_LAYOUTS = 6
"""Minimum of timed layouts in a sweep."""
REPEATABILITY = 0.06
"""Relative difference of times up to which their order says little: repeated measurements of one configuration differ
by 1.4 to 6 %, as medians of the shipped sources, and up to 11 %."""
MIN_SMALL_LAYOUTS = 2
"""Minimum of a small sweep, which is reported apart: two layouts show if the better one is recognized."""

_COMMON_COLUMNS = (
    *("source", "model_name", "layers", "hidden", "vocab", "seq_len", "gpu", "n_gpus", "global_batch", "precision"),
    *("attn_kernel", "compile", "async_tp", "software"),
)
"""Columns that rows of a sweep have in common; recompute is part of a layout."""


@dataclass(frozen=True)
class Sweep:
    """Scores of one sweep."""

    name: str
    layouts: int
    """Number of timed layouts."""
    failed: int
    """Number of layouts that ran out of memory; ranking one first scores 0."""
    rank_correlation: float
    """Spearman's rank correlation of predicted and measured step times."""
    correlation_apart: float
    """The same over those pairs whose measured times differ by more than repeated measurements do."""
    correlation_in_rounds: float | None
    """`correlation_apart` where values are predicted as the multiples of a part of a step that their digits say they
    are; None for a sweep without such values."""
    first_reaches: float
    """Throughput of the layout ranked first, as a fraction of the best measured; 0 where it ran out of memory."""
    first_timed_reaches: float
    """Same, among the layouts that ran."""
    three_reach: float
    """Throughput of the best of the first three, as a fraction of the best measured."""
    misordered: int
    """Pairs of layouts in the wrong order whose measured times differ by more than repeated measurements do."""

    @property
    def pairs(self) -> int:
        """Number of pairs of timed layouts."""
        return self.layouts * (self.layouts - 1) // 2

    @property
    def best_in_first_three(self) -> bool:
        """True where the best layout is among the first three."""
        return self.three_reach == 1.0


def score_sweeps(results: Iterable[RowResult], least: int = MIN_LAYOUTS, most: float = inf) -> list[Sweep]:
    """Score every sweep with `least` to `most` timed layouts."""
    groups = sweep_groups(results).items()
    return [sweep for key, group in groups if (sweep := _sweep(key, group, least, most)) is not None]


def sweep_groups(results: Iterable[RowResult]) -> dict[tuple[object, ...], list[RowResult]]:
    """Return the layouts of each sweep whose outcome is known."""
    groups: dict[tuple[object, ...], list[RowResult]] = defaultdict(list)
    for result in results:
        if result.prediction is not None and result.succeeded is not None:
            groups[tuple(getattr(result.row, name) for name in _COMMON_COLUMNS)].append(result)
    return groups


def _sweep(key: tuple[object, ...], group: Sequence[RowResult], least: int, most: float) -> Sweep | None:
    """Score a group of layouts; None where their number is out of range."""
    timed = distinct_plans([result for result in group if result.is_predicted])
    if not least <= len(timed) <= most:
        return None
    failed = distinct_plans([result for result in group if result.succeeded is False])
    measured = [_measured_s(result) for result in timed]
    best_s = min(measured)
    ranked = sorted((*timed, *failed), key=_rank)
    speeds = [best_s / _measured_s(result) if result.is_predicted else 0.0 for result in ranked]
    words = dict(zip(_COMMON_COLUMNS, key, strict=True))
    name = (
        f"{words['model_name']}, {words['n_gpus']} × {words['gpu']}, sequences of {words['seq_len']},"
        f" {words['attn_kernel'] or 'attention not stated'}"
    )
    predicted = [result.predicted_s for result in timed]
    correlations = spearman(predicted, measured), correlation_apart(predicted, measured), None
    if all(result.rounds_s is not None for result in timed):
        correlations = *correlations[:2], correlation_apart([result.rounds_s or 0.0 for result in timed], measured)
    ran = next(speed for speed in speeds if speed)
    counts = len(timed), len(failed)
    return Sweep(name, *counts, *correlations, speeds[0], ran, max(speeds[:3]), _count_misordered(timed))


def _count_misordered(timed: Sequence[RowResult]) -> int:
    """Return the number of pairs in the wrong order whose measured times differ by more than `REPEATABILITY`."""
    pairs = [sorted(pair, key=_measured_s) for pair in combinations(timed, 2)]
    apart = [pair for pair in pairs if _measured_s(pair[1]) > (1 + REPEATABILITY) * _measured_s(pair[0])]
    return sum(fast.predicted_s > slow.predicted_s for fast, slow in apart)


def _rank(result: RowResult) -> tuple[bool, bool, float]:
    """Return the sort key of a ranking: layouts with the planner's headroom first, then others that fit, each by
    predicted time."""
    answer = result.prediction
    assert answer is not None
    full = answer.capacity_bytes is not None and answer.peak_bytes > (1 - MEMORY_HEADROOM) * answer.capacity_bytes
    return answer.fits is False, full, answer.step_time_s


def distinct_plans(results: Sequence[RowResult]) -> list[RowResult]:
    """Return one row for each plan; of a layout measured twice the first."""
    found: dict[str, RowResult] = {}
    for result in results:
        assert result.inputs is not None
        found.setdefault(repr(result.case.plan), result)
    return list(found.values())


def _measured_s(result: RowResult) -> float:
    assert result.measured_s is not None
    return result.measured_s


def spearman(one: Sequence[float], other: Sequence[float]) -> float:
    """Return Spearman's rank correlation, 0 where either side is constant. Equal values share their mean rank."""
    a = _ranks(one)
    b = _ranks(other)
    middle = mean(a)
    above = sum((x - middle) * (y - middle) for x, y in zip(a, b, strict=True))
    below = (sum((x - middle) ** 2 for x in a) * sum((y - middle) ** 2 for y in b)) ** 0.5
    return above / below if below else 0.0


def correlation_apart(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """Return Spearman's rank correlation over the pairs whose measured times differ by more than `REPEATABILITY`; 0
    where there are none.

    Spearman's coefficient is Daniels' general one with the differences of ranks for each pair (M. G. Kendall, Rank
    Correlation Methods, chapter 2), of which pairs that no measurement tells apart are left out.
    """
    a, b = _ranks(predicted), _ranks(measured)
    pairs = [
        (a[one] - a[other], b[one] - b[other])
        for one, other in combinations(range(len(measured)), 2)
        if max(measured[one], measured[other]) > (1 + REPEATABILITY) * min(measured[one], measured[other])
    ]
    above = sum(x * y for x, y in pairs)
    below = (sum(x * x for x, _ in pairs) * sum(y * y for _, y in pairs)) ** 0.5
    return above / below if below else 0.0


def _ranks(values: Sequence[float]) -> list[float]:
    """Return the rank of each value; equal values share their mean rank."""
    order = sorted(values)
    return [order.index(value) + (order.count(value) - 1) / 2 for value in values]
