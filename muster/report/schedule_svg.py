"""Schedule as a self-contained SVG picture."""

from collections import defaultdict
from collections.abc import Iterator

from muster.report.html import Html, element, join
from muster.report.palette import PAINTS, Paint, paint_of
from muster.report.scales import nice_ticks, tick_labels
from muster.report.standalone_svg import fill_attributes, standalone_svg, stroke_attributes, text_attributes
from muster.schedule.action import Action, Kind, unit_label
from muster.schedule.schedule import Schedule
from muster.schedule.timing import Timing

_ROW_PX, _BOX_PX = 26, 22
_LEFT_PX, _RIGHT_PX, _TOP_PX, _BOTTOM_PX = 64, 172, 84, 40
_DIGIT_PX = 7
_MIN_WIDTH_PX, _MAX_WIDTH_PX = 640, 12_000


def schedule_svg(schedule: Schedule, timing: Timing) -> str:
    """Return the picture: a row for each rank, with its idle time and peak activations at the end. Boxes carry their
    micro-batch; those of a rank's second, fourth … stage are lighter."""
    scale_px = _scale_px(schedule, timing)
    width_px, height_px = round(timing.makespan_s * scale_px), _ROW_PX * len(schedule.ranks)
    title = f"{schedule.name}: {len(schedule.ranks)} ranks, {schedule.size_text}"
    facts = f"makespan {timing.makespan_s:.6g}, bubble {timing.bubble_s:.6g}"
    full_px = (_LEFT_PX + width_px + _RIGHT_PX, _TOP_PX + height_px + _BOTTOM_PX)
    body = join(
        element("text", title, x=_LEFT_PX, y=26, class_="title"),
        element("text", facts, x=_LEFT_PX, y=46, class_="quiet"),
        _legend(schedule),
        _axis(timing, scale_px, height_px),
        *(_row(schedule, timing, rank, scale_px) for rank in range(len(schedule.ranks))),
        element("text", "span bubble", x=_LEFT_PX + width_px + 72, y=_TOP_PX - 8, class_="quiet end"),
        element("text", "peak", x=_LEFT_PX + width_px + 142, y=_TOP_PX - 8, class_="quiet end"),
    )
    return standalone_svg(title, facts, body, *full_px)


def _scale_px(schedule: Schedule, timing: Timing) -> float:
    """Return pixels per second that give the shortest pass room for its number, within bounds for the whole."""
    last = Action(Kind.F, 0, schedule.num_micro_batches - 1, schedule.num_slices - 1)
    wanted_px = _DIGIT_PX * len(unit_label(last, schedule.num_slices > 1)) + 8
    passes = (one for rank in range(len(schedule.ranks)) for one in _passes(schedule, timing, rank))
    shortest_s = min((end_s - begin_s for _, begin_s, end_s in passes), default=1.0)
    if not timing.makespan_s:
        return 1.0
    width_px = min(_MAX_WIDTH_PX, max(_MIN_WIDTH_PX, timing.makespan_s / shortest_s * wanted_px))
    return width_px / timing.makespan_s


def _passes(schedule: Schedule, timing: Timing, rank: int) -> Iterator[tuple[Action, float, float]]:
    """Yield the passes of a rank that take time, with start and end."""
    for action, begin_s, end_s in zip(schedule.ranks[rank], timing.begin_s[rank], timing.end_s[rank], strict=True):
        if end_s - begin_s > 1e-9 * timing.makespan_s:
            yield action, begin_s, end_s


def _legend(schedule: Schedule) -> Html:
    """Return the colours that occur with their names."""
    found = {action.kind for order in schedule.ranks for action in order}
    parts = []
    at_px = _LEFT_PX
    for paint in PAINTS:
        if found.intersection(paint.kinds):
            parts.append(element("rect", x=at_px, y=56, width=14, height=12, **fill_attributes(paint)))
            parts.append(element("text", paint.label, x=at_px + 20, y=66, class_="quiet"))
            at_px += 40 + 7 * len(paint.label)
    if schedule.chunks > 1:
        parts.append(element("text", "pale: a rank's second stage", x=at_px, y=66, class_="quiet"))
    return join(*parts)


def _axis(timing: Timing, scale_px: float, height_px: int) -> Html:
    """Return the time axis."""
    length_s = timing.makespan_s
    if not length_s:
        return Html("")
    parts = []
    ticks = nice_ticks(0.0, length_s, max(3, round(length_s * scale_px) // 90))
    for tick, label in zip(ticks, tick_labels(ticks), strict=True):
        x = _LEFT_PX + tick * scale_px
        parts.append(element("line", x1=x, x2=x, y1=_TOP_PX, y2=_TOP_PX + height_px + 4, class_="grid"))
        parts.append(element("text", label, x=x, y=_TOP_PX + height_px + 20, class_="quiet middle"))
    return join(*parts)


def _row(schedule: Schedule, timing: Timing, rank: int, scale_px: float) -> Html:
    """Return a path for each colour, with gaps between boxes, and the numbers on them."""
    held = [stage for stage, holder in enumerate(schedule.placement) if holder == rank]
    top_px = _TOP_PX + _ROW_PX * rank
    middle_px = top_px + _ROW_PX / 2
    width_px = timing.makespan_s * scale_px
    pieces: defaultdict[tuple[Paint, bool], list[str]] = defaultdict(list)
    numbers: defaultdict[tuple[Paint, bool], list[Html]] = defaultdict(list)
    for action, begin_s, end_s in _passes(schedule, timing, rank):
        colour = (paint_of(action.kind), held.index(action.stage) % 2 == 1)
        number = unit_label(action, schedule.num_slices > 1)
        left_px, box_px = _LEFT_PX + begin_s * scale_px, (end_s - begin_s) * scale_px
        gap_px = 1.0 if box_px > 6 else 0.0
        pieces[colour].append(f"M{left_px:.1f} {middle_px:g}h{box_px - gap_px:.1f}")
        if box_px >= _DIGIT_PX * len(number) + 3:
            numbers[colour].append(element("text", number, x=f"{left_px + box_px / 2:.1f}", y=middle_px + 4))
    track = element("path", d=f"M{_LEFT_PX} {middle_px:g}h{width_px:.1f}", stroke_width=_BOX_PX, class_="idle")
    boxes = (
        element("path", d="".join(d), stroke_width=_BOX_PX, **stroke_attributes(*colour))
        for colour, d in pieces.items()
    )
    words = (
        element("text", f"rank {rank}", x=_LEFT_PX - 10, y=middle_px + 4, class_="end"),
        *(element("g", *texts, **text_attributes(*colour, "number")) for colour, texts in numbers.items()),
        element("text", f"{timing.span_bubble_s[rank]:.6g}", x=_LEFT_PX + width_px + 72, y=middle_px + 4, class_="end"),
        element(
            "text", f"{timing.peak_activation[rank]:g}", x=_LEFT_PX + width_px + 142, y=middle_px + 4, class_="end"
        ),
    )
    return join(track, *boxes, *words)
