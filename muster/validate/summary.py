"""Scores of a whole table, or of all shipped tables."""

import csv
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib.resources import files
from itertools import count
from pathlib import Path
from statistics import mean
from typing import Any

from muster.spec.device import DeviceSpec
from muster.validate.axis_bias import AxisBias, axis_biases
from muster.validate.comparison import Predictor, RowResult, predict_rows_both_ways
from muster.validate.formulas import UNTIMED_METRICS
from muster.validate.kinds import KindScores, score_kinds
from muster.validate.row_table import row_table
from muster.validate.score import (
    ErrorScores,
    FitScores,
    IntervalScores,
    MemoryScores,
    score_errors,
    score_fits,
    score_intervals,
    score_memory,
    worst_results,
)
from muster.validate.sweeps import MIN_LAYOUTS, MIN_SMALL_LAYOUTS, Sweep, score_sweeps
from muster.validate.table import MeasurementRow, parse_table, read_table

_BASELINE = "calculon_baseline"
"""File name of Calculon's errors."""
_WORST = 15
"""Number of worst rows listed."""


@dataclass(frozen=True)
class GroupScores:
    """Scores of a group of rows."""

    every: ErrorScores
    """Errors of all rows; rows with open choices count by their representative case."""
    specified: ErrorScores
    """Errors of fully specified rows."""
    open: ErrorScores
    """Errors of rows with open choices."""
    interval: IntervalScores
    outcome: FitScores
    memory: MemoryScores
    calculon: ErrorScores
    """Calculon's errors on the rows that it can express."""
    beside_calculon: ErrorScores
    """Muster's errors on the same rows."""
    uncalibrated: ErrorScores | None
    """Errors of all rows predicted without their own source's contribution to the constants; None where there was
    none."""


@dataclass(frozen=True)
class Summary:
    """Scores of all rows and of each source."""

    results: tuple[RowResult, ...]
    overall: GroupScores
    by_source: dict[str, GroupScores]
    by_kind: dict[str, KindScores]
    by_device: dict[str, ErrorScores]
    """Device of the catalogue → errors of its rows."""
    by_vendor: dict[str, ErrorScores]
    """First word of the device's title → errors of its rows."""
    outcome_by_device: dict[str, FitScores]
    """Device → predicted against actual out-of-memory failures."""
    sweeps: tuple[Sweep, ...]
    small_sweeps: tuple[Sweep, ...]
    """Sweeps with fewer layouts than a full sweep needs."""
    axis_biases: tuple[AxisBias, ...]
    worst: tuple[RowResult, ...]
    uncalibrated: tuple[RowResult, ...] = ()
    """Rows of calibration sources, predicted without their contribution."""

    @property
    def unpredicted(self) -> list[RowResult]:
        """Rows that count but couldn't be predicted, and outcomes that couldn't be read."""
        return [result for result in self.results if _is_scored(result) and result.reason]

    @property
    def not_scored(self) -> dict[str, int]:
        """Number of rows by metric that is no step time, throughput, outcome or peak memory, or whose FLOPs have no
        known formula."""
        return dict(Counter(result.row.metric for result in self.results if not _is_scored(result)))


def _is_scored(result: RowResult) -> bool:
    return result.is_timed or result.row.metric in UNTIMED_METRICS


def shipped_rows() -> list[MeasurementRow]:
    """Return the rows of the tables that come with Muster."""
    folder = files("muster.catalog") / "measurements"
    names = sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(".csv"))
    texts = ((name, (folder / name).read_text(encoding="utf-8")) for name in names if not name.startswith(_BASELINE))
    return [row for name, text in texts for row in parse_table(text, name)]


