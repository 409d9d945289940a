"""Self-contained HTML page of predictions against published measurements."""

from pathlib import Path

from muster.report.accuracy_rows import (
    MEMORY,
    OUTCOMES,
    SWEEPS,
    UNPREDICTED,
    WORST,
    Cells,
    format_percent,
    memory_rows,
    outcome_rows,
    reason_rows,
    short_plan_name,
    short_source_name,
    specified_rows,
    sweep_rows,
    worst_rows,
)
from muster.report.html import Html, element, join
from muster.report.page import description_list, page, section, write_page
from muster.report.prediction import html_table
from muster.report.scatter import SCRIPT, STYLE, Dot, draw_predicted_vs_measured, draw_strip_plot
from muster.spec.formatting import format_seconds
from muster.validate.comparison import RowResult
from muster.validate.summary import Summary

_MARGIN = 0.1
"""Relative error marked by the dashed lines, which is the target."""


def write_accuracy_page(path: Path, summary: Summary) -> None:
    """Write the page to `path`, whole or not at all. Raises MusterError where it can't be written."""
    write_page(path, accuracy_page(summary))


def accuracy_page(summary: Summary) -> str:
    """Return the page as text."""
    found = [result for result in summary.results if result.is_predicted]
    parts = [
        section("Errors by source, fully specified rows", html_table(_columns(specified_rows(summary), 0, 1, 2, 6, 8))),
        _section_with_rows(OUTCOMES, _columns(outcome_rows(summary), 0, 1, 2, 3, 4)),
        _section_with_rows(MEMORY, _columns(memory_rows(summary), 0, 1, 2, 4, 5)),
        _section_with_rows(SWEEPS, _columns(sweep_rows(summary), 0, 1, 3, 6)),
        _section_with_rows(WORST, [(_row_label(row), *row[4:7]) for row in worst_rows(summary)]),
        _section_with_rows(UNPREDICTED, reason_rows(summary)),
    ]
    pictures = (
        [section("Step times", _scatter_plot(found)), section("Errors by source", _strip_plot(found))] if found else []
    )
    style, script = element("style", Html(STYLE)), element("script", Html(SCRIPT))
    return page("Predicted against measured", style, _header(summary), *pictures, *parts, script)


def _columns(rows: list[Cells], *columns: int) -> list[Cells]:
    """Return some columns of a table, as many as a narrow page holds; terminal and Markdown show all."""
    return [tuple(row[column] for column in columns) for row in rows]


def _row_label(row: Cells) -> str:
    return ", ".join(row[:4])


def _section_with_rows(title: str, rows: list[Cells]) -> Html:
    """Return a section with a table, or nothing where the table has no rows."""
    return section(title, html_table(rows)) if len(rows) > 1 else Html("")


def _header(summary: Summary) -> Html:
    every = summary.overall.every
    stated = summary.overall.specified
    figures: dict[str, str | None] = {
        "rows, predicted": f"{every.rows}, {every.predicted}",
        "mean error": format_percent(every.mape),
        "median error": format_percent(every.median_ape),
        "bias": format_percent(every.bias, sign=True),
        "mean error, fully specified": format_percent(stated.mape),
    }
    text = "Step times of published runs. Configurations count once, however often they were measured."
    return element(
        "header",
        element("h1", "Predicted against measured"),
        element("p", text, class_="quiet"),
        description_list(figures, "figures"),
    )


def _legend() -> Html:
    entries = [
        element("span", element("i", class_=f"swatch line run-{colour}"), words)
        for colour, words in ((0, "fully specified"), (1, "something left open"))
    ]
    return element("p", *entries, class_="key")


def _scatter_plot(found: list[RowResult]) -> Html:
    dots = [_dot(result, result.measured_s or 0.0, result.predicted_s) for result in found]
    words = (
        f"{len(dots)} runs: predicted step time over the measured one, in seconds. On the line both are equal, within"
        f" the dashed ones the prediction is at most {100 * _MARGIN:.0f} % off."
    )
    picture = draw_predicted_vs_measured("scatter", "Predicted over measured step time", words, dots, _MARGIN)
    return join(element("p", words), _legend(), picture)


def _strip_plot(found: list[RowResult]) -> Html:
    names = list(dict.fromkeys(result.row.source for result in found))
    dots = [_dot(result, 100 * result.error, names.index(result.row.source)) for result in found]
    words = "Error of the predicted step time in percent; each dot is a run."
    picture = draw_strip_plot("strip", "Errors by source", words, [short_source_name(name) for name in names], dots)
    return join(element("p", words), _legend(), picture)


def _dot(result: RowResult, x: float, y: float) -> Dot:
    """Return the dot of a row, labelled with model, devices, plan and times."""
    assert result.inputs is not None
    row = result.row
    words = (
        f"{row.model_name}, {row.n_gpus} × {row.gpu}\n{short_plan_name(result.case.plan)}\n"
        f"measured {format_seconds(result.measured_s)}, predicted {format_seconds(result.predicted_s)}\n{row.location}"
    )
    return Dot(x, y, words, 0 if result.is_fully_specified else 1)
