"""Scatter plots on two axes, and strip plots by row, as inline SVG that keeps its text size at every width."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

from muster.report.html import Html, element, join
from muster.report.palette import SERIES
from muster.report.scales import Scale, fit_scale, log_scale

_VIEW_BOX = 10_000
"""Width and height of the inner SVG in its own units."""
_ROW_PX = 26
"""Height of one row of a strip plot."""


@dataclass(frozen=True, slots=True)
class Dot:
    """Dot with a `label` that is shown when the pointer is near, and a `mark` that always stands beside it."""

    x: float
    y: float
    label: str
    colour: int = 0
    mark: str = ""


def draw_predicted_vs_measured(key: str, title: str, description: str, dots: Sequence[Dot], margin: float) -> Html:
    """Return predicted over measured values on logarithmic axes of one range, with the line of equality and, dashed,
    lines at `margin` above and below it. `dots` must not be empty; values are positive."""
    values = [value for dot in dots for value in (dot.x, dot.y)]
    scale = log_scale(min(values) / 1.2, max(values) * 1.2)
    places = [(scale.fraction(dot.x), 1 - scale.fraction(dot.y)) for dot in dots]
    lines = [
        _line((scale.low, scale.low * factor), (scale.high, scale.high * factor), scale, style)
        for factor, style in ((1.0, "axis"), (1 + margin, "grid dashed"), (1 - margin, "grid dashed"))
    ]
    grid = [_x_tick(scale, tick, label) for tick, label in zip(scale.ticks, scale.labels, strict=True)]
    grid += [_y_tick(scale, tick, label) for tick, label in zip(scale.ticks, scale.labels, strict=True)]
    return _figure(key, title, description, join(*grid), join(*lines), dots, places, "square")


def draw_xy_plot(
    key: str, title: str, description: str, dots: Sequence[Dot], x: Scale, y: Scale, axes: tuple[str, str]
) -> Html:
    """Return dots on two independent axes. `axes`: titles of the horizontal and of the vertical one."""
    places = [(x.fraction(dot.x), 1 - y.fraction(dot.y)) for dot in dots]
    grid = [_x_tick(x, tick, label) for tick, label in zip(x.ticks, x.labels, strict=True)]
    grid += [_y_tick(y, tick, label) for tick, label in zip(y.ticks, y.labels, strict=True)]
    figure = _figure(key, title, description, join(*grid), Html(""), dots, places, "square")
    x_title, y_title = axes
    above = element("p", y_title, class_="axis-title")
    return element("div", above, figure, element("p", x_title, class_="axis-title below"))


def draw_strip_plot(key: str, title: str, description: str, names: Sequence[str], dots: Sequence[Dot]) -> Html:
    """Return a row of dots for each name; `y` of a dot is the index of its row. A line stands at 0."""
    scale = fit_scale([*(dot.x for dot in dots), 0.0])
    count = len(names)
    places = [(scale.fraction(dot.x), (dot.y + 0.5) / count) for dot in dots]
    grid = [_x_tick(scale, tick, label) for tick, label in zip(scale.ticks, scale.labels, strict=True)]
    zero = scale.fraction(0.0) * _VIEW_BOX
    line = element("path", d=f"M{zero:.0f} 0V{_VIEW_BOX}", class_="axis", vector_effect="non-scaling-stroke")
    picture = _figure(key, title, description, join(*grid), line, dots, places, "", height_px=count * _ROW_PX)
    rows = element("div", *(element("div", name) for name in names), class_="strip-names")
    return element("div", rows, picture, class_="strip")


def _figure(
    key: str,
    title: str,
    description: str,
    grid: Html,
    lines: Html,
    dots: Sequence[Dot],
    places: Sequence[tuple[float, float]],
    style: str,
    height_px: int | None = None,
) -> Html:
    """Return a figure with a grid, lines and one path of dots for each colour."""
    colours = sorted({dot.colour for dot in dots})
    marks = []
    for colour in colours:
        shown = [place for dot, place in zip(dots, places, strict=True) if dot.colour == colour]
        path = "".join(f"M{_VIEW_BOX * x:.0f} {_VIEW_BOX * y:.0f}h0" for x, y in shown)
        marks.append(
            element("path", d=path, class_=f"mark dots run-{colour % len(SERIES)}", vector_effect="non-scaling-stroke")
        )
    inner = element(
        "svg",
        lines,
        *marks,
        viewBox=f"0 0 {_VIEW_BOX} {_VIEW_BOX}",
        preserveAspectRatio="none",
        width="100%",
        height="100%",
    )
    frame = element("rect", width="100%", height="100%", class_="frame")
    svg = element(
        "svg",
        element("title", title, id=f"{key}-title"),
        element("desc", description, id=f"{key}-desc"),
        frame,
        grid,
        inner,
        *(_mark(dot, place) for dot, place in zip(dots, places, strict=True) if dot.mark),
        role="img",
        aria_labelledby=f"{key}-title {key}-desc",
        style=f"height:{height_px + 30}px" if height_px else None,
    )
    data = json.dumps([[round(x, 4), round(y, 4), dot.label] for dot, (x, y) in zip(dots, places, strict=True)])
    script = element("script", Html(data.replace("<", "\\u003c")), type="application/json")
    plane = element("div", svg, script, class_=f"plane {style}".strip())
    return element("figure", plane, class_="dotted", id=key)


def _mark(dot: Dot, place: tuple[float, float]) -> Html:
    """Return a dot's mark, to the right of it or, at the right edge, to the left."""
    x, y = place
    side = -1 if x > 0.97 else 1
    return element(
        "text",
        dot.mark,
        x=f"{100 * x:.2f}%",
        y=f"{100 * y:.2f}%",
        dx=str(7 * side),
        dy="4",
        class_=f"dot-mark {'end' if side < 0 else 'start'} run-{dot.colour % len(SERIES)}",
    )