def validate_table(
    path: Path | None = None,
    predictor: Predictor | None = None,
    processes: int = 1,
    on_progress: Callable[[int, int], None] | None = None,
) -> Summary:
    """Predict and score each row of a table, or of the shipped tables.

    `on_progress` is called with the number of predicted rows and that of all. Raises ConfigError where the table can't
    be read.
    """
    rows = shipped_rows() if path is None else read_table(path)
    numbers = count(1)

    def on_row() -> None:
        if on_progress is not None:
            on_progress(next(numbers), len(rows))

    return summarize(*predict_rows_both_ways(rows, predictor, processes, on_row))


def summarize(results: Sequence[RowResult], uncalibrated: Sequence[RowResult] = ()) -> Summary:
    """Return the scores of results; `uncalibrated` are results of calibration sources predicted without their
    contribution."""
    names = dict.fromkeys(result.row.source for result in results)
    by_source = {name: score_group(_of_source(results, name), _of_source(uncalibrated, name)) for name in names}
    used = {result.row.source for result in uncalibrated}
    others = [result for result in results if result.row.source not in used]
    overall = score_group(results, [*others, *uncalibrated] if uncalibrated else [])
    small = score_sweeps(results, MIN_SMALL_LAYOUTS, MIN_LAYOUTS - 1)
    wrong = worst_results(results, _WORST)
    sweeps = tuple(score_sweeps(results))
    tilts = tuple(axis_biases(results))
    return Summary(
        tuple(results),
        overall,
        by_source,
        score_kinds(results, uncalibrated),
        _errors_by(results, lambda device: device.name),
        _errors_by(results, lambda device: (device.title or device.name).split()[0]),
        _outcome_by_device(results),
        sweeps,
        tuple(small),
        tilts,
        tuple(wrong),
        tuple(uncalibrated),
    )


def _errors_by(results: Sequence[RowResult], key: Callable[[DeviceSpec], str]) -> dict[str, ErrorScores]:
    """Return the errors of the predicted rows of each kind of device."""
    kinds: dict[str, list[RowResult]] = defaultdict(list)
    for result in results:
        if result.inputs is not None and result.is_predicted:
            kinds[key(result.inputs.cluster.device)].append(result)
    return {name: score_errors(kinds[name]) for name in sorted(kinds)}


def _outcome_by_device(results: Sequence[RowResult]) -> dict[str, FitScores]:
    """Return what was said of the memory of each device's rows."""
    kinds: dict[str, list[RowResult]] = defaultdict(list)
    for result in results:
        if result.inputs is not None:
            kinds[result.inputs.cluster.device.name].append(result)
    return {name: score_fits(kinds[name]) for name in sorted(kinds)}


def _of_source(results: Sequence[RowResult], name: str) -> list[RowResult]:
    return [result for result in results if result.row.source == name]


def score_group(results: Sequence[RowResult], uncalibrated: Sequence[RowResult] = ()) -> GroupScores:
    """Return the scores of some rows."""
    known = [result for result in results if result.is_predicted and _calculon_error(result) is not None]
    return GroupScores(
        every=score_errors(results),
        specified=score_errors(r for r in results if r.is_predicted and r.is_fully_specified),
        open=score_errors(r for r in results if r.is_predicted and not r.is_fully_specified),
        interval=score_intervals(results),
        outcome=score_fits(results),
        memory=score_memory(results),
        calculon=score_errors(known, _calculon_error),
        beside_calculon=score_errors(known),
        uncalibrated=score_errors(uncalibrated) if uncalibrated else None,
    )


# ----------------------------------------------------------------------------------------------------------------------
# Calculon


@cache
def _baseline() -> dict[tuple[str, int], float]:
    """Return Calculon's relative error of the step time by (table, row)."""
    text = (files("muster.catalog") / "measurements" / f"{_BASELINE}.csv").read_text(encoding="utf-8")
    rows = csv.DictReader(text.splitlines())
    return {(row["file"], int(row["data_row"])): float(row["rel_error"]) for row in rows if row["rel_error"]}


def _calculon_error(result: RowResult) -> float | None:
    return _baseline().get((result.row.file, result.row.number))


