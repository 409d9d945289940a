"""Predictions against published measurements as one HTML file that opens anywhere."""

from pathlib import Path

from muster.report.html import Html, element, join
from muster.report.numbers import format_seconds
from muster.report.page import page, pairs, section, write_page
from muster.report.prediction import table
from muster.report.scatter import SCRIPT, STYLE, Dot, draw_scatter, draw_strip
from muster.report.validation_rows import (
    OUTCOMES,
    SWEEPS,
    UNREAD,
    WORST,
    Cells,
    outcome_rows,
    percent,
    plan_words,
    reason_rows,
    short,
    specified_rows,
    sweep_rows,
    worst_rows,
)
from muster.validate.predicted import Result
from muster.validate.summary import Summary

_MARGIN = 0.1
"""Where the dashed lines lie: the error that is aimed at."""


def write_validation_page(path: Path, summary: Summary) -> None:
    """Writes the page to `path`, whole or not at all. Raises MusterError where it can't be written."""
    write_page(path, validation_page(summary))


def validation_page(summary: Summary) -> str:
    """The page as text."""
    found = [result for result in summary.results if result.is_predicted]
    parts = [
        section("How far off each source is", table(_columns(specified_rows(summary), 0, 1, 2, 6, 8))),
        _titled(OUTCOMES, _columns(outcome_rows(summary), 0, 1, 2, 3, 4)),
        _titled(SWEEPS, _columns(sweep_rows(summary), 0, 1, 3, 4)),
        _titled(WORST, [(_joined(row), *row[4:7]) for row in worst_rows(summary)]),
        _titled(UNREAD, reason_rows(summary)),
    ]
    pictures = [section("Step times", _scatter(found)), section("Errors by source", _strip(found))] if found else []
    style, script = element("style", Html(STYLE)), element("script", Html(SCRIPT))
    return page("Predicted against measured", style, _header(summary), *pictures, *parts, script)


def _columns(rows: list[Cells], *columns: int) -> list[Cells]:
    """Those that a narrow page has room for; the terminal and the documentation have all."""
    return [tuple(row[column] for column in columns) for row in rows]


def _joined(row: Cells) -> str:
    return ", ".join(row[:4])


def _titled(title: str, rows: list[Cells]) -> Html:
    """A section with a table; none without rows."""
    return section(title, table(rows)) if len(rows) > 1 else Html("")


def _header(summary: Summary) -> Html:
    every, stated = summary.overall.every, summary.overall.specified
    figures: dict[str, str | None] = {
        "rows, predicted": f"{every.rows}, {every.predicted}",
        "mean error": percent(every.mape),
        "median error": percent(every.median_ape),
        "bias": percent(every.bias, sign=True),
        "mean error, fully specified": percent(stated.mape),
    }
    text = "Step times of published runs. Configurations count once, however often they were measured."
    return element(
        "header",
        element("h1", "Predicted against measured"),
        element("p", text, class_="quiet"),
        pairs(figures, "figures"),
    )


def _key() -> Html:
    entries = [
        element("span", element("i", class_=f"swatch line run-{colour}"), words)
        for colour, words in ((0, "fully specified"), (1, "something left open"))
    ]
    return element("p", *entries, class_="key")


def _scatter(found: list[Result]) -> Html:
    dots = [_dot(result, result.measured_s or 0.0, result.predicted_s) for result in found]
    words = (
        f"{len(dots)} runs: predicted step time over the measured one, in seconds. On the line both are equal, within"
        f" the dashed ones the prediction is at most {100 * _MARGIN:.0f} % off."
    )
    picture = draw_scatter("scatter", "Predicted over measured step time", words, dots, _MARGIN)
    return join(element("p", words), _key(), picture)


def _strip(found: list[Result]) -> Html:
    names = list(dict.fromkeys(result.row.source for result in found))
    dots = [_dot(result, 100 * result.error, names.index(result.row.source)) for result in found]
    words = "Error of the predicted step time in percent; each dot is a run."
    picture = draw_strip("strip", "Errors by source", words, [short(name) for name in names], dots)
    return join(element("p", words), _key(), picture)


def _dot(result: Result, x: float, y: float) -> Dot:
    assert result.setting is not None
    row = result.row
    words = (
        f"{row.model_name}, {row.n_gpus} × {row.gpu}\n{plan_words(result.setting.cases[result.chosen].plan)}\n"
        f"measured {format_seconds(result.measured_s)}, predicted {format_seconds(result.predicted_s)}\n{row.place}"
    )
    return Dot(x, y, words, 0 if result.is_fully_specified else 1)
