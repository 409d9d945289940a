"""Table cells of a validation, shared by terminal, HTML page and Markdown."""

import re
from collections.abc import Sequence
from statistics import mean
from typing import NamedTuple

from muster.spec.formatting import NOT_AVAILABLE, format_seconds
from muster.spec.plan import Plan
from muster.spec.plan_name import format_plan_name
from muster.spec.units import pluralize
from muster.validate.score import ErrorScores
from muster.validate.summary import GroupScores, Summary, places_by_reason
from muster.validate.sweeps import Sweep

Cells = tuple[str, ...]
"""Texts of a table row."""
_MAX_NAME = 46
"""Longest name of a source, in characters."""
_MAX_LOCATIONS = 4
"""Most row locations listed for one reason."""


_MAX_SWEEPS = 20
"""Most sweeps listed one by one; with more, small sweeps are only summarized."""


def format_percent(value: float | None, sign: bool = False) -> str:
    """Format per cents as `7.3 %`, with a sign as `−1.2 %`."""
    if value is None:
        return NOT_AVAILABLE
    return f"{value:{'+' if sign else ''}.1f} %".replace("-", "−")


KINDS = "By kind of run"
ERRORS, DEVICES, FULLY_SPECIFIED, OUTCOMES = "All rows", "By device", "Fully specified rows", "Does it fit?"
MEMORY = "Peak memory"
SWEEPS, AXIS_BIAS, WORST, UNPREDICTED = "Sweeps", "Bias by axis", "The worst rows", "Not predicted"


class Section(NamedTuple):
    """Table with its title, and a summary sentence where there is one."""

    title: str
    rows: list[Cells]
    sentence: str = ""


def sections(summary: Summary) -> list[Section]:
    """Return all tables that have rows, in display order."""
    every = summary.overall.every
    found = [
        Section(ERRORS, error_rows(summary), f"{pluralize(every.rows, 'row')}, {every.predicted:,} predicted."),
        Section(KINDS, kind_rows(summary)),
        Section(DEVICES, device_rows(summary)),
        Section(FULLY_SPECIFIED, specified_rows(summary)),
        Section(OUTCOMES, outcome_rows(summary), _near_capacity_sentence(summary)),
        Section(MEMORY, memory_rows(summary)),
        Section(SWEEPS, sweep_rows(summary), sweeps_sentence(summary)),
        Section(AXIS_BIAS, axis_bias_rows(summary)),
        Section(WORST, worst_rows(summary)),
        Section(UNPREDICTED, unpredicted_rows(summary), _not_scored_sentence(summary)),
    ]
    shown = [section for section in found if len(section.rows) > 1]
    of_times = (ERRORS, FULLY_SPECIFIED)
    others = [section for section in shown if section.title not in of_times]
    return others if others and not every.rows else shown


def _near_capacity_sentence(summary: Summary) -> str:
    near = summary.overall.outcome.near
    if not near:
        return ""
    words = (f"{result.row.location} ({'worked' if result.succeeded else 'out of memory'})" for result in near)
    return f"Within 5 % of the capacity: {', '.join(words)}."


def _not_scored_sentence(summary: Summary) -> str:
    if not summary.not_scored:
        return ""
    words = ", ".join(f"{count} of {metric}" for metric, count in sorted(summary.not_scored.items()))
    return f"Rows without step time, throughput, outcome or peak memory aren't scored: {words}."


def error_rows(summary: Summary) -> list[Cells]:
    """Return a header, a row for each source, and a row for all."""
    head = ("source", "rows", "predicted", "error", "median", "bias", "left out", "Calculon", "here")
    return [head, *(_error_row(name, group) for name, group in _groups(summary))]


def _error_row(name: str, group: GroupScores) -> Cells:
    calculon = (format_percent(group.calculon.mape), format_percent(group.beside_calculon.mape))
    left_out = format_percent(group.uncalibrated.mape) if group.uncalibrated else "not used"
    return (name, str(group.every.rows), str(group.every.predicted), *_errors(group.every), left_out, *calculon)


def kind_rows(summary: Summary) -> list[Cells]:
    """Return a header and a row for each kind of run."""
    head = ("kind", "sources", "rows", "error", "median", "bias", "left out", "in interval")
    rows = [
        (name, str(one.sources), str(one.every.predicted), *_errors(one.every))
        + (format_percent(one.left_out.mape), format_percent(one.coverage))
        for name, one in summary.by_kind.items()
    ]
    return [head, *rows]


def device_rows(summary: Summary) -> list[Cells]:
    """Return a header, a row for each device, and a row for each vendor."""
    head = ("device", "rows", "error", "median", "bias", "OOM found", "said to fit")
    kinds = {**summary.by_device, **{f"all of {name}": errors for name, errors in summary.by_vendor.items()}}
    return [
        head,
        *((name, str(errors.predicted), *_errors(errors), *_fits(summary, name)) for name, errors in kinds.items()),
    ]


