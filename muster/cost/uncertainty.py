"""Uncertainty of a predicted step time: the interval in which 9 of 10 published measurements lay."""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from math import log2

import numpy as np

from muster.spec.cluster import ClusterSpec
from muster.spec.device import DeviceSpec
from muster.spec.model import ModelSpec
from muster.spec.plan import SCALED_PRECISIONS, Plan
from muster.spec.units import pluralize

COVERAGE = 0.9
"""Share of the measured configurations whose error lies within the interval."""
MIN_CONFIGURATIONS = 20
"""Fewest measured configurations of which quantiles are taken; below, a wider class of them is used."""
GROWTH_PER_DOUBLING = (-0.005, 0.015)
"""Largest errors per doubling of devices beyond the measured number: plans lose 0 to 2.5 % per doubling
(`muster.cost.time.stage_times.STRAGGLER_SHARE` has the sources), of which predictions assume 0.5 to 1 %."""
PROFILED_ERRORS = (0.11, 0.08, -0.07, -0.1, 0.06, 0.22, 0.14, 0.13, 0.13, -0.05, -0.35, -0.16, -0.3, -0.03, -0.09)
"""Errors on a machine that `muster profile` measured: benchmarks/predict_here.py and plan_here.py, in
docs/performance.md."""

_MEASURED = SCALED_PRECISIONS | {"bf16", "fp16"}
"""Precisions of the measured configurations, which are fp8's or those of 16 bits."""
_FIRST_OF_ANY_PRECISION = 2
"""Number of the first class that has configurations of any precision."""


@dataclass(frozen=True, slots=True)
class MeasuredErrors:
    """Errors of predictions on measured configurations of one source, device, precision and kind of model."""

    source: str
    device: str
    fp8: bool
    experts: bool
    """True for mixture-of-experts models."""
    most_devices: int
    errors: Sequence[float]
    """(predicted − measured) / measured step time of each configuration."""
    uncalibrated: Sequence[float]
    """The same, with devices' constants as they would be without this source's contribution to them."""


@dataclass(frozen=True, slots=True)
class ErrorInterval:
    """Interval of the true step time, relative to the predicted one."""

    low: float
    """Factor of the predicted step time, such as 0.93."""
    high: float
    source: str
    """Measurements that the interval is taken from, and anything that goes beyond them."""


def step_time_interval(model: ModelSpec, plan: Plan, cluster: ClusterSpec, left_out: str = "") -> ErrorInterval | None:
    """Return the interval in which the step takes place in 9 of 10 cases; None where nothing like it was measured.
    Errors of the source `left_out` don't count.

    The errors are those of `muster validate` on the shipped tables (`muster/catalog/measurements/errors.json`), of the
    first of these classes that has at least 20 configurations: the same device, precision (fp8 or not) and kind of
    model (with experts or not); all devices, as they would be predicted without their own calibration; any precision;
    any model. Sources weigh alike, since the errors of one have causes in common. The interval runs from the 5 % to
    the 95 % quantile of the errors e, and the step takes predicted / (1 + e). Where devices differ, the widest of
    their intervals counts. More devices than were measured widen it (`GROWTH_PER_DOUBLING`).

    Tested by leaving out one source after the other: 89 % of its configurations lie in the intervals of the rest.
    """
    devices = {group.device.name: group.device for group in cluster.groups}
    found = [_device_interval(device, model, plan, left_out) for device in devices.values()]
    known = [one for one in found if one is not None]
    if len(known) < len(found):
        return None
    sources = dict.fromkeys(one.source for one in known)
    return ErrorInterval(min(one.low for one in known), max(one.high for one in known), "; ".join(sources))


