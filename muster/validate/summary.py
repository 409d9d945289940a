"""All scores of a table, or of the shipped ones, as one value."""

import csv
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from statistics import mean
from typing import Any

from muster.validate.predicted import Predictor, Result, results_of
from muster.validate.score import (
    Errors,
    Interval,
    MemoryErrors,
    Outcome,
    errors_of,
    interval_of,
    memory_errors,
    outcome_of,
    worst,
)
from muster.validate.sources import source_of_row
from muster.validate.sweeps import FEWEST_LAYOUTS, LEAST_LAYOUTS, Sweep, sweeps_of
from muster.validate.table import Row, parse_table, read_table
from muster.validate.tilts import Tilt, tilts_of

_BASELINE = "calculon_baseline"
_WORST = 15


@dataclass(frozen=True)
class Group:
    """The scores of some rows."""

    every: Errors
    """Of all rows; where something is left open, of the case that stands for the row."""
    specified: Errors
    """Of the rows that leave nothing open."""
    open: Errors
    """Of the others."""
    interval: Interval
    outcome: Outcome
    memory: MemoryErrors
    calculon: Errors
    """Calculon's errors, on the rows that it can express."""
    beside_calculon: Errors
    """Muster's on the same rows."""
    left_out: Errors | None
    """Of all rows, each predicted without what was set with its own source's help; None where nothing was."""


@dataclass(frozen=True)
class Summary:
    """The scores of all rows, and of each source's."""

    results: tuple[Result, ...]
    overall: Group
    by_source: dict[str, Group]
    sweeps: tuple[Sweep, ...]
    small_sweeps: tuple[Sweep, ...]
    """Those with fewer layouts than a sweep needs."""
    tilts: tuple[Tilt, ...]
    worst: tuple[Result, ...]

    @property
    def unpredicted(self) -> list[Result]:
        """Rows that count but couldn't be predicted, and outcomes that couldn't be read."""
        scored = (result for result in self.results if result.is_timed or result.row.metric == "outcome")
        return [result for result in scored if result.reason]

    @property
    def left_out(self) -> dict[str, int]:
        """Metric → rows that are no step time, throughput or outcome, or whose FLOPs nobody says how to count."""
        return dict(Counter(r.row.metric for r in self.results if not r.is_timed and r.row.metric != "outcome"))


def shipped_tables() -> list[Row]:
    """The rows of the tables that come with Muster."""
    folder = files("muster.catalog") / "measurements"
    names = sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(".csv"))
    texts = ((name, (folder / name).read_text(encoding="utf-8")) for name in names if not name.startswith(_BASELINE))
    return [row for name, text in texts for row in parse_table(text, name)]


def validate(path: Path | None = None, predictor: Predictor | None = None) -> Summary:
    """Predicts each row of a table, None: of the shipped ones, and scores the predictions.

    Raises ConfigError where the table can't be read.
    """
    rows = shipped_tables() if path is None else read_table(path)
    used = [row for row in rows if source_of_row(row).without]
    return summarize(results_of(rows, predictor), results_of(used, predictor, left_out=True))


def summarize(results: Sequence[Result], left_out: Sequence[Result] = ()) -> Summary:
    """The scores of some results; `left_out`: those of sources that constants were set with, predicted without that."""
    names = dict.fromkeys(result.row.source for result in results)
    by_source = {name: group_of(_of_source(results, name), _of_source(left_out, name)) for name in names}
    used = {result.row.source for result in left_out}
    others = [result for result in results if result.row.source not in used]
    overall = group_of(results, [*others, *left_out] if left_out else [])
    small = sweeps_of(results, FEWEST_LAYOUTS, LEAST_LAYOUTS - 1)
    wrong = worst(results, _WORST)
    sweeps, tilts = tuple(sweeps_of(results)), tuple(tilts_of(results))
    return Summary(tuple(results), overall, by_source, sweeps, tuple(small), tilts, tuple(wrong))


def _of_source(results: Sequence[Result], name: str) -> list[Result]:
    return [result for result in results if result.row.source == name]


def group_of(results: Sequence[Result], left_out: Sequence[Result] = ()) -> Group:
    """The scores of some rows."""
    known = [result for result in results if result.is_predicted and _calculon_error(result) is not None]
    return Group(
        every=errors_of(results),
        specified=errors_of(r for r in results if r.is_predicted and r.is_fully_specified),
        open=errors_of(r for r in results if r.is_predicted and not r.is_fully_specified),
        interval=interval_of(results),
        outcome=outcome_of(results),
        memory=memory_errors(results),
        calculon=errors_of(known, _calculon_error),
        beside_calculon=errors_of(known),
        left_out=errors_of(left_out) if left_out else None,
    )


# ----------------------------------------------------------------------------------------------------------------------
# Calculon


@cache
def _baseline() -> dict[tuple[str, int], float]:
    """(table, row) → Calculon's relative error of the step time."""
    text = (files("muster.catalog") / "measurements" / f"{_BASELINE}.csv").read_text(encoding="utf-8")
    rows = csv.DictReader(text.splitlines())
    return {(row["file"], int(row["data_row"])): float(row["rel_error"]) for row in rows if row["rel_error"]}


def _calculon_error(result: Result) -> float | None:
    return _baseline().get((result.row.file, result.row.number))


# ----------------------------------------------------------------------------------------------------------------------
# Plain data


def to_json(summary: Summary) -> dict[str, Any]:
    """Errors, widths and shares in percent; null where there is nothing to say."""
    return {
        "version": 1,
        "overall": _group_json(summary.overall),
        "by_source": {name: _group_json(group) for name, group in summary.by_source.items()},
        "sweeps": _sweeps_json(summary.sweeps),
        "small_sweeps": _sweeps_json(summary.small_sweeps),
        "tilts": [asdict(tilt) for tilt in summary.tilts],
        "worst": [_row_json(result) for result in summary.worst],
        "unpredicted": [{"row": result.row.place, "why": result.reason} for result in summary.unpredicted],
        "left_out": summary.left_out,
    }


def _group_json(group: Group) -> dict[str, Any]:
    return {
        **asdict(group.every),
        "fully_specified": asdict(group.specified),
        "unstated": {**asdict(group.open), **asdict(group.interval)},
        "outcome": _outcome_json(group.outcome),
        "memory": asdict(group.memory),
        "calculon": asdict(group.calculon),
        "beside_calculon": asdict(group.beside_calculon),
        "left_out_of_calibration": asdict(group.left_out) if group.left_out else None,
    }


def _outcome_json(outcome: Outcome) -> dict[str, Any]:
    counts = {key: value for key, value in vars(outcome).items() if key != "near"}
    return {**counts, "near_capacity": [result.row.place for result in outcome.near]}


def _sweeps_json(sweeps: Sequence[Sweep]) -> dict[str, Any]:
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


def _row_json(result: Result) -> dict[str, Any]:
    assert result.setting is not None
    low_s, high_s = result.interval_s
    return {
        "row": result.row.place,
        "source": result.row.source,
        "model": result.row.model_name,
        "measured_s": result.measured_s,
        "predicted_s": result.predicted_s,
        "low_s": low_s,
        "high_s": high_s,
        "error": 100 * result.error,
        "unstated": list(result.setting.unstated),
    }


def unread(results: Iterable[Result]) -> dict[str, list[str]]:
    """Reason → the rows that couldn't be predicted for it."""
    found: dict[str, list[str]] = {}
    for result in results:
        found.setdefault(result.reason, []).append(result.row.place)
    return found
