"""Markdown page of predictions against published measurements (docs/accuracy.md)."""

from collections.abc import Sequence
from pathlib import Path

from muster.report.accuracy_rows import (
    AXIS_BIAS,
    DEVICES,
    ERRORS,
    FULLY_SPECIFIED,
    KINDS,
    MEMORY,
    OUTCOMES,
    SWEEPS,
    WORST,
    Cells,
    Section,
    sections,
)
from muster.report.page import write_page
from muster.validate.sources import source_of
from muster.validate.summary import Summary

_INTRODUCTION = """\
# Accuracy

`muster validate --markdown docs/accuracy.md` wrote this page: it compares predictions with every shipped measurement
of other teams. `muster validate` prints the same tables, `--json` writes them for programs, `--html FILE` plots
predicted against measured, and `--csv FILE` takes [your own table](validate.md).

Errors are those of the step time, (predicted − measured) / measured. Throughputs are converted to times, FLOP/s by the
formula that the source uses. A configuration measured with several releases counts once. Repeated measurements of one
configuration with the same software differ by 1.4 to 6 % (median) and up to 11 %, so smaller errors mean nothing.
"""
"""Head of the page."""
_EXPLANATIONS = {
    ERRORS: """\
*Calculon* is the error of [Calculon](https://github.com/calculon-ai/calculon) (commit caa4b11, with its own system
files) on the rows that it can express, *here* Muster's error on the same rows. Calculon's constants were calibrated
with the rows of Korthikanti et al. Some sources contributed to a device's sustained rate: *left out* is Muster's error
on such a source with the constants as they would be without it. All other sources were not used.
""",
    KINDS: """\
The same rows by what ran; a run may be of several kinds. *left out* is the error of all of them where each calibration
source is predicted with the constants as they would be without it. *in interval*: the share of rows whose measured time
lies in the interval of 9 of 10 cases, over what the row leaves open and by the errors on like rows of other sources.
""",
    DEVICES: """\
The same rows by the device of the catalogue that they ran on, and by vendor: the first word of the device's title.
*OOM found*: runs out of memory that were predicted so; *said to fit*: runs that worked and were predicted to; rows
within 5 % of the capacity, and those whose open choices decide, aren't in the counts.
""",
    FULLY_SPECIFIED: """\
A column that a source leaves open (recompute, sequence parallelism, chunks per rank, attention kernel, micro-batch)
gives an interval over its choices: *width* is (longest − shortest) / shortest, *inside* the share of rows whose
measured time lies in the interval. The error of such a row is that of the default choices with the least recompute
that fits the memory.
""",
    OUTCOMES: """\
Predicted against actual out-of-memory failures. *near*: rows predicted within 5 % of the capacity, which are not in
the counts; *undecided*: rows whose open choices decide; *balanced*: mean of both recalls.
""",
    MEMORY: """\
The peak memory of the fullest rank, where a source states it, of fully specified rows and of those with open choices.
Sources mean different things by it, what was allocated or reserved; where they say GB, GiB is assumed.
""",
    SWEEPS: """\
Layouts of one model on the same devices with the same batch and attention kernel, at least six of them timed. Muster
ranks layouts that leave 12 % of the memory free first, then others that fit, each by predicted time. *rank corr.* is
Spearman's, *apart* the same over those pairs whose measured times differ by more than 6 %, as much as repeated
measurements do, and *misordered* such pairs in the wrong order. *in rounds*: *apart* of values that are multiples of a
part of a step, as their digits say, where they are predicted so ([source by source](#source-by-source)). *first
reaches* is the measured throughput of the layout ranked first as a fraction of the best measured one, 0 if it ran out
of memory; *of those that ran* ignores layouts that ran out of memory; *first three reach* is the best of the first
three, and *best in 3* tells if that is the best of all.
""",
    AXIS_BIAS: """\
Pairs of layouts of one sweep, small ones included, that differ in one axis alone (and in the remaining data-parallel
ranks). *bias* is the excess of the predicted over the measured growth of the step time from the first value to the
second: above 0 the second value is predicted too slow relative to the first, in as many pairs as the last column says.
""",
    WORST: "One row of each configuration.\n",
}
"""Explanation of each section, by title."""


def write_markdown(path: Path, summary: Summary) -> None:
    """Write the page to `path`, whole or not at all. Raises MusterError where it can't be written."""
    write_page(path, accuracy_markdown(summary))


def accuracy_markdown(summary: Summary) -> str:
    """Return the page as text."""
    shown = [markdown_section(section, _EXPLANATIONS.get(section.title, "")) for section in sections(summary)]
    parts = [_INTRODUCTION, *shown, _reasons(summary)]
    return "\n".join(part for part in parts if part)


def markdown_section(section: Section, explanation: str = "", level: int = 2) -> str:
    """Return a section: title, explanation, table and summary sentence."""
    parts = (f"{'#' * level} {section.title}\n", explanation, _table(section.rows), section.sentence)
    return "\n".join(part for part in parts if part).rstrip("\n") + "\n"


def _table(rows: Sequence[Cells]) -> str:
    """Return a Markdown table with its numbers right-aligned."""
    head = f"| {' | '.join(map(_cell, rows[0]))} |\n|---|{'---:|' * (len(rows[0]) - 1)}\n"
    return head + "".join(f"| {' | '.join(map(_cell, row))} |\n" for row in rows[1:])


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _reasons(summary: Summary) -> str:
    """Return the notes on each source: what it is assumed to have run, and reasons of its errors."""
    lines = []
    for name in summary.by_source:
        source = source_of(name)
        said = (source.why, source.errs)
        words = " ".join(word for word in said if word)
        calibrated = f" Used in calibration: {source.calibrated}" if source.calibrated else ""
        if words or calibrated:
            lines.append(f"* **{name}**: {words}{calibrated}\n")
    return "## Source by source\n\n" + "".join(lines) if lines else ""