def _device_interval(device: DeviceSpec, model: ModelSpec, plan: Plan, left_out: str) -> ErrorInterval | None:
    if device.rates is not None:
        return _profiled_interval(device.rates.run_errors)
    if device.kind == "cpu":
        return None
    classes, kind = _classes(device, model, plan, left_out), "mixture-of-experts" if model.moe else "dense"
    precision = "fp8" if plan.precision in SCALED_PRECISIONS else "16-bit"
    said = (
        f"{precision} {kind} configurations of {device.name}",
        f"{precision} {kind} configurations of all devices",
        f"{kind} configurations of all devices and precisions",
        "configurations of all devices, precisions and models",
    )
    alike = 0
    for number, (rows, words) in enumerate(zip(classes, said, strict=True)):
        if plan.precision not in _MEASURED and number < _FIRST_OF_ANY_PRECISION:
            continue
        count = sum(len(row.errors) for row in rows)
        if count >= MIN_CONFIGURATIONS:
            few = f" without their calibration ({alike or 'none'} of {said[0]})" if number else ""
            if plan.precision not in _MEASURED:
                few = f" without their calibration (none in {plan.precision})"
            return _interval_of(rows, number > 0, words + few, plan.world_size)
        alike = count if number == 0 else alike
    return None


def _profiled_interval(own: Sequence[float]) -> ErrorInterval:
    """Return the interval on a profiled machine, of the errors of one's own runs there where they are as many as a
    class needs; with fewer, of theirs and of the shipped ones, which weigh alike as two sources do."""
    shipped = PROFILED_ERRORS if len(own) < MIN_CONFIGURATIONS else ()
    runs = [pluralize(len(own), "run") + " on this machine"] if own else []
    plans = [f"{len(shipped)} plans on profiled machines of 2 CPU cores"] if shipped else []
    weights = [1 / len(errors) for errors in (own, shipped) for _ in errors]
    return _interval([*own, *shipped], weights, " and ".join([*runs, *plans]))


def _classes(device: DeviceSpec, model: ModelSpec, plan: Plan, left_out: str) -> Iterable[list[MeasuredErrors]]:
    """Yield the measured errors of ever wider classes of configurations."""
    fp8, experts = plan.precision in SCALED_PRECISIONS, model.moe is not None
    belongs: tuple[Callable[[MeasuredErrors], bool], ...] = (
        lambda row: (row.device, row.fp8, row.experts) == (device.name, fp8, experts),
        lambda row: (row.fp8, row.experts) == (fp8, experts),
        lambda row: row.experts == experts,
        lambda row: True,
    )
    known = [row for row in measured_errors() if row.source != left_out]
    return ([row for row in known if test(row)] for test in belongs)


def _interval_of(rows: Sequence[MeasuredErrors], elsewhere: bool, words: str, num_devices: int) -> ErrorInterval:
    """Return the interval of a class of configurations; `elsewhere`: most are of other devices."""
    errors: list[float] = []
    weights: list[float] = []
    columns = [(row.source, row.uncalibrated if elsewhere else row.errors) for row in rows]
    of_source = Counter[str]()
    for source, values in columns:
        of_source[source] += len(values)
    for source, values in columns:
        errors += values
        weights += [1 / of_source[source]] * len(values)
    found = _interval(errors, weights, f"{len(errors)} {words}, of {pluralize(len(of_source), 'source')},")
    most = max(row.most_devices for row in rows)
    if num_devices <= most:
        return found
    low, high = (1 + share * log2(num_devices / most) for share in GROWTH_PER_DOUBLING)
    return ErrorInterval(found.low * low, found.high * high, f"{found.source}; more than the {most:,} devices measured")


def _interval(errors: Sequence[float], weights: Sequence[float], source: str) -> ErrorInterval:
    """Return the interval between the weighted quantiles of the errors."""
    order = np.argsort(errors, kind="stable")
    mass = np.array(weights)[order]
    middle = (np.cumsum(mass) - mass / 2) / mass.sum()
    low, high = np.interp(((1 - COVERAGE) / 2, (1 + COVERAGE) / 2), middle, np.array(errors)[order])
    mean = float(np.average(np.abs(errors), weights=weights))
    return ErrorInterval(float(1 / (1 + high)), float(1 / (1 + low)), f"{source} err by {100 * mean:.0f} % on average")


@cache
def measured_errors() -> tuple[MeasuredErrors, ...]:
    """Return the errors on the shipped tables of measurements, as `muster validate --errors` wrote them."""
    text = (files("muster.catalog") / "measurements" / "errors.json").read_text(encoding="utf-8")
    return tuple(MeasuredErrors(**row) for row in json.loads(text)["errors"])
