"""Pareto fronts and what-if tables, for people and as JSON."""

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from muster.planner.pareto import ParetoFront, ParetoPoint
from muster.planner.what_if import WhatIfCase
from muster.report.html import Html, element
from muster.report.page import description_list, page, section
from muster.report.palette import SERIES
from muster.report.plans import unnamed_settings
from muster.report.prediction import html_table
from muster.report.scales import log_scale
from muster.report.scatter import SCRIPT, STYLE, Dot, draw_xy_plot
from muster.spec.formatting import format_bytes, format_count, format_seconds
from muster.spec.units import pluralize

_ROWS = 14
"""Lines of the terminal's picture."""
_MARKS = "123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
"""Labels of the plans in the picture."""


# ----------------------------------------------------------------------------------------------------------------------
# The front


def front_lines(front: ParetoFront) -> list[str]:
    """Return a line for each plan, numbered as in table and picture."""
    return [
        f"{_mark(index)} "
        f" {point.evaluated.name}{' *' if point.evaluated.unsupported else ''}{unnamed_settings(point.evaluated.plan)}"
        for index, point in enumerate(front.points)
    ]


def front_table(front: ParetoFront) -> Table:
    """Return a table with the figures of each plan."""
    shown = Table(box=None, pad_edge=False, header_style="bold")
    for head in ("", *_HEADS):
        shown.add_column(head, justify="right", no_wrap=True)
    for index, point in enumerate(front.points):
        shown.add_row(_mark(index), *_cells(point))
    return shown


_HEADS = ("devices", "step", "may save", "memory", "1B tokens", "tokens/s")
"""Heads of the figures. `may save`: largest part of the step that another plan may save."""


def _cells(point: ParetoPoint) -> tuple[str, ...]:
    """Return devices, step time, what of it another plan may save, memory, cost and throughput of a plan."""
    cost = usd_per_billion(point)
    return (
        f"{point.devices:,}",
        format_seconds(point.step_time_s),
        f"{point.gap:.1%}" if point.gap else "0",
        format_bytes(point.evaluated.peak_bytes),
        "n/a" if cost is None else f"${format_count(cost)}",
        format_count(point.evaluated.prediction.tokens_per_s),
    )


def usd_per_billion(point: ParetoPoint) -> float | None:
    """Return dollars per 10⁹ tokens; None where a price is unknown."""
    cost = point.usd_per_step
    return None if cost is None else cost / point.evaluated.prediction.workload.tokens_per_step * 1e9


def front_picture(front: ParetoFront, width: int = 80) -> list[str]:
    """Return a picture of memory per device over step time, both logarithmic; each plan is its number."""
    columns = min(width, 100) - 12
    x, y = _scales(front)
    grid = [[" "] * columns for _ in range(_ROWS)]
    for index, point in enumerate(front.points):
        column = round(x.fraction(point.step_time_s) * (columns - 1))
        cells = grid[round((1 - y.fraction(point.evaluated.peak_bytes)) * (_ROWS - 1))]
        free = (each for each in sorted(range(columns), key=lambda each: abs(each - column)) if cells[each] == " ")
        cells[next(free, column)] = _mark(index)  # plans that are alike stand beside each other
    lines = []
    for row, cells in enumerate(grid):
        label = format_bytes(y.high) if row == 0 else format_bytes(y.low) if row == _ROWS - 1 else ""
        lines.append(f"{label:>9} │{''.join(cells)}".rstrip())
    low, high = format_seconds(x.low), format_seconds(x.high)
    return [*lines, f"{'':>9} └{'─' * columns}", f"{'':>11}{low}{high:>{columns - len(low)}}"]


def front_page(front: ParetoFront, title: str) -> str:
    """Return the front as a self-contained HTML page."""
    sizes = sorted({point.devices for point in front.points}, reverse=True)
    dots = [
        Dot(
            point.step_time_s,
            point.evaluated.peak_bytes / 2**30,
            f"{_mark(index)}: {point.evaluated.name}, {_figures(point)}",
            sizes.index(point.devices) % len(SERIES),
            _mark(index),
        )
        for index, point in enumerate(front.points)
    ]
    key = element(
        "p",
        *(
            element(
                "span",
                element("i", class_=f"swatch line run-{number % len(SERIES)}"),
                f"{pluralize(size, 'device')}: {_marks_of(front, size)}",
            )
            for number, size in enumerate(sizes)
        ),
        class_="key",
    )
    words = "Step time and memory of the fullest device: lower left is better. Point at a plan for its name."
    axes = "seconds of a step", "GiB on the fullest device"
    x, y = _scales(front)
    y = log_scale(y.low / 2**30, y.high / 2**30)
    picture = draw_xy_plot("front", "Pareto front", words, dots, x, y, axes)
    rows = [
        ("", "plan", *_HEADS),
        *((_mark(index), point.evaluated.name, *_cells(point)) for index, point in enumerate(front.points)),
    ]
    header = element(
        "header",
        element("h1", title),
        element("p", "Plans that no other plan beats in time, memory, cost and devices at once.", class_="quiet"),
        description_list({"plans": str(len(front.points)), "simulated": f"{front.num_simulated:,}"}, "figures"),
    )
    drawn = element("div", element("p", words, class_="quiet"), key, picture)
    style, script = element("style", Html(STYLE)), element("script", Html(SCRIPT))
    return page(title, style, header, section("Time and memory", drawn), section("Plans", html_table(rows)), script)


