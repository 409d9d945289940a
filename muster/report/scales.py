"""Axes: ranges, ticks and tick labels."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from muster.spec.formatting import format_number

MIN_LOG_RATIO = 100.0
"""Ratio of a positive quantity's extremes from which its axis is logarithmic, where the chart allows it."""


@dataclass(frozen=True, slots=True)
class Scale:
    """Axis: its range, and ticks within the range."""

    low: float
    high: float
    ticks: tuple[float, ...]
    log: bool = False

    def fraction(self, value: float) -> float:
        """Return the position of a value, 0 at the low end and 1 at the high end; values beyond are clamped."""
        low, high, at = self.low, self.high, value
        if self.log:
            low, high, at = math.log(low), math.log(high), math.log(max(value, 1e-300))
        return min(1.0, max(0.0, (at - low) / (high - low)))

    @property
    def labels(self) -> tuple[str, ...]:
        """Texts of the ticks."""
        return tuple(map(format_number, self.ticks)) if self.log else tick_labels(self.ticks)


def fit_scale(values: Sequence[float], from_zero: bool = False, allow_log: bool = False, ticks: int = 5) -> Scale:
    """Return an axis for finite values with margins; from 0 to 1 for no values."""
    if not values:
        return Scale(0.0, 1.0, (0.0, 0.5, 1.0))
    low, high = min(values), max(values)
    if allow_log and low > 0 and high / low > MIN_LOG_RATIO:
        return log_scale(low / 1.1, high * 1.1)
    if from_zero and low >= 0:
        low, high = 0.0, high * 1.05 or 1.0
    elif high - low > 1e-7 * max(abs(low), abs(high)):
        air = 0.05 * (high - low)
        low, high = low - air, high + air
    else:
        low, high = low - (abs(low) / 2 or 0.5), high + (abs(high) / 2 or 0.5)
    return Scale(low, high, nice_ticks(low, high, ticks))


def nice_ticks(low: float, high: float, most: int = 5) -> tuple[float, ...]:
    """Return at most `most` round numbers at equal distances within a range, in steps of 1, 2, 2.5 or 5 times a
    power of ten."""
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(f * power for f in (1, 2, 2.5, 5, 10, 20) if f * power > rough)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return tuple(min(max(step * i, low), high) for i in range(first, last + 1))


def tick_labels(ticks: Sequence[float]) -> tuple[str, ...]:
    """Return labels for equally spaced ticks: with the decimals that their distance needs, and one suffix (`k`, `M`,
    a power of ten) for all."""
    step = abs(ticks[1] - ticks[0]) if len(ticks) > 1 else abs(ticks[0])
    largest = max(map(abs, ticks))
    unit, suffix = 1.0, ""
    if largest >= 1e4:
        unit, suffix = next((u, s) for u, s in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")) if largest >= u)
    elif 0 < largest < 1e-2:
        exponent = math.floor(math.log10(largest) + 1e-9)
        unit, suffix = 10.0**exponent, f"e−{-exponent}"
    decimals = max(0, next((d for d in range(9) if math.isclose(round(step / unit, d), step / unit)), 9))
    return tuple(f"{t / unit:.{decimals}f}{suffix}".replace("-", "−") if t else "0" for t in ticks)


def time_labels(ticks_s: Sequence[float]) -> tuple[str, ...]:
    """Return labels for equally spaced times, all in one unit."""
    scale, unit = next(((s, u) for s, u in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")) if ticks_s[-1] >= s), (1e-9, "ns"))
    return tuple(f"{label} {unit}" for label in tick_labels([tick / scale for tick in ticks_s]))


def log_scale(low: float, high: float) -> Scale:
    """Return a logarithmic axis; both ends are above 0. Within less than a decade, ticks stand at equal distances."""
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    stride = max(1, len(exponents) // 6)
    marks = (1, 2, 5) if len(exponents) <= 4 else (1,)
    ticks = [m * 10.0**e for e in exponents[::stride] for m in marks]
    within = tuple(t for t in ticks if low <= t <= high)
    return Scale(low, high, within if len(within) > 2 else nice_ticks(low, high), log=True)
