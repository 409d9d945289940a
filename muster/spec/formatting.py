"""Numbers for people, formatted alike in terminal and pages."""

import math
from typing import Literal

Unit = Literal["s", "bytes", "fraction"]
"""Unit of a compared quantity."""

NOT_AVAILABLE = "n/a"
"""Placeholder for an unknown value."""

LARGE_ERROR = 0.2
"""Relative error from which a prediction is marked."""

_COUNTS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))
_BYTES = ((2.0**40, "TiB"), (2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"))
_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))


def format_seconds(seconds: float | None) -> str:
    """Format seconds as `12.3 ms`, `1.23 s`, `3 min 05 s` or `2 h 07 min`."""
    if seconds is None or not math.isfinite(seconds):
        return _not_finite(seconds)
    size = abs(seconds)
    if size >= 59.95:
        return _minutes(seconds)
    if size == 0:
        return "0 s"
    scale, unit = next(((s, u) for s, u in _SECONDS if size >= 0.9995 * s), _SECONDS[-1])
    return f"{_three_digits(seconds / scale)} {unit}"


def format_bytes(count: float | None) -> str:
    """Format bytes as `512 B`, `1.50 MiB` or `12.3 GiB`."""
    if count is None or not math.isfinite(count):
        return _not_finite(count)
    for scale, unit in _BYTES:
        if abs(count) >= 0.9995 * scale:
            return f"{_three_digits(count / scale)} {unit}"
    return f"{count:.0f} B"


def format_count(count: float | None) -> str:
    """Format a count with three digits and a letter: `87`, `412k`, `1.25M`, `7.24B`."""
    if count is None or not math.isfinite(count):
        return _not_finite(count)
    for scale, unit in _COUNTS:
        if abs(count) >= 0.9995 * scale:
            return f"{_three_digits(count / scale)}{unit}"
    return f"{count:.0f}" if count == int(count) else _three_digits(count)


def format_fraction(fraction: float | None) -> str:
    """Format a fraction as per cents: `12.3 %`."""
    if fraction is None or not math.isfinite(fraction):
        return _not_finite(fraction)
    return f"{100 * fraction:.1f} %"


def format_change(part: float) -> str:
    """Format the size of a relative change as `3.1%`, and an increase to twice or more as a factor: `16.7x`."""
    return f"{1 + part:.1f}x" if part >= 1 else f"{abs(part):.1%}"


def format_number(value: float | None) -> str:
    """Format with four significant digits, and a power of ten for very small or large numbers."""
    if value is None or not math.isfinite(value):
        return _not_finite(value)
    if value and not 1e-3 <= abs(value) < 9999.5:
        mantissa, _, exponent = f"{value:.3e}".partition("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}".replace("-", "−")
    return f"{value:.4g}".replace("-", "−")


def format_loss(value: float | None) -> str:
    """Format with four significant digits, zeros at the end included, so that losses in a column line up."""
    plain = value is not None and 1e-3 <= abs(value) < 9999.5
    return f"{value:#.4g}" if plain else format_number(value)


def format_value(value: float | None, unit: Unit) -> str:
    """Format a value in its unit."""
    return {"s": format_seconds, "bytes": format_bytes, "fraction": format_fraction}[unit](value)


def format_error(predicted: float | None, measured: float | None, unit: Unit) -> str:
    """Format the error of a prediction relative to the measurement, such as `+3.1 %`.

    Fractions differ in percentage points. There is no error without both values, or relative to 0.
    """
    if predicted is None or measured is None or not math.isfinite(predicted) or not math.isfinite(measured):
        return NOT_AVAILABLE
    if unit == "fraction":
        return f"{100 * (predicted - measured):+.1f} points".replace("-", "−")
    if measured == 0:
        return "+0.0 %" if predicted == 0 else NOT_AVAILABLE
    return f"{100 * (predicted - measured) / abs(measured):+.1f} %".replace("-", "−")


def is_large_error(predicted: float | None, measured: float | None, unit: Unit) -> bool:
    """Tell if a prediction is off by more than LARGE_ERROR of the measurement, or of 1 for a fraction."""
    if predicted is None or measured is None:
        return False
    return abs(predicted - measured) > LARGE_ERROR * (1.0 if unit == "fraction" else abs(measured))


def _three_digits(value: float) -> str:
    size = abs(value)
    decimals = 0 if size >= 99.95 else 1 if size >= 9.995 else 2
    return f"{value:.{decimals}f}".replace("-", "−")


def _minutes(seconds: float) -> str:
    sign = "−" if seconds < 0 else ""
    total = round(abs(seconds))
    minutes, rest = divmod(total, 60)
    hours, minutes_left = divmod(minutes, 60)
    return f"{sign}{hours} h {minutes_left:02d} min" if hours else f"{sign}{minutes} min {rest:02d} s"


def _not_finite(value: float | None) -> str:
    if value is None:
        return NOT_AVAILABLE
    return "NaN" if math.isnan(value) else "∞" if value > 0 else "−∞"
