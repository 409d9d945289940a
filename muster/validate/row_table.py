"""Every row of a table beside its prediction, as plain data and as CSV."""

import csv
from collections.abc import Sequence
from io import StringIO
from typing import Any

from muster.spec.plan_name import format_plan_name
from muster.validate.comparison import RowResult
from muster.validate.formulas import FLOP_METRICS, FORMULA_WORDS
from muster.validate.row_interval import Interval, row_intervals
from muster.validate.sources import offloads_activations, source_of_row

COLUMNS = (
    *("row", "source", "model", "gpu", "n_gpus", "metric", "value", "plan", "predicted_s", "low_s", "high_s"),
    *("choices_low_s", "choices_high_s", "interval_from", "measured_s", "error", "predicted_memory_gib"),
    *("measured_memory_gib", "fits", "assumed", "why"),
)
"""Keys of a row, in order. `low_s` and `high_s` hold 9 of 10 measured times: `choices_low_s` and `choices_high_s` over
what the row leaves open, widened by the errors that `interval_from` names; they are empty where nothing was measured.
`error` is in per cent of the measured time, `why` says why a row isn't predicted."""


def row_table(results: Sequence[RowResult]) -> list[dict[str, Any]]:
    """Return a dict with `COLUMNS` for each row; null where there is nothing."""
    names: dict[int, str] = {}  # equal rows share their plan
    intervals = row_intervals(results)
    return [_row(result, interval, names) for result, interval in zip(results, intervals, strict=True)]


def _row(result: RowResult, interval: Interval | None, names: dict[int, str]) -> dict[str, Any]:
    """Return the cells of a row; `names` keeps those of plans, by their identity."""
    row, answer, inputs = result.row, result.prediction, result.inputs
    found: dict[str, Any] = dict.fromkeys(COLUMNS)
    found |= {"row": row.location, "source": row.source, "model": row.model_name, "gpu": row.gpu}
    found |= {"n_gpus": row.n_gpus, "metric": row.metric, "value": row.outcome or row.value}
    found |= {"why": result.reason or None, "assumed": {}, "measured_s": result.measured_s}
    found["measured_memory_gib"] = result.measured_memory_gib
    if answer is None or inputs is None or interval is None:
        return found
    found["low_s"], found["high_s"], found["interval_from"] = interval
    case = result.case
    if id(case.plan) not in names:
        names[id(case.plan)] = format_plan_name(case.plan)
    found["plan"] = names[id(case.plan)]
    found["predicted_s"] = answer.step_time_s
    found["choices_low_s"], found["choices_high_s"] = result.interval_s
    found["error"] = 100 * result.error if result.is_predicted else None
    if not offloads_activations(row):
        found |= {"predicted_memory_gib": answer.peak_bytes / 2**30, "fits": answer.fits}
    found["assumed"] = {
        column: "the device's fastest" if value == "None" else value
        for column, value in case.chosen
        if column in inputs.unstated
    }
    found["assumed"] |= dict(inputs.assumed)
    if row.assumed:
        column, _, words = row.assumed.partition(" ")
        found["assumed"][column] = words
    formula = source_of_row(row).formula
    if row.metric in FLOP_METRICS and formula is not None:
        found["assumed"]["FLOPs"] = FORMULA_WORDS[formula]
    return found


def row_table_csv(results: Sequence[RowResult]) -> str:
    """Return every row with its prediction as CSV with a header; cells are empty where there is nothing."""
    lines = []
    for found in row_table(results):
        said = "; ".join(f"{column} {value}" for column, value in found["assumed"].items())
        lines.append({name: "" if value is None else value for name, value in (found | {"assumed": said}).items()})
    text = StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()
