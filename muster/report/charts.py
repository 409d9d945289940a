"""Line charts of values by step, as inline SVG that keeps its text size at every width.

The content box of the SVG is the plot itself and grows with the page. Lines lie in a stretched inner SVG; labels and
ticks are placed around it in per cent.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from muster.report.curves import MAX_BUCKETS, Point, downsample, finite_values, line_segments, non_finite_steps
from muster.report.html import Html, element, join
from muster.report.palette import SERIES
from muster.report.scales import Scale, fit_scale
from muster.spec.formatting import format_number

_VIEW_BOX = 10_000
"""Width and height of the inner SVG in its own units."""
LINE_STYLES = ("", " dashed", " dotted")
"""Line styles, as class names of the style sheet."""
_MAX_POINTS_WITH_DOTS = 40
"""Most points of a curve that are drawn as dots too."""


@dataclass(frozen=True, slots=True)
class Series:
    """One curve. `colour` is the run's number in the chart; a faint curve lies behind the others."""

    label: str
    points: Sequence[Point]
    colour: int = 0
    faint: bool = False


@dataclass(frozen=True, slots=True)
class Chart:
    """Contents of one chart. `key` is its id on the page."""

    key: str
    title: str
    series: Sequence[Series]
    unit: str = ""
    from_zero: bool = False
    allow_log: bool = False
    x_label: str = "step"
    """Quantity on the horizontal axis, which `Point.step` counts."""
    skipped_steps: Sequence[float] = ()
    """Steps that changed nothing; each is marked."""


def draw_chart(chart: Chart) -> Html:
    """Return the chart as a figure with a caption; without any finite value the figure says so."""
    values = [value for series in chart.series for value in finite_values(series.points)]
    caption = element("figcaption", element("h3", chart.title), _unit(chart.unit), _marks_legend(chart))
    if not values:
        broken = any(non_finite_steps(series.points) for series in chart.series)
        words = "All values were NaN or infinite." if broken else "No values were logged."
        return element("figure", caption, element("p", words, class_="quiet"), class_="chart", id=chart.key)
    steps = [point.step for series in chart.series for point in series.points]
    x = _step_scale(min(steps), max(steps))
    y = fit_scale(values, chart.from_zero, chart.allow_log)
    drawn = [(series, downsample(series.points)) for series in chart.series]
    lines = [_line(series, points, x, y) for series, points in sorted(drawn, key=lambda pair: not pair[0].faint)]
    inner = element(
        "svg", *lines, viewBox=f"0 0 {_VIEW_BOX} {_VIEW_BOX}", preserveAspectRatio="none", width="100%", height="100%"
    )
    svg = element(
        "svg",
        element("title", chart.title, id=f"{chart.key}-title"),
        element("desc", describe_chart(chart), id=f"{chart.key}-desc"),
        _grid(x, y, chart.x_label),
        inner,
        _step_marks(chart, x),
        role="img",
        aria_labelledby=f"{chart.key}-title {chart.key}-desc",
    )
    data = element("script", _hover_data(drawn, x, chart.x_label), type="application/json")
    return element("figure", caption, element("div", svg, data, class_="plot"), class_="chart", id=chart.key)


def draw_legend(all_series: Sequence[Series]) -> Html:
    """Return a legend with a piece of each curve, for charts that show the same runs."""
    entries = []
    for series in all_series:
        style = f"swatch line {_style(series)}"
        entries.append(element("span", element("i", class_=style), series.label))
    return element("p", *entries, class_="key")


def describe_chart(chart: Chart) -> str:
    """Return a text alternative of one or two sentences for screen readers."""
    sentences = []
    for series in chart.series:
        known = [point for run in line_segments(series.points) for point in run]
        if series.faint or not known:
            continue
        values = finite_values(known)
        sentences.append(
            f"{series.label}: {format_number(known[0].value)} at {chart.x_label} {known[0].step:.0f},"
            f" {format_number(known[-1].value)} at {chart.x_label} {known[-1].step:.0f};"
            f" lowest {format_number(min(values))}, highest {format_number(max(values))}."
        )
    return " ".join(sentences)


def _step_scale(first: float, last: float) -> Scale:
    """Return an axis of steps without margins, with ticks at whole steps only."""
    scale = fit_scale([first, last])
    if first == last:
        return Scale(first - 1, first + 1, (first,))
    ticks = tuple(t for t in scale.ticks if first <= t <= last and t == int(t))
    return Scale(first, last, ticks or (first, last))