def _fits(summary: Summary, device: str) -> Cells:
    """Return how many of a device's runs that failed were said to fail, and of those that worked to fit."""
    found = summary.outcome_by_device.get(device)
    if found is None:
        return "", ""
    failed = found.oom_predicted_oom, found.oom_predicted_oom + found.oom_predicted_fit
    worked = found.success_predicted_fit, found.success_predicted_fit + found.success_predicted_oom
    return tuple(f"{right} of {count}" if count else NOT_AVAILABLE for right, count in (failed, worked))


def specified_rows(summary: Summary) -> list[Cells]:
    """Return a header and a row for each source that part fully specified rows from rows with open choices."""
    head = ("source", "stated", "error", "median", "bias", "open", "error", "width", "inside")
    return [head, *(_specified_row(name, group) for name, group in _groups(summary))]


def _specified_row(name: str, group: GroupScores) -> Cells:
    interval = (format_percent(group.interval.width), format_percent(group.interval.coverage))
    stated = (str(group.specified.predicted), *_errors(group.specified))
    return (name, *stated, str(group.interval.rows), format_percent(group.open.mape), *interval)


def _groups(summary: Summary) -> list[tuple[str, GroupScores]]:
    """Return the sources that have rows, then all rows together."""
    shown = [(short_source_name(name), group) for name, group in summary.by_source.items() if group.every.rows]
    return [*shown, ("all", summary.overall)]


def short_source_name(source: str) -> str:
    """Return a source's name, shortened to `_MAX_NAME` characters; parentheses go first."""
    name = source.removeprefix("NVIDIA ")
    if len(name) > _MAX_NAME:
        name = re.sub(r"\s*\(.*?\)", "", name)
    return name if len(name) <= _MAX_NAME else name[: _MAX_NAME - 1].rstrip() + "…"


def _errors(errors: ErrorScores) -> Cells:
    return format_percent(errors.mape), format_percent(errors.median_ape), format_percent(errors.bias, sign=True)


def outcome_rows(summary: Summary) -> list[Cells]:
    """Return a header and a row for each source with runs that are known to have worked or failed.

    Near: rows within 5 % of the capacity, which aren't counted; undecided: rows whose open choices decide.
    """
    head = ("source", "OOM: predicted", "missed", "success: predicted", "missed", "balanced", "near", "undecided")
    rows = []
    for name, group in _groups(summary):
        found = group.outcome
        counts = (found.oom_predicted_oom, found.oom_predicted_fit)
        counts += (found.success_predicted_fit, found.success_predicted_oom)
        if name == "all" or found.wrong + found.oom_predicted_oom + len(found.near) + found.undecided:
            share = format_percent(found.balanced_accuracy)
            rows.append((name, *map(str, counts), share, str(len(found.near)), str(found.undecided)))
    return [head, *rows] if rows else [head]


def memory_rows(summary: Summary) -> list[Cells]:
    """Return a header and a row for each source that states the peak memory of its runs."""
    rows: list[Cells] = [("source", "stated", "error", "bias", "open", "error", "bias")]
    for name, group in (*summary.by_source.items(), ("all", summary.overall)):
        found = group.memory
        if found.any_rows:
            stated = (str(found.rows), format_percent(found.mape), format_percent(found.bias, sign=True))
            of_open = format_percent(found.open_mape), format_percent(found.open_bias, sign=True)
            rows.append((short_source_name(name), *stated, str(found.open_rows), *of_open))
    return rows


def sweep_rows(summary: Summary) -> list[Cells]:
    """Return a header and a row for each sweep."""
    head = (
        "sweep",
        "layouts",
        "OOM",
        "rank corr.",
        "apart",
        "in rounds",
        "misordered",
        "first reaches",
        "of those that ran",
        "first three reach",
        "best in 3",
    )
    return [
        head,
        *(
            (
                *(sweep.name, str(sweep.layouts), str(sweep.failed), f"{sweep.rank_correlation:.2f}"),
                f"{sweep.correlation_apart:.2f}",
                "" if sweep.correlation_in_rounds is None else f"{sweep.correlation_in_rounds:.2f}",
                f"{sweep.misordered} of {sweep.pairs}",
                *(format_percent(100 * sweep.first_reaches), format_percent(100 * sweep.first_timed_reaches)),
                format_percent(100 * sweep.three_reach),
                "yes" if sweep.best_in_first_three else "no",
            )
            for sweep in _shown_sweeps(summary)
        ),
    ]


def _shown_sweeps(summary: Summary) -> Sequence[Sweep]:
    """Return the sweeps listed one by one: with small ones, unless there are too many."""
    every = (*summary.sweeps, *summary.small_sweeps)
    return every if len(every) <= _MAX_SWEEPS else summary.sweeps


