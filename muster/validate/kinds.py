"""Scores by kind of run: what is computed in which precision, on which machines, over how long sequences."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from muster.spec.plan import SCALED_PRECISIONS
from muster.validate.comparison import RowResult
from muster.validate.row_interval import Interval, row_intervals
from muster.validate.score import ErrorScores, score_errors

LONG_CONTEXT = 32_768
"""Tokens of a sequence from which a run is one of long context."""


def _is_fp8(result: RowResult) -> bool:
    return result.case.plan.precision in SCALED_PRECISIONS


def _has_experts(result: RowResult) -> bool:
    return result.case.model.moe is not None


def _is_blackwell(result: RowResult) -> bool:
    assert result.inputs is not None
    return result.inputs.cluster.device.name.startswith(("b200", "b300", "gb200", "gb300"))


def _is_long(result: RowResult) -> bool:
    assert result.inputs is not None
    return result.inputs.workload.seq_len >= LONG_CONTEXT


def _holds_measured(result: RowResult, interval: Interval | None) -> bool:
    """Return True if the measured time of a predicted row lies in its interval."""
    assert interval is not None
    assert result.measured_s is not None
    low_s, high_s, _ = interval
    return low_s is not None and high_s is not None and low_s <= result.measured_s <= high_s


KINDS: dict[str, Callable[[RowResult], bool]] = {
    "dense": lambda result: not _has_experts(result),
    "mixture of experts": _has_experts,
    "fp8": _is_fp8,
    "Blackwell": _is_blackwell,
    f"sequences from {LONG_CONTEXT:,} tokens": _is_long,
    "several context-parallel ranks": lambda result: result.case.plan.cp > 1,
}
"""Kinds of runs by their names; a run may be of several."""


@dataclass(frozen=True)
class KindScores:
    """Scores of the predicted rows of one kind."""

    sources: int
    every: ErrorScores
    left_out: ErrorScores
    """Errors with the constants as they would be without each row's own source."""
    coverage: float
    """Percentage of rows whose measured time lies in the interval that is taken from other sources."""


def score_kinds(results: Sequence[RowResult], uncalibrated: Sequence[RowResult]) -> dict[str, KindScores]:
    """Return the scores of each kind that has predicted rows; `uncalibrated` are the rows of calibration sources,
    predicted without their contribution."""
    used = {result.row.source for result in uncalibrated}
    without = [*(result for result in results if result.row.source not in used), *uncalibrated]
    predicted, without = ([one for one in rows if one.is_predicted] for rows in (results, without))
    pairs = zip(predicted, row_intervals(predicted), strict=True)
    inside = {id(result): _holds_measured(result, interval) for result, interval in pairs}
    scores = {}
    for name, belongs in KINDS.items():
        rows = [result for result in predicted if belongs(result)]
        if rows:
            scores[name] = KindScores(
                len({result.row.source for result in rows}),
                score_errors(rows),
                score_errors(result for result in without if belongs(result)),
                100 * sum(inside[id(result)] for result in rows) / len(rows),
            )
    return scores