def _grid(x: Scale, y: Scale, across: str) -> Html:
    parts = [element("rect", width="100%", height="100%", class_="frame")]
    for tick, label in zip(y.ticks, y.labels, strict=True):
        at = f"{100 * (1 - y.fraction(tick)):.2f}%"
        parts.append(element("line", x1="0", x2="100%", y1=at, y2=at, class_="grid"))
        parts.append(element("text", label, x="-8", y=at, dy="4", class_="tick end"))
    for tick, label in zip(x.ticks, x.labels, strict=True):
        at = x.fraction(tick)
        side = "start" if at < 0.03 else "end" if at > 0.97 else "middle"
        parts.append(element("text", label, x=f"{100 * at:.2f}%", y="100%", dy="18", class_=f"tick {side}"))
    parts.append(element("line", x1="0", x2="100%", y1="100%", y2="100%", class_="axis"))
    parts.append(element("text", across, x="100%", y="100%", dy="34", class_="tick end"))
    return join(*parts)


def _line(series: Series, points: Sequence[Point], x: Scale, y: Scale) -> Html:
    """Return each segment as a line. A single point becomes a dot: a line of length 0 with round ends."""

    def place(point: Point) -> str:
        assert point.value is not None
        return f"{_VIEW_BOX * x.fraction(point.step):.0f} {_VIEW_BOX * (1 - y.fraction(point.value)):.0f}"

    runs = line_segments(points)
    style = f"mark {_style(series)}"
    path = "".join("M" + "L".join(map(place, run)) for run in runs)
    lines = element("path", d=path, class_=style, vector_effect="non-scaling-stroke")
    alone = [run[0] for run in runs if len(run) == 1]
    known = [point for run in runs for point in run]
    dots = known if len(known) <= _MAX_POINTS_WITH_DOTS and not series.faint else alone
    if not dots:
        return lines
    path = "".join(f"M{place(point)}h0" for point in dots)
    return join(lines, element("path", d=path, class_=f"{style} dots", vector_effect="non-scaling-stroke"))


def _style(series: Series) -> str:
    """Return the classes of a curve: a colour, and another line style once all colours are used."""
    turn, colour = divmod(series.colour, len(SERIES))
    return f"run-{colour}" + LINE_STYLES[turn % len(LINE_STYLES)] + (" faint" if series.faint else "")


def _step_marks(chart: Chart, x: Scale) -> Html:
    """Return a cross above each step whose value was NaN or infinite, and a triangle above each other skipped step."""
    broken = _non_finite(chart.series)
    marks = [(step, "×", "broken") for step in sorted(broken)]
    marks += [(step, "▽", "skipped") for step in _thinned(sorted(set(chart.skipped_steps) - broken))]
    return join(
        *(
            element("text", sign, x=f"{100 * x.fraction(step):.2f}%", y="0", dy="12", class_=f"{style} middle")
            for step, sign, style in marks
        )
    )


def _marks_legend(chart: Chart) -> Html:
    """Return the legend of the crosses and triangles, where there are any."""
    broken = _non_finite(chart.series)
    rows = [("×", "broken", "NaN or infinite")] if broken else []
    rows += [("▽", "skipped", "skipped step")] if set(chart.skipped_steps) - broken else []
    return join(
        *(element("span", element("b", sign, class_=style), f" {text}", class_="unit") for sign, style, text in rows)
    )


def _non_finite(all_series: Sequence[Series]) -> set[float]:
    return {step for series in all_series for step in non_finite_steps(series.points)}


def _thinned(steps: Sequence[float]) -> Sequence[float]:
    """Return the steps, or evenly chosen ones of very many."""
    return steps[:: -(-len(steps) // MAX_BUCKETS) or 1]


def _unit(unit: str) -> Html:
    return element("span", unit, class_="unit") if unit else Html("")


def _hover_data(drawn: Sequence[tuple[Series, Sequence[Point]]], x: Scale, across: str) -> Html:
    """Return the pointer's data as JSON: ends of the axis and, per curve, its label, steps and formatted values."""
    curves = []
    for series, points in drawn:
        known = [point for point in points if point.value is not None]
        steps = [int(p.step) if p.step == int(p.step) else p.step for p in known]
        curves.append([series.label, steps, [format_number(p.value) for p in known]])
    data = {"across": across, "low": x.low, "high": x.high, "curves": curves}
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False)
    return Html(text.replace("<", "\\u003c"))