def sweeps_sentence(summary: Summary) -> str:
    """Return the scores of sweeps in a sentence, those of small sweeps in another; empty without sweeps."""
    sentences = [_sweep_scores(summary.sweeps), _low_sweeps(summary.sweeps)] if summary.sweeps else []
    if small := summary.small_sweeps:
        fewest = min(sweep.layouts for sweep in small)
        most = max(sweep.layouts for sweep in small)
        reaches = [sweep.first_reaches for sweep in small]
        sentences.append(
            f"In {_counted(small, 'small sweep')} of {fewest} to {most} layouts, the layout ranked first reaches"
            f" {format_percent(100 * mean(reaches))} of the best on average, at least"
            f" {format_percent(100 * min(reaches))}, and is the best in {sum(reach == 1.0 for reach in reaches)}."
        )
    return " ".join(filter(None, sentences))


_HIGH_CORRELATION, _LARGE_SWEEP = 0.9, 8
"""Rank correlation that sweeps of so many layouts should reach."""


def _low_sweeps(sweeps: Sequence[Sweep]) -> str:
    """Return how many large sweeps have a low rank correlation, and what explains it; empty where none has."""
    low = [sweep for sweep in sweeps if sweep.layouts >= _LARGE_SWEEP and sweep.rank_correlation < _HIGH_CORRELATION]
    if not low:
        return ""
    apart = [sweep for sweep in low if sweep.correlation_apart >= _HIGH_CORRELATION]
    rest = [sweep for sweep in low if sweep not in apart]
    in_rounds = [sweep for sweep in rest if (sweep.correlation_in_rounds or 0.0) >= _HIGH_CORRELATION]
    return (
        f"Of {_counted(low, 'sweep')} of at least {_LARGE_SWEEP} layouts below {_HIGH_CORRELATION},"
        f" {len(apart)} reach it over pairs that repeated measurements tell apart, {len(in_rounds)} where values are"
        f" predicted in rounds, and {len(rest) - len(in_rounds)} in neither way."
    )


def _counted(sweeps: Sequence[Sweep], name: str) -> str:
    return f"{len(sweeps)} {name}{'' if len(sweeps) == 1 else 's'}"


def _sweep_scores(sweeps: Sequence[Sweep]) -> str:
    correlation = mean(sweep.rank_correlation for sweep in sweeps)
    first = [sweep.first_reaches for sweep in sweeps]
    ran = [sweep.first_timed_reaches for sweep in sweeps]
    three = [sweep.three_reach for sweep in sweeps]
    return (
        f"In {_counted(sweeps, 'sweep')} the mean rank correlation is {correlation:.2f}. The layout ranked first"
        f" reaches {format_percent(100 * mean(first))} of the best on average (it ran out of memory in"
        f" {first.count(0.0)}); among the layouts that ran {format_percent(100 * mean(ran))},"
        f" at least {format_percent(100 * min(ran))}. The"
        f" best of the first three reaches {format_percent(100 * mean(three))} on average, at least"
        f" {format_percent(100 * min(three))}, and is the best of all in"
        f" {format_percent(100 * three.count(1.0) / len(three))}."
    )


def axis_bias_rows(summary: Summary) -> list[Cells]:
    """Return a header and a row for each change of an axis."""
    head = ("axis", "from → to", "pairs", "bias", "too slow in")
    return [
        head,
        *(
            (bias.axis, bias.change, str(bias.pairs), format_percent(bias.tilt, sign=True), str(bias.positive))
            for bias in summary.axis_biases
        ),
    ]


def worst_rows(summary: Summary) -> list[Cells]:
    """Return a header and a row for each of the worst predictions."""
    rows: list[Cells] = [("row", "model", "devices", "plan", "measured", "predicted", "error", "open")]
    for result in summary.worst:
        assert result.inputs is not None
        row = result.row
        plan = result.case.plan
        rows.append(
            (
                *(row.location, row.model_name, f"{row.n_gpus} × {row.gpu}", short_plan_name(plan)),
                *(format_seconds(result.measured_s), format_seconds(result.predicted_s)),
                *(format_percent(100 * result.error, sign=True), ", ".join(result.inputs.unstated) or "nothing"),
            )
        )
    return rows


def short_plan_name(plan: Plan) -> str:
    """Return a plan's short name without the hash of settings that names can't express."""
    return format_plan_name(plan).partition("+")[0]


def unpredicted_rows(summary: Summary) -> list[Cells]:
    """Return a header and a row for each reason why rows weren't predicted."""
    rows: list[Cells] = [("reason", "rows", "location")]
    for reason, places in places_by_reason(summary.unpredicted).items():
        more = f", … {len(places) - _MAX_LOCATIONS} more" if len(places) > _MAX_LOCATIONS else ""
        rows.append((reason, str(len(places)), ", ".join(places[:_MAX_LOCATIONS]) + more))
    return rows


def reason_rows(summary: Summary) -> list[Cells]:
    """Return `unpredicted_rows` without the locations."""
    return [cells[:2] for cells in unpredicted_rows(summary)]
