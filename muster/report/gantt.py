"""Timelines as pictures: a row for each rank with a band for each lane, on one common time axis.

A box is a piece of a thick line. So one short path holds all boxes of a lane that share a colour, which keeps the page
small, and the pointer reads times and names from the path itself.
"""

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from muster.report.html import Html, element, join
from muster.report.palette import PAINTS, Paint, paint_of
from muster.report.scales import nice_ticks, time_labels
from muster.report.timeline_rows import TimelineRows, median_pass_s, timeline_rows
from muster.schedule.action import KINDS, Lane, unit_label
from muster.simulate.timeline import Event, Timeline
from muster.spec.formatting import format_fraction

_VIEW_BOX = 100_000
"""Width of a picture in its own units; times are rounded to that many parts of the axis."""
_DIGIT_PX = 7
"""Width of a digit."""
_MIN_WIDTH_PX, _MAX_WIDTH_PX = 560, 1000
"""Least widths of a picture, which is as wide as the page where that is wider: on a window of 1,280 pixels nothing
scrolls sideways."""
_MAX_TALL_ROWS = 16
"""Most ranks that are drawn in tall rows with numbers."""
_LANE_NAMES: dict[Lane, str] = {
    "compute": "compute",
    "p2p": "sends and receives",
    "collective": "collectives",
    "host_copy": "copies",
    "disk": "disk",
    "outer": "exchanges between islands",
    "host": "updates by the host",
}
"""Lanes as the legend names them."""


@dataclass(frozen=True, slots=True)
class _Frame:
    """Common time axis, and its minimum width."""

    length_s: float
    width_px: int

    def units(self, time_s: float) -> int:
        """Return a time in units of the picture."""
        return round(_VIEW_BOX * time_s / self.length_s)

    def pixels(self, time_s: float) -> float:
        """Return a time in pixels at the minimum width."""
        return self.width_px * time_s / self.length_s

    def percent(self, time_s: float) -> str:
        """Return a time in per cent of the axis."""
        return f"{100 * time_s / self.length_s:.2f}%"


@dataclass(frozen=True, slots=True)
class _Band:
    """Position of a lane within a row: upper edge and thickness in pixels."""

    top: int
    thick: int


def draw_timelines(*timelines: Timeline) -> Html:
    """Return the timelines one above the other on a common time axis, in a box that scrolls sideways."""
    all_rows = [timeline_rows(timeline) for timeline in timelines]
    length_s = max((rows.length_s for rows in all_rows), default=0.0)
    if not length_s:
        return element("p", "No timeline was recorded.", class_="quiet")
    frame = _Frame(length_s, _width_px(length_s, all_rows))
    kinds = json.dumps({name: kind.explanation for name, kind in KINDS.items()}).replace("<", "\\u003c")
    box = element(
        "div",
        *(_timeline(rows, frame) for rows in all_rows),
        element("script", Html(kinds), type="application/json"),
        class_="timelines",
        tabindex="0",
        role="group",
        aria_label="Timelines, which scroll sideways",
        data_length=repr(length_s),
    )
    return join(_legend(all_rows), box)


def _width_px(length_s: float, all_rows: Sequence[TimelineRows]) -> int:
    """Return a width with room for two digits in a typical numbered box, within bounds."""
    pass_s = median_pass_s(all_rows)
    box_px = 2 * _DIGIT_PX + 4 if any(len(rows.ranks) <= _MAX_TALL_ROWS for rows in all_rows) else 3
    wanted = length_s / pass_s * box_px if pass_s else 0.0
    return int(min(_MAX_WIDTH_PX, max(_MIN_WIDTH_PX, wanted)))


def _legend(all_rows: Sequence[TimelineRows]) -> Html:
    """Return the colours that occur, and the order of lanes within a row."""
    found = {event.action.kind for rows in all_rows for events in rows.events.values() for event in events}
    paints = [paint for paint in PAINTS if any(paint_of(kind) is paint for kind in found)]
    entries = [element("span", element("i", class_=f"swatch on-{p.key}"), p.label) for p in paints]
    entries.append(element("span", element("i", class_="swatch idle"), "no compute"))
    lanes = [name for lane, name in _LANE_NAMES.items() if any(lane in rows.lanes for rows in all_rows)]
    order = f"Bands of a row from the top: {', '.join(lanes)}." if len(lanes) > 1 else ""
    return join(element("p", *entries, class_="key legend"), element("p", order, class_="quiet"))