def _line(start: tuple[float, float], end: tuple[float, float], scale: Scale, style: str) -> Html:
    """Return a straight line in axis values; the frame cuts off the rest."""
    points = [
        f"{_VIEW_BOX * _log_position(scale, x):.0f} {_VIEW_BOX * (1 - _log_position(scale, y)):.0f}"
        for x, y in (start, end)
    ]
    return element("path", d="M" + "L".join(points), class_=style, vector_effect="non-scaling-stroke")


def _log_position(scale: Scale, value: float) -> float:
    """Return the position of a value on a logarithmic axis, unclamped."""
    return math.log(value / scale.low) / math.log(scale.high / scale.low)


def _x_tick(scale: Scale, tick: float, label: str) -> Html:
    at = scale.fraction(tick)
    side = "start" if at < 0.03 else "end" if at > 0.97 else "middle"
    x = f"{100 * at:.2f}%"
    return join(
        element("line", x1=x, x2=x, y1="0", y2="100%", class_="grid"),
        element("text", label, x=x, y="100%", dy="18", class_=f"tick {side}"),
    )


def _y_tick(scale: Scale, tick: float, label: str) -> Html:
    y = f"{100 * (1 - scale.fraction(tick)):.2f}%"
    return join(
        element("line", x1="0", x2="100%", y1=y, y2=y, class_="grid"),
        element("text", label, x="-8", y=y, dy="4", class_="tick end"),
    )


STYLE = """
.dotted .plane{position:relative}
.dotted svg{display:block;overflow:visible}
.dotted .plane>svg{width:100%;padding:6px 8px 24px 0}
.dotted .square>svg{height:min(680px,90vw);padding:6px 8px 24px 52px;max-width:820px}
.dotted .plane svg svg{overflow:hidden}
.axis-title{font-size:12px;color:var(--quiet);margin:10px 0 2px}
.axis-title.below{max-width:820px;text-align:right;margin:2px 0 10px}
.dotted .mark{stroke-width:5;stroke-linecap:round;stroke-opacity:.75}
.dotted .dot-mark{font-size:12px;fill:currentColor;stroke:none}
.dashed{stroke-dasharray:4 4}
.dotted text{pointer-events:none}
tbody th{overflow-wrap:anywhere}
.strip{display:grid;grid-template-columns:minmax(110px,270px) minmax(0,1fr);gap:14px;align-items:start}
.strip-names{font-size:12px;color:var(--quiet);padding-top:6px}
.strip-names div{height:26px;line-height:26px;overflow:hidden;text-overflow:ellipsis;white-space:nowrap}
@media (max-width:560px){.strip{grid-template-columns:118px minmax(0,1fr);gap:8px}}
"""
"""Style of scatter plots."""

SCRIPT = """
for (const plane of document.querySelectorAll('.plane')) {
  const dots = JSON.parse(plane.querySelector('script').textContent);
  const frame = plane.querySelector('.frame');
  plane.addEventListener('pointermove', event => {
    const box = frame.getBoundingClientRect();
    let best = null, least = 14 * 14;
    for (const [x, y, words] of dots) {
      const far = (box.left + x * box.width - event.clientX) ** 2 + (box.top + y * box.height - event.clientY) ** 2;
      if (far < least) { least = far; best = words; }
    }
    if (best === null) hide(); else show(event, best);
  });
  plane.addEventListener('pointerleave', () => hide());
}
"""
"""Script that shows the label of the dot nearest to the pointer."""
