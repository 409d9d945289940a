"""Markdown page of predictions against published measurements (docs/accuracy.md)."""

from collections.abc import Sequence
from pathlib import Path

from muster.report.accuracy_rows import (
    AXIS_BIAS,
    ERRORS,
    FULLY_SPECIFIED,
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

`muster validate --markdown docs/accuracy.md` wrote this page: every shipped measurement of other teams, predicted and
compared. `muster validate` prints the same tables, `--json` gives them to programs, `--html FILE` draws predicted
against measured, and `--csv FILE` takes a [table of your own](validate.md).

Errors are of the step time, (predicted − measured) / measured; throughputs are turned into times, and FLOP/s by the
formula that the source counts with. A configuration that was measured over several releases counts once. Configurations
measured again on the same software differ by 1.4 to 6 % (median) and up to 11 %, so a smaller error says nothing.
"""
_WORDS = {
    ERRORS: """\
*Calculon* is what [Calculon](https://github.com/calculon-ai/calculon) (commit caa4b11, the system files that it comes
with) predicts for the rows that it can express, and *here* Muster's error on those rows. The rows of Korthikanti et al.
are those that Calculon's constants were set with. *Left out* is Muster's error on a source with the constants as they
would stand without it, for the sources that a device's sustained rate was set with; all others were not used.
""",
    FULLY_SPECIFIED: """\
A column that a source leaves open (how much is recomputed, sequence parallelism, chunks of a stage, the attention
kernel, the micro-batch) makes an interval over its choices: *width* is how much longer the longest is than the
shortest, *inside* how often the measured time lies between them. The error of such a row is that of the usual choice,
with the least recompute that fits the memory.
""",
    OUTCOMES: """\
Whether a run would fit, against whether it ran: *near* are rows predicted within 5 % of the capacity, which aren't in
the counts, *undecided* those where what the row leaves open decides. *balanced* is the mean of both recalls.
""",
    SWEEPS: """\
Layouts of one model on the same devices with the same batch and attention kernel, at least six of them timed. Muster
ranks those first that leave 12 % of the memory free, then those that fit, each by their predicted time. *first
reaches* is the throughput of the layout that Muster ranks first as a part of the best measured one, 0 where it ran out
of memory; *of those that ran* leaves out the layouts that did; *first three reach* is the best of its first three, and
*best in 3* whether that is the best of all.
""",
    AXIS_BIAS: """\
Pairs of layouts of one sweep, small ones too, that differ in one axis alone and in the data-parallel ranks that are
left: how much more the step time was predicted to grow from the first value to the second than it was measured to.
Above 0 the second is predicted too slow beside the first, in so many of the pairs as the last column says.
""",
    WORST: "One of each configuration.\n",
}


def write_markdown(path: Path, summary: Summary) -> None:
    """Write the page to `path`, whole or not at all. Raises MusterError where it can't be written."""
    write_page(path, accuracy_markdown(summary))


def accuracy_markdown(summary: Summary) -> str:
    """Return the page as text."""
    shown = [markdown_section(section, _WORDS.get(section.title, "")) for section in sections(summary)]
    parts = [_INTRODUCTION, *shown, _reasons(summary)]
    return "\n".join(part for part in parts if part)


def markdown_section(section: Section, words: str = "", level: int = 2) -> str:
    """Return a section: title, explanation, table and summary sentence."""
    parts = (f"{'#' * level} {section.title}\n", words, _table(section.rows), section.sentence)
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