def _figures(point: ParetoPoint) -> str:
    """Return devices, step time, memory and cost of a plan for a label."""
    cost = usd_per_billion(point)
    figures = [pluralize(point.devices, "device"), format_seconds(point.step_time_s)]
    figures.append(format_bytes(point.evaluated.peak_bytes))
    return ", ".join([*figures, *([] if cost is None else [f"${format_count(cost)} for 1B tokens"])])


def _marks_of(front: ParetoFront, size: int) -> str:
    """Return the labels of the plans for so many devices."""
    return " ".join(_mark(index) for index, point in enumerate(front.points) if point.devices == size)


def _scales(front: ParetoFront) -> Any:
    """Return the logarithmic axes of time and memory with some margin."""
    times = [point.step_time_s for point in front.points]
    sizes = [float(point.evaluated.peak_bytes) for point in front.points]
    return log_scale(min(times) / 1.15, max(times) * 1.15), log_scale(min(sizes) / 1.15, max(sizes) * 1.15)


def _mark(index: int) -> str:
    return _MARKS[index] if index < len(_MARKS) else "·"


def front_json(front: ParetoFront) -> dict[str, Any]:
    """Return plain data for JSON; null where a value is unknown."""
    return {
        "version": 1,
        "proven": front.proven,
        "simulated": front.num_simulated,
        "seconds": front.seconds,
        "front": [
            {
                "plan": point.evaluated.name,
                "hash": point.evaluated.plan.hash,
                "cluster": point.cluster.name,
                "devices": point.devices,
                "step_time_s": point.step_time_s,
                "gap": point.gap,
                "memory_bytes": point.evaluated.peak_bytes,
                "memory_limit_bytes": point.memory_limit_bytes,
                "usd_per_step": point.usd_per_step,
                "usd_per_billion_tokens": usd_per_billion(point),
                "tokens_per_s": point.evaluated.prediction.tokens_per_s,
                "not_yet": point.evaluated.unsupported,
                "fields": point.evaluated.plan.model_dump(mode="json"),
            }
            for point in front.points
        ],
    }


# ----------------------------------------------------------------------------------------------------------------------
# What if


def what_if_table(cases: Sequence[WhatIfCase]) -> Table:
    """Return a table with the best plan of each case, and the step time of the unchanged plan there."""
    shown = Table(box=None, pad_edge=False, header_style="bold")
    shown.add_column("what if", overflow="fold")
    for head in ("devices", "step", "speed", "memory", "1B tokens", "same plan"):
        shown.add_column(head, justify="right", no_wrap=True)
    base = cases[0].best
    for case in cases:
        best = case.best
        name = case.change or "as it is"
        if best is None:
            shown.add_row(name, f"{case.cluster.num_devices:,}", "none", "", "", "", "")
            continue
        one = best.prediction
        cost = usd_per_billion(ParetoPoint(best, case.cluster))
        speed = "" if base is None else f"{one.tokens_per_s / base.prediction.tokens_per_s:.2f}"
        same = "" if case.same_plan_step_s is None else format_seconds(case.same_plan_step_s)
        money = "n/a" if cost is None else f"${format_count(cost)}"
        shown.add_row(
            name,
            f"{best.plan.world_size:,}",
            format_seconds(one.step_time_s),
            speed,
            format_bytes(best.peak_bytes),
            money,
            same,
        )
    return shown


def what_if_lines(cases: Sequence[WhatIfCase]) -> list[str]:
    """Return the plan of each case, or the reason why there is none."""
    return [f"{case.change or 'as it is'}: {_plan_or_why_not(case)}" for case in cases]


def _plan_or_why_not(case: WhatIfCase) -> str:
    if case.best is None:
        return case.reason
    unproven = f" (another plan may take {case.gap:.1%} less: more --effort or --time-limit)" if case.gap else ""
    return case.best.name + unnamed_settings(case.best.plan) + unproven


def what_if_json(cases: Sequence[WhatIfCase]) -> dict[str, Any]:
    """Return plain data for JSON; null where a value is unknown."""
    return {"version": 1, "cases": [_case_json(case) for case in cases]}


def _case_json(case: WhatIfCase) -> dict[str, Any]:
    best = case.best
    point = None if best is None else ParetoPoint(best, case.cluster)
    return {
        "change": case.change,
        "cluster": case.cluster.name,
        "devices": case.cluster.num_devices,
        "plan": None if best is None else best.name,
        "hash": None if best is None else best.plan.hash,
        "step_time_s": None if best is None else best.prediction.step_time_s,
        "tokens_per_s": None if best is None else best.prediction.tokens_per_s,
        "memory_bytes": None if best is None else best.peak_bytes,
        "usd_per_billion_tokens": None if point is None else usd_per_billion(point),
        "same_plan_step_time_s": case.same_plan_step_s,
        "not_yet": None if best is None else best.unsupported,
        "why_not": case.reason or None,
        "gap": case.gap,
        "fields": None if best is None else best.plan.model_dump(mode="json"),
    }
