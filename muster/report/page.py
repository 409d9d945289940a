"""Report of a run: one HTML file that opens offline."""

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

from muster.config.file_writer import write_output
from muster.report.charts import Chart, Series, draw_chart, draw_legend
from muster.report.curves import Point, finite_values, metric_points, smooth
from muster.report.expert_load import draw_expert_load, draw_expert_moves
from muster.report.gantt import draw_timelines
from muster.report.html import Html, element, join
from muster.report.islands import draw_meetings
from muster.report.report_data import PredictedVsMeasured, ReportData
from muster.report.stragglers import draw_stragglers
from muster.report.style import SCRIPT, style_sheet
from muster.report.swarm import draw_swarm
from muster.spec.formatting import (
    format_count,
    format_error,
    format_fraction,
    format_loss,
    format_seconds,
    format_value,
    is_large_error,
)

MIN_POINTS_TO_SMOOTH = 40
"""Points from which a curve is smoothed."""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
"""Content security policy: the page loads nothing, not even from its own folder."""


def write_report(path: Path, data: ReportData) -> None:
    """Write the report to `path`, whole or not at all. Raises MusterError where it can't be written."""
    write_page(path, render_report(data))


def write_page(path: Path, text: str) -> None:
    """Write a page to `path`, whole or not at all. Raises MusterError where it can't be written."""
    write_output(path, text, "the report")


def render_report(data: ReportData, refresh_s: int | None = None) -> str:
    """Return the page as text; with `refresh_s` the browser reads it again so often."""
    version = f" {data.facts.muster_version}" if data.facts.muster_version else ""
    return page(
        data.title,
        _header(data),
        section("Training", _charts(data)),
        section("Meetings of islands", met) if (met := draw_meetings(data.meetings)) else "",
        section("Peers of the swarm", peers) if (peers := draw_swarm(data.swarm)) else "",
        section("Stragglers", slow) if (slow := draw_stragglers(data.straggler_checks)) else "",
        section("Load of experts", load) if (load := draw_expert_load(data.metrics)) else "",
        section("Moves of experts", moves) if (moves := draw_expert_moves(data.metrics)) else "",
        _timelines(data),
        section("Prediction against measurement", _comparison(data.comparison)) if data.comparison else "",
        section("A sample", _sample(data)) if data.sample_prompt or data.sample_text else "",
        section("Notes", element("ul", *(element("li", note) for note in data.notes))) if data.notes else "",
        section("The run", _facts(data)),
        element("footer", f"Written by Muster{version}."),
        refresh_s=refresh_s,
    )


def page(title: str, *parts: str, refresh_s: int | None = None) -> str:
    """Return a whole page as text; it opens offline and loads nothing, with `refresh_s` but itself."""
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        element("meta", http_equiv="refresh", content=str(refresh_s)) if refresh_s else "",
        element("title", f"{title} – Muster"),
        element("style", Html(style_sheet())),
    )
    main = element("main", *parts)
    body = element("body", main, element("div", id="tip", role="status"), element("script", Html(SCRIPT)))
    return "<!doctype html>\n" + element("html", head, body, lang="en") + "\n"


def section(title: str, content: Html) -> Html:
    """Return a part of a page under a heading."""
    return element("section", element("h2", title), content)


def _header(data: ReportData) -> Html:
    """Return the title, the plan and the headline figures."""
    figures = {
        "training loss, last step": _last(data, "train/loss"),
        "validation loss": None if data.validation_loss is None else format_loss(data.validation_loss),
        "validation perplexity": None
        if data.validation_perplexity is None
        else format_loss(data.validation_perplexity),
        "tokens/s, median": _median(data, "perf/tokens_per_s", format_count),
        "time of a step, median": _median(data, "time/step", format_seconds),
        "MFU, median": _median(data, "perf/mfu", format_fraction),
    }
    plan = element("p", "plan ", element("code", data.plan_name), class_="plan")
    status = element("p", data.status, class_="status") if data.status else ""
    return element("header", element("h1", data.title), plan, status, description_list(figures, "figures"))


def _timelines(data: ReportData) -> Html:
    """Return the section of one step on all ranks, where there is one."""
    if data.measured is not None and data.swarm:
        return section("One step, each row a peer", draw_timelines(data.measured))
    if data.predicted is None or data.measured is None:
        return Html("")
    return section("One step, predicted and measured", draw_timelines(data.predicted, data.measured))


