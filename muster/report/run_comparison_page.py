"""Comparison of several runs as a self-contained HTML page and as terminal lines."""

from collections.abc import Callable, Sequence
from typing import Any

from muster.report.charts import Chart, Series, draw_chart, draw_legend
from muster.report.curves import smooth
from muster.report.html import Html, element, join
from muster.report.page import MIN_POINTS_TO_SMOOTH, description_list, page, section
from muster.report.prediction import TableRow, html_table
from muster.report.run_comparison import RunComparison, RunFigures, loss_by_tokens
from muster.spec.formatting import format_bytes, format_count, format_loss, format_seconds
from muster.spec.plan_name import format_plan_name

_MAX_CHARACTERS = 60
"""Most characters shown of a value."""

Formatter = Callable[[Any], str]


def comparison_page(found: RunComparison) -> str:
    """Return the page as text."""
    title = "One run" if len(found.runs) == 1 else f"{len(found.runs)} runs compared"
    plans: dict[str, str | None] = {str(run.directory): format_plan_name(run.plan) for run in found.runs}
    return page(
        title,
        element("header", element("h1", title)),
        section("Loss over tokens", _chart(found)),
        section("Results", _scrolling_table(figure_rows(found), "Final figures")),
        section("Differences", _differences(found)),
        section("The runs and their plans", description_list(plans, "facts")),
    )


def figure_rows(found: RunComparison) -> list[TableRow]:
    """Return a header and the final figures, a column for each run; figures that no run has are left out."""
    at = f"loss, smoothed, at {format_count(found.common_tokens)} tokens"
    shown: tuple[tuple[str, str, Formatter], ...] = (
        ("training loss, last step", "loss", format_loss),
        (at, "loss_at_common_tokens", format_loss),
        ("validation loss", "validation_loss", format_loss),
        ("tokens/s, median", "tokens_per_s", format_count),
        ("time of a step, median", "step_s", format_seconds),
        ("memory, fullest rank", "memory_bytes", format_bytes),
        ("tokens trained on", "tokens", format_count),
        ("steps", "steps", str),
        ("steps skipped", "skipped", format_count),
        ("ranks", "ranks", str),
    )
    head = ("", *(run.name for run in found.runs))
    rows = [(label, *map(words, _values(found.figures, key))) for label, key, words in shown if _is_known(found, key)]
    return [head, *rows]


def difference_rows(found: RunComparison) -> list[TableRow]:
    """Return a header and a row for each key that differs, a column for each run."""
    rows = [(one.key, *map(_value_text, one.values)) for one in found.differences]
    return [("", *(run.name for run in found.runs)), *rows]


def _chart(found: RunComparison) -> Html:
    """Return each run's curve in its own colour; long curves are smoothed."""
    curves = [loss_by_tokens(run) for run in found.runs]
    lines = [
        Series(run.name, smooth(points) if len(points) >= MIN_POINTS_TO_SMOOTH else points, number)
        for number, (run, points) in enumerate(zip(found.runs, curves, strict=True))
    ]
    unit = (
        "mean over tokens, smoothed"
        if any(len(points) >= MIN_POINTS_TO_SMOOTH for points in curves)
        else "mean over tokens"
    )
    chart = Chart("loss", "Training loss", lines, unit, allow_log=True, x_label="tokens")
    return join(draw_legend(lines), element("div", draw_chart(chart), class_="charts"))


def _differences(found: RunComparison) -> Html:
    if not found.differences:
        return element("p", "Nothing: their configurations and plans are the same.")
    return _scrolling_table(difference_rows(found), "Keys that differ")


def _scrolling_table(rows: Sequence[TableRow], label: str) -> Html:
    """Return a table that scrolls sideways within its box where there are many runs."""
    return element("div", html_table(rows), class_="wide", tabindex="0", role="region", aria_label=label)


def _values(figures: Sequence[RunFigures], key: str) -> list[Any]:
    return [getattr(one, key) for one in figures]


def _is_known(found: RunComparison, key: str) -> bool:
    return any(value is not None for value in _values(found.figures, key))


def _value_text(value: object) -> str:
    if value is None:
        return "–"
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return text if len(text) <= _MAX_CHARACTERS else text[: _MAX_CHARACTERS - 1] + "…"
