"""Scores of predictions against measurements."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import mean, median

from muster.validate.comparison import NEAR_CAPACITY, RowResult
from muster.validate.sources import offloads_activations
from muster.validate.table import MeasurementRow

_NON_CONFIGURATION_COLUMNS = (
    "file",
    "line",
    "number",
    "problem",
    "software",
    "value",
    "outcome",
    "peak_mem_gb",
    "notes",
)
"""Columns that may differ between rows of one configuration."""


def configuration_of(row: MeasurementRow) -> tuple[object, ...]:
    """Return the key of a row's configuration, the same for all releases of the software that measured it."""
    return tuple(
        getattr(row, name) for name in MeasurementRow.__dataclass_fields__ if name not in _NON_CONFIGURATION_COLUMNS
    )


@dataclass(frozen=True)
class ErrorScores:
    """Relative errors of the step time in per cent; equal configurations count once."""

    rows: int
    predicted: int
    families: int
    mape: float | None
    median_ape: float | None
    bias: float | None


@dataclass(frozen=True)
class IntervalScores:
    """Scores of rows with open choices."""

    rows: int
    width: float | None
    """Median of (longest − shortest) / shortest over the choices, in per cent."""
    coverage: float | None
    """Percentage of rows whose measured time lies within the interval."""


def score_errors(
    results: Iterable[RowResult], error: Callable[[RowResult], float | None] = lambda r: r.error
) -> ErrorScores:
    """Score the timed results; `error` returns the relative error of one of them."""
    timed = [result for result in results if result.is_timed]
    found = [result for result in timed if result.is_predicted]
    families: dict[object, list[float]] = defaultdict(list)
    for result in found:
        if (value := error(result)) is not None:
            families[configuration_of(result.row)].append(100 * value)
    apes = [mean(map(abs, errors)) for errors in families.values()]
    return ErrorScores(
        rows=len(timed),
        predicted=len(found),
        families=len(families),
        mape=mean(apes) if apes else None,
        median_ape=median(apes) if apes else None,
        bias=mean(mean(errors) for errors in families.values()) if apes else None,
    )


def score_intervals(results: Iterable[RowResult]) -> IntervalScores:
    """Score the rows with open choices."""
    found = [result for result in results if result.is_predicted and not result.is_fully_specified]
    widths = []
    inside = 0
    for result in found:
        low, high = result.interval_s
        widths.append(100 * (high / low - 1))
        assert result.measured_s is not None
        inside += low <= result.measured_s <= high
    share = 100 * inside / len(found) if found else None
    return IntervalScores(len(found), median(widths) if widths else None, share)


def worst_results(results: Iterable[RowResult], count: int) -> list[RowResult]:
    """Return the predicted rows with the largest errors, one for each configuration."""
    best: dict[object, RowResult] = {}
    for result in sorted((r for r in results if r.is_predicted), key=lambda r: -abs(r.error)):
        best.setdefault(configuration_of(result.row), result)
    return list(best.values())[:count]


# ----------------------------------------------------------------------------------------------------------------------
# Does it fit?


@dataclass(frozen=True)
class FitScores:
    """Predicted against actual out-of-memory failures; rows near the capacity are counted apart."""

    oom_predicted_oom: int
    oom_predicted_fit: int
    success_predicted_fit: int
    success_predicted_oom: int
    balanced_accuracy: float | None
    """Mean of both recalls in per cent, without rows near the capacity; None unless both outcomes occurred."""
    near: tuple[RowResult, ...]
    """Rows predicted within 5 % of the capacity, which are not in the counts."""
    undecided: int
    """Number of rows left out because their open choices decide."""

    @property
    def wrong(self) -> int:
        """Number of wrong predictions."""
        return self.oom_predicted_fit + self.success_predicted_oom


def score_fits(results: Iterable[RowResult]) -> FitScores:
    """Score all results with a known outcome."""
    counts: dict[tuple[bool, bool], int] = defaultdict(int)
    near = []
    undecided = 0
    for result in results:
        answer = result.prediction
        worked = result.succeeded
        if answer is None or worked is None or answer.fits is None or answer.capacity_bytes is None:
            continue
        if offloads_activations(result.row):
            undecided += 1
            continue
        assert result.predicted is not None
        if result.predicted.is_fit_open:
            undecided += 1
        elif abs(answer.peak_bytes / answer.capacity_bytes - 1) <= NEAR_CAPACITY:
            near.append(result)
        else:
            counts[worked, answer.fits] += 1
    ooms = counts[False, False] + counts[False, True]
    successes = counts[True, True] + counts[True, False]
    balanced = 50 * (counts[False, False] / ooms + counts[True, True] / successes) if ooms and successes else None
    return FitScores(
        counts[False, False],
        counts[False, True],
        counts[True, True],
        counts[True, False],
        balanced,
        tuple(near),
        undecided,
    )


# ----------------------------------------------------------------------------------------------------------------------
# Memory


@dataclass(frozen=True)
class MemoryScores:
    """Relative errors of the peak memory in per cent: of fully specified rows, and of those with open choices.

    Sources mean different things by peak: allocated or reserved, in 10⁹ bytes or GiB; GiB is assumed.
    """

    rows: int
    mape: float | None
    bias: float | None
    open_rows: int
    open_mape: float | None
    open_bias: float | None

    @property
    def any_rows(self) -> bool:
        """True where any row states its peak memory and is predicted."""
        return self.rows + self.open_rows > 0


def score_memory(results: Sequence[RowResult]) -> MemoryScores:
    """Score the rows that state their peak memory."""
    scores: list[float | None] = []
    for specified in (True, False):
        rows = (result for result in results if result.is_fully_specified is specified)
        errors = [100 * error for error in map(memory_error, rows) if error is not None]
        scores += [len(errors), mean(map(abs, errors)) if errors else None, mean(errors) if errors else None]
    return MemoryScores(*scores)  # type: ignore[arg-type]


def memory_error(result: RowResult) -> float | None:
    """Return (predicted − measured) / measured peak memory; None where the row doesn't state it, isn't predicted, or
    kept activations elsewhere."""
    said = result.measured_memory_gib
    if not said or result.prediction is None or offloads_activations(result.row):
        return None
    return result.prediction.peak_bytes / (said * 2**30) - 1