def description_list(values: dict[str, str | None], style: str) -> Html:
    """Return names and values as a description list; a value of None leaves its pair out."""
    known = [(name, value) for name, value in values.items() if value is not None]
    return element("dl", *(element("div", element("dt", k), element("dd", v)) for k, v in known), class_=style)


def _last(data: ReportData, key: str) -> str | None:
    known = [point.value for point in metric_points(data.metrics, key) if point.value is not None]
    return format_loss(known[-1]) if known else None


def _median(data: ReportData, key: str, words: Callable[[float], str]) -> str | None:
    values = finite_values(metric_points(data.metrics, key))
    return words(median(values)) if values else None


def _charts(data: ReportData) -> Html:
    """Return the charts of loss, gradient norm, learning rate and throughput."""
    loss, norm, rate, speed = (
        metric_points(data.metrics, key) for key in ("train/loss", "train/grad_norm", "train/lr", "perf/tokens_per_s")
    )
    skipped = [point.step for point in metric_points((row for row in data.metrics if row.get("skipped")), "step")]
    losses = [*_raw_and_smooth(loss), *_validation_curve(data)]
    charts = (
        Chart("loss", "Loss", losses, "mean over tokens", allow_log=True, skipped_steps=skipped),
        Chart(
            "grad-norm",
            "Gradient norm",
            _raw_and_smooth(norm),
            "before clipping",
            True,
            allow_log=True,
            skipped_steps=skipped,
        ),
        Chart("learning-rate", "Learning rate", [Series("each step", rate)], from_zero=True),
        Chart("throughput", "Throughput", _raw_and_smooth(speed), "tokens/s, all ranks", from_zero=True),
    )
    curves = next((chart.series for chart in charts if len(chart.series) > 1), ())
    key = draw_legend(curves) if curves else Html("")
    return join(key, element("div", *map(draw_chart, charts), class_="charts"))


def _validation_curve(data: ReportData) -> list[Series]:
    """Return the validation loss of the steps that computed it."""
    points = metric_points((row for row in data.metrics if "eval/loss" in row), "eval/loss")
    return [Series("validation", points, colour=1)] if points else []


def _raw_and_smooth(points: list[Point]) -> list[Series]:
    """Return a short curve as it is, a long one faint with its smoothed form."""
    if len(points) < MIN_POINTS_TO_SMOOTH:
        return [Series("each step", points)]
    return [Series("each step", points, faint=True), Series("smoothed", smooth(points))]


def _comparison(rows: Sequence[PredictedVsMeasured]) -> Html:
    head = element("tr", *(element("th", word, scope="col") for word in ("", "predicted", "measured", "error")))
    body = element("tbody", *map(_comparison_row, rows))
    return element("table", element("thead", head), body)


def _comparison_row(row: PredictedVsMeasured) -> Html:
    """Return a table row; a large error is bold."""
    far = is_large_error(row.predicted, row.measured, row.unit)
    return element(
        "tr",
        element("th", row.label, scope="row"),
        element("td", format_value(row.predicted, row.unit)),
        element("td", format_value(row.measured, row.unit)),
        element("td", format_error(row.predicted, row.measured, row.unit), class_="far" if far else None),
    )


def _sample(data: ReportData) -> Html:
    return element("pre", element("span", data.sample_prompt, class_="prompt"), data.sample_text, class_="sample")


def _facts(data: ReportData) -> Html:
    """Return plan, sizes, device, seed, dates and version."""
    facts = data.facts
    return description_list(
        {
            "plan": data.plan_name,
            "parameters": None if facts.num_parameters is None else format_count(facts.num_parameters),
            "ranks": None if facts.num_ranks is None else str(facts.num_ranks),
            "tokens trained on": None if facts.num_tokens is None else format_count(facts.num_tokens),
            "epochs": None if facts.num_epochs is None else f"{facts.num_epochs:.3g}",
            "device": facts.device,
            "seed": None if facts.seed is None else str(facts.seed),
            "started": facts.started,
            "finished": facts.finished,
            "Muster": facts.muster_version,
        },
        "facts",
    )