# ----------------------------------------------------------------------------------------------------------------------
# Plain data


def to_json(summary: Summary) -> dict[str, Any]:
    """Return plain data for JSON: errors, widths and fractions in per cent; null where there is nothing."""
    return {
        "version": 1,
        "overall": _group_json(summary.overall),
        "by_source": {name: _group_json(group) for name, group in summary.by_source.items()},
        "by_kind": {name: asdict(scores) for name, scores in summary.by_kind.items()},
        "by_device": {name: asdict(errors) for name, errors in summary.by_device.items()},
        "outcome_by_device": {name: _outcome_json(one) for name, one in summary.outcome_by_device.items()},
        "by_vendor": {name: asdict(errors) for name, errors in summary.by_vendor.items()},
        "sweeps": _sweeps_json(summary.sweeps),
        "small_sweeps": _sweeps_json(summary.small_sweeps),
        "tilts": [asdict(tilt) for tilt in summary.axis_biases],
        "worst": [_row_json(result) for result in summary.worst],
        "unpredicted": [{"row": result.row.location, "why": result.reason} for result in summary.unpredicted],
        "left_out": summary.not_scored,
        "rows": row_table(summary.results),
    }


def _group_json(group: GroupScores) -> dict[str, Any]:
    return {
        **asdict(group.every),
        "fully_specified": asdict(group.specified),
        "unstated": {**asdict(group.open), **asdict(group.interval)},
        "outcome": _outcome_json(group.outcome),
        "memory": asdict(group.memory),
        "calculon": asdict(group.calculon),
        "beside_calculon": asdict(group.beside_calculon),
        "left_out_of_calibration": asdict(group.uncalibrated) if group.uncalibrated else None,
    }


def _outcome_json(outcome: FitScores) -> dict[str, Any]:
    counts = {key: value for key, value in vars(outcome).items() if key != "near"}
    return {**counts, "near_capacity": [result.row.location for result in outcome.near]}


def _sweeps_json(sweeps: Sequence[Sweep]) -> dict[str, Any]:
    """Return means, minima and each sweep's scores."""
    reaches = [sweep.first_reaches for sweep in sweeps]
    return {
        "count": len(sweeps),
        "rank_correlation": mean(sweep.rank_correlation for sweep in sweeps) if sweeps else None,
        "least_rank_correlation": min((sweep.rank_correlation for sweep in sweeps), default=None),
        "first_reaches": mean(reaches) if reaches else None,
        "first_timed_reaches": mean(sweep.first_timed_reaches for sweep in sweeps) if sweeps else None,
        "least_first_timed_reaches": min((sweep.first_timed_reaches for sweep in sweeps), default=None),
        "least_first_reaches": min(reaches, default=None),
        "three_reach": mean(sweep.three_reach for sweep in sweeps) if sweeps else None,
        "least_three_reach": min((sweep.three_reach for sweep in sweeps), default=None),
        "best_in_first_three": mean(sweep.best_in_first_three for sweep in sweeps) if sweeps else None,
        "first_out_of_memory": sum(not reach for reach in reaches),
        "each": [{**asdict(sweep), "best_in_first_three": sweep.best_in_first_three} for sweep in sweeps],
    }


def _row_json(result: RowResult) -> dict[str, Any]:
    assert result.inputs is not None
    low_s, high_s = result.interval_s
    return {
        "row": result.row.location,
        "source": result.row.source,
        "model": result.row.model_name,
        "measured_s": result.measured_s,
        "predicted_s": result.predicted_s,
        "low_s": low_s,
        "high_s": high_s,
        "error": 100 * result.error,
        "unstated": list(result.inputs.unstated),
    }


def places_by_reason(results: Iterable[RowResult]) -> dict[str, list[str]]:
    """Return the locations of unpredicted rows by reason."""
    found: dict[str, list[str]] = {}
    for result in results:
        found.setdefault(result.reason, []).append(result.row.location)
    return found
