"""Schedule as a grid of letters: a row for each rank, time from left to right, long schedules in several pages."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

from muster.report.palette import PALE_TEXT, paint_of
from muster.report.timeline_rows import evenly_spaced
from muster.schedule.action import Action, Kind, unit_label
from muster.schedule.program import PAIRED
from muster.schedule.schedule import Schedule
from muster.schedule.timing import Timing
from muster.spec.formatting import format_fraction

MAX_LINES = 60
"""Most lines of a grid with names. A longer schedule gets one page of single letters: each is the pass in the middle
of its column."""
MAX_RANKS = 32
"""Most ranks in a grid."""
_FILLINGS = {Kind.F: "-", Kind.B: "=", Kind.I: "~", Kind.W: "_"}
"""Filling of a box after its name, which distinguishes kinds without colour."""
_LETTERS: dict[str, str] = {Kind.EMB_F: "E", Kind.EMB_W: "EW"}
"""Letters of kinds whose name is too long for a box."""
_NAMES = {
    Kind.F: "forward",
    Kind.B: "backward",
    Kind.I: "backward for inputs",
    Kind.W: "backward for weights",
    Kind.EMB_F: "embedding lookup",
    Kind.S: "logits",
    Kind.T: "backward of logits",
    Kind.EMB_W: "backward of embedding",
}
"""Kinds in the legend."""


def schedule_summary(schedule: Schedule, timing: Timing) -> Text:
    """Return size, makespan, bubble and peak activations in four lines."""
    text = Text(f"{schedule.name}: {len(schedule.ranks)} ranks, {schedule.size_text}")
    text.append(f", {schedule.chunks} stages per rank" if schedule.chunks > 1 else "")
    text.append(f", {schedule.replicas} replicas" if schedule.replicas > 1 else "")
    text.append(f"\nmakespan {timing.makespan_s:.6g}, bubble {timing.bubble_s:.6g} ({_bubble_fraction(timing)} of it)")
    text.append(f"\nspan bubble by rank: {_by_rank(timing.span_bubble_s)}")
    text.append(f"\npeak activations by rank: {_by_rank(timing.peak_activation)}\n")
    return text


def schedule_comparison(made: Sequence[tuple[Schedule, Timing]]) -> Table:
    """Return a table of schedules in the given order."""
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim")
    table.add_column("", no_wrap=True)
    for name in ("stages per rank", "makespan", "bubble", "part", "peak"):
        table.add_column(name, justify="right", no_wrap=True)
    for schedule, timing in made:
        times = (f"{time_s:.6g}" for time_s in (timing.makespan_s, timing.bubble_s))
        table.add_row(
            schedule.name, str(schedule.chunks), *times, _bubble_fraction(timing), f"{max(timing.peak_activation):g}"
        )
    return table


def _bubble_fraction(timing: Timing) -> str:
    return format_fraction(timing.bubble_s / timing.makespan_s)


def _by_rank(values: Sequence[float]) -> str:
    """Return the values of all ranks, or their range where there are many."""
    words = [f"{round(value, 9):.6g}" for value in values]
    if len(set(words)) == 1:
        return f"{words[0]} on each"
    return ", ".join(words) if len(words) <= 16 else f"{min(values):.6g} to {max(values):.6g}"


@dataclass(frozen=True, slots=True)
class _Scale:
    """Mapping of time to columns."""

    columns_per_s: float
    page_columns: int
    num_pages: int
    in_full: bool
    """True where every pass is wide enough for its name."""


def grid_text(schedule: Schedule, timing: Timing, width: int = 80) -> Text:
    """Return the grid, at most `width` columns wide.

    A box has its kind and micro-batch (`F0`, `B0==`), or a letter alone where that doesn't fit. Lower case marks the
    second, fourth … stage of a rank, dots are idle time, and `&` ends the box of a forward that is half of a pair.
    """
    ranks = evenly_spaced(len(schedule.ranks), MAX_RANKS)
    indent = len(str(ranks[-1])) + 1
    scale = _scale_of(schedule, timing, max(8, width - indent), MAX_LINES // (len(ranks) + 2))
    text = _legend(schedule)
    if len(ranks) < len(schedule.ranks):
        text.append(f"\n{len(ranks)} of {len(schedule.ranks)} ranks are shown", "dim")
    for page in range(scale.num_pages):
        columns = range(page * scale.page_columns, (page + 1) * scale.page_columns)
        last = min(columns[-1] + 1, max(columns[0] + 1, round(timing.makespan_s * scale.columns_per_s)))
        columns = range(columns[0], last)
        text.append("\n")
        for rank in ranks:
            text.append(f"\n{rank:>{indent - 1}} ")
            text.append_text(_row(schedule, timing, rank, columns, scale))
        first, end = (f"{column / scale.columns_per_s:.6g}" for column in (columns[0], last))
        gap = max(1, len(columns) - len(first) - len(end))
        text.append(f"\n{'':{indent}}{first}{'':{gap}}{end}", "dim")
    return text


def _scale_of(schedule: Schedule, timing: Timing, columns: int, max_pages: int) -> _Scale:
    """Return a scale that gives the shortest pass room for its name, unless that takes too many pages."""
    last = Action(Kind.F, 0, schedule.num_micro_batches - 1, schedule.num_slices - 1)
    name = len(f"F{unit_label(last, schedule.num_slices > 1)}") + bool(schedule.pairs)
    durations_s = (
        end_s - begin_s
        for begins, ends in zip(timing.begin_s, timing.end_s, strict=True)
        for begin_s, end_s in zip(begins, ends, strict=True)
    )
    shortest_s = min((duration_s for duration_s in durations_s if duration_s > 1e-9 * timing.makespan_s), default=1.0)
    per_s = name / shortest_s
    page = max(name, columns // name * name)
    pages = -(-round(timing.makespan_s * per_s) // page)
    if pages > max(1, max_pages):
        return _Scale(columns / timing.makespan_s, columns, 1, False)
    return _Scale(per_s, page, max(1, pages), True)


def _row(schedule: Schedule, timing: Timing, rank: int, columns: Sequence[int], scale: _Scale) -> Text:
    """Return the row of one rank; a column shows the pass in its middle."""
    held = [stage for stage, holder in enumerate(schedule.placement) if holder == rank]
    begins, ends = timing.begin_s[rank], timing.end_s[rank]
    passes = []
    for time_s in ((column + 0.5) / scale.columns_per_s for column in columns):
        index = bisect_right(begins, time_s) - 1
        passes.append(index if index >= 0 and time_s < ends[index] else -1)
    text = Text()
    column = 0
    while column < len(passes):
        end = column + 1
        while end < len(passes) and passes[end] == passes[column]:
            end += 1
        if passes[column] < 0:
            text.append("." * (end - column), "dim")
        else:
            action = schedule.ranks[rank][passes[column]]
            letters = _letters(action.kind)
            name = (
                f"{letters}{unit_label(action, schedule.num_slices > 1)}" if scale.in_full else letters * (end - column)
            )
            box = _box(action.kind, name, held.index(action.stage) % 2 == 1, end - column)
            if action in schedule.pairs and len(name) < len(box):
                box.plain = box.plain[:-1] + PAIRED
            text.append_text(box)
        column = end
    return text


def _letters(kind: Kind) -> str:
    return _LETTERS.get(kind, kind.value)


def _box(kind: Kind, name: str, odd: bool, length: int) -> Text:
    """Return a box: the name, or the kind's letters alone, on the kind's colour."""
    paint = paint_of(kind)
    name = name if len(name) <= length else _letters(kind)[:length]  # half a number would be another number
    name = name.ljust(length, _FILLINGS.get(kind, " "))
    if odd:
        return Text(name.lower(), f"{PALE_TEXT} on {paint.pale_colour}")
    return Text(name, f"{paint.light_text} on {paint.light}")


def _legend(schedule: Schedule) -> Text:
    """Return the letters that occur, with their meanings."""
    found = {action.kind for order in schedule.ranks for action in order}
    text = Text()
    for kind, name in _NAMES.items():
        if kind in found:
            paint = paint_of(kind)
            text.append("  " if text else "").append(f" {_letters(kind)} ", f"{paint.light_text} on {paint.light}")
            text.append(f" {name}")
    if schedule.pairs:
        text.append(f"\n{PAIRED}: a forward that runs as one with the backward after it", "dim")
    if schedule.chunks > 1:
        text.append("\nlower case, pale: a rank's second stage" + (", fourth …" if schedule.chunks > 2 else ""), "dim")
    return text
