"""Interval around the predicted step time of a row: from what the row leaves open, and from the errors on like rows."""

from muster.cost.uncertainty import ErrorInterval, step_time_interval
from muster.validate.comparison import RowResult

NEVER_MEASURED = "nothing like it was ever measured"
"""Words for a prediction without an interval."""


def row_interval(result: RowResult) -> tuple[float, float, str]:
    """Return the shortest and the longest step time that 9 of 10 rows like a predicted one take, and the measurements
    that say so: the interval over the row's open choices, widened by the errors on like rows of other sources.

    Where nothing like it was ever measured, the interval is that of the open choices alone, and the words say so.
    """
    low_s, high_s = result.interval_s
    found = _error_interval(result)
    if found is None:
        return low_s, high_s, NEVER_MEASURED
    return low_s * found.low, high_s * found.high, found.source


def holds_measured(result: RowResult) -> bool:
    """Return True if the measured time of a predicted row lies in its interval."""
    assert result.measured_s is not None
    low_s, high_s, _ = row_interval(result)
    return low_s <= result.measured_s <= high_s


def _error_interval(result: RowResult) -> ErrorInterval | None:
    assert result.inputs is not None
    return step_time_interval(result.case.model, result.case.plan, result.inputs.cluster, left_out=result.row.source)
