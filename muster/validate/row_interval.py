"""Interval around the predicted step time of a row: from what the row leaves open, and from the errors on like rows."""

from collections.abc import Sequence

from muster.cost.uncertainty import step_time_interval
from muster.validate.comparison import RowResult

NEVER_MEASURED = "nothing like it was ever measured"
"""Words for a prediction without an interval."""

Interval = tuple[float | None, float | None, str]
"""Shortest and longest step time in seconds, and the measurements that say so; None where there are none."""


def row_intervals(results: Sequence[RowResult]) -> list[Interval | None]:
    """Return for each predicted row the shortest and the longest step time that 9 of 10 rows like it take: the interval
    over the row's open choices, widened by the errors on like rows of other sources; None where it isn't predicted.

    Where nothing like it was ever measured there are no ends, and the words say so.
    """
    known: dict[tuple[int, str], Interval] = {}  # equal rows share their prediction
    found = []
    for result in results:
        key = id(result.predicted), result.row.source
        if result.predicted is not None and key not in known:
            known[key] = _row_interval(result)
        found.append(known.get(key))
    return found


def _row_interval(result: RowResult) -> Interval:
    assert result.inputs is not None
    low_s, high_s = result.interval_s
    case = result.case
    found = step_time_interval(case.model, case.plan, result.inputs.cluster, left_out=result.row.source)
    if found is None:
        return None, None, NEVER_MEASURED
    return low_s * found.low, high_s * found.high, found.source
