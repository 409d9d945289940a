"""Curves from rows of metrics: points, smoothing and downsampling."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

MAX_BUCKETS = 400
"""Buckets of a downsampled curve; each keeps its smallest and its largest value."""

MAX_DRAWN = 1e100
"""Largest value that is drawn. Larger ones count as infinite: the run has overflowed, and no axis could show both."""


class Point(NamedTuple):
    """Value at a step: NaN or infinite where the run produced that, None where it logged nothing."""

    step: float
    value: float | None


def metric_points(rows: Iterable[Mapping[str, Any]], key: str) -> list[Point]:
    """Return the points of one metric, sorted by step; of several rows of a step the last one counts.

    A null stands for a number that wasn't finite, since JSON has none.
    """
    values = {}
    for row in rows:
        if (step := _as_float(row.get("step"))) is not None:
            values[step] = math.nan if key in row and row[key] is None else _as_float(row.get(key))
    return [Point(step, values[step]) for step in sorted(values)]


def finite_values(points: Iterable[Point]) -> list[float]:
    """Return the values that can be drawn."""
    return [point.value for point in points if point.value is not None and math.isfinite(point.value)]


def smooth(points: Sequence[Point]) -> list[Point]:
    """Return the trimmed mean over a centred window of a twentieth of the points.

    A centred window doesn't lag. Near the start, where curves are steep, it shrinks on both sides; at the end only its
    later half is cut. The highest and the lowest quarter of a window and non-finite values are left out, so that a
    spike moves nothing. A wide window is sampled at two hundred points. Returns at most 2 × MAX_BUCKETS + 1 points.
    """
    half = len(points) // 40
    last = len(points) - 1
    stride = -(-len(points) // (2 * MAX_BUCKETS)) or 1
    window_stride = 1 + half // 100
    result = []
    for i in sorted({*range(0, len(points), stride), last} - {-1}):
        reach = min(half, i)
        window = finite_values(points[i - reach : i + reach + 1 : window_stride])
        result.append(Point(points[i].step, _trimmed_mean(window) if window else None))
    return result


def downsample(points: Sequence[Point]) -> list[Point]:
    """Return at most 2 × MAX_BUCKETS + 2 points, with every peak and both ends; gaps wider than a bucket stay gaps."""
    if len(points) <= 2 * MAX_BUCKETS:
        return list(points)
    kept = {points[0].step: points[0]}
    for bucket in range(MAX_BUCKETS):
        first, end = (len(points) * b // MAX_BUCKETS for b in (bucket, bucket + 1))
        drawn = [point for point in points[first:end] if finite_values([point])] or [Point(points[first].step, None)]
        kept |= {point.step: point for point in sorted((min(drawn, key=_value), max(drawn, key=_value)))}
    kept[points[-1].step] = points[-1]
    return list(kept.values())


def non_finite_steps(points: Sequence[Point]) -> list[float]:
    """Return the steps whose value was NaN or infinite, at most MAX_BUCKETS of them."""
    steps = [point.step for point in points if point.value is not None and not math.isfinite(point.value)]
    return steps[:: -(-len(steps) // MAX_BUCKETS) or 1]


def line_segments(points: Sequence[Point]) -> list[list[Point]]:
    """Return the stretches of neighbouring finite points; each is drawn as one line."""
    runs: list[list[Point]] = [[]]
    for point in points:
        if finite_values([point]):
            runs[-1].append(point)
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


def _trimmed_mean(values: list[float]) -> float:
    """Return the mean of the values without their highest and lowest quarter."""
    cut = (len(values) + 1) // 4
    kept = sorted(values)[cut : len(values) - cut]
    return math.fsum(kept) / len(kept)


def _value(point: Point) -> float:
    return point.value if point.value is not None else math.nan


def _as_float(value: object) -> float | None:
    """Return a number as a float, infinite beyond MAX_DRAWN; None for anything else."""
    if not _is_number(value):
        return None
    number = float(value)  # type: ignore[arg-type]
    return number if abs(number) <= MAX_DRAWN or math.isnan(number) else math.copysign(math.inf, number)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