def _timeline(rows: TimelineRows, frame: _Frame) -> Html:
    """Return one timeline: caption, row names and picture."""
    bands, row_px = _bands(rows)
    height_px = row_px * len(rows.ranks)
    title = f"{rows.source.capitalize()} timeline"
    key = f"timeline-{rows.source}"
    summary = f"{rows.length_text}, {format_fraction(rows.bubble)} of it bubble"
    if len(rows.ranks) < rows.num_ranks:
        summary += f"; {len(rows.ranks)} of {rows.num_ranks} ranks are shown"
    names = [_row_name(f"{rows.row_name} {rank}", row_px, bands["compute"]) for rank in rows.ranks]
    boxes = [_row(rows, rank, index * row_px, bands, frame) for index, rank in enumerate(rows.ranks)]
    inner = element(
        "svg",
        *boxes,
        viewBox=f"0 0 {_VIEW_BOX} {height_px}",
        preserveAspectRatio="none",
        width="100%",
        height=height_px,
    )
    words = _numbers(rows, bands["compute"], row_px, frame) if bands["compute"].thick >= 16 else Html("")
    svg = element(
        "svg",
        element("title", title, id=f"{key}-title"),
        element("desc", f"{rows.num_ranks} {rows.row_name}s; {summary}.", id=f"{key}-desc"),
        _time_axis(frame, height_px),
        inner,
        words,
        role="img",
        aria_labelledby=f"{key}-title {key}-desc",
        style=f"height:{height_px + 24}px",
    )
    caption = element("figcaption", element("h3", rows.source.capitalize()), element("span", summary, class_="unit"))
    plot = element("div", svg, class_="plot", style=f"min-width:{frame.width_px}px")
    return element("figure", caption, element("div", *names, class_="names"), plot, class_="gantt", id=key)


def _bands(rows: TimelineRows) -> tuple[dict[Lane, _Band], int]:
    """Return the band of each lane, and the height of a row with the space below it."""
    compute, other, air = (20, 5, 9) if len(rows.ranks) <= _MAX_TALL_ROWS else (8, 2, 3)
    bands = {}
    top = 0
    for lane in rows.lanes:
        bands[lane] = _Band(top, compute if lane == "compute" else other)
        top += bands[lane].thick + 1
    return bands, top + air


def _row_name(name: str, row_px: int, compute: _Band) -> Html:
    """Return a row's name, placed beside its compute band."""
    return element("div", name, style=f"height:{row_px}px;line-height:{max(10, compute.thick)}px")


def _time_axis(frame: _Frame, height_px: int) -> Html:
    """Return ticks at round times, with their labels below."""
    parts = [element("rect", width="100%", height=height_px, class_="frame")]
    ticks = nice_ticks(0.0, frame.length_s, max(3, frame.width_px // 110))
    for tick, label in zip(ticks, time_labels(ticks), strict=True):
        at = frame.percent(tick)
        side = "middle" if 0.03 < tick / frame.length_s < 0.97 else "start" if tick < frame.length_s / 2 else "end"
        parts.append(element("line", x1=at, x2=at, y1="0", y2=height_px, class_="grid"))
        parts.append(element("text", label, x=at, y=height_px, dy="16", class_=f"tick {side}"))
    return join(*parts)


def _row(rows: TimelineRows, rank: int, top: int, bands: dict[Lane, _Band], frame: _Frame) -> Html:
    """Return the boxes of one rank, on a track that shows idle time."""
    compute = bands["compute"]
    middle = top + compute.thick / 2
    track = element("path", d=f"M0 {middle:g}h{frame.units(rows.length_s)}", stroke_width=compute.thick, class_="idle")
    parts = [track]
    for lane, band in bands.items():
        events = rows.events.get((rank, lane), [])
        parts += _boxes(events, rows.start_s, top + band.top, band.thick, frame)
    return join(*parts)


def _boxes(events: Sequence[Event], start_s: float, top: int, thick: int, frame: _Frame) -> list[Html]:
    """Return one path for each colour, and thin lines at the start of wide boxes."""
    pieces: dict[Paint, list[tuple[str, str]]] = defaultdict(list)
    edges = []
    for event in events:
        left, right = frame.units(event.start_s - start_s), frame.units(event.end_s - start_s)
        piece = f"M{left} {top + thick / 2:g}h{max(1, right - left)}"
        pieces[paint_of(event.action.kind)].append((piece, str(event.action)))
        if thick >= 8 and frame.pixels(event.duration_s) > 3:
            edges.append(f"M{left} {top}v{thick}")
    paths = [
        element(
            "path",
            d="".join(piece for piece, _ in group),
            stroke_width=thick,
            class_=f"mark box paint-{paint.key}",
            data_boxes=" ".join(name for _, name in group),
        )
        for paint, group in pieces.items()
    ]
    if edges:
        paths.append(element("path", d="".join(edges), class_="edge", vector_effect="non-scaling-stroke"))
    return paths


def _numbers(rows: TimelineRows, band: _Band, row_px: int, frame: _Frame) -> Html:
    """Return the micro-batch numbers of compute boxes that are wide enough for them."""
    words: dict[Paint, list[Html]] = defaultdict(list)
    has_slices = any(event.action.slice for events in rows.events.values() for event in events)
    for index, rank in enumerate(rows.ranks):
        middle = f"{index * row_px + band.top + band.thick / 2 + 4:g}"
        for event in rows.events.get((rank, "compute"), []):
            number = unit_label(event.action, has_slices)
            if event.action.micro_batch < 0 or frame.pixels(event.duration_s) < _DIGIT_PX * len(number) + 3:
                continue
            at = frame.percent((event.start_s + event.end_s) / 2 - rows.start_s)
            words[paint_of(event.action.kind)].append(element("text", number, x=at, y=middle))
    return join(*(element("g", *texts, class_=f"number middle on-{paint.key}") for paint, texts in words.items()))
