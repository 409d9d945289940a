"""Bias of predictions towards a value of an axis.

Such a bias spoils the ranking of layouts, and a mean error doesn't show it. Example: where every step from tp 2 to tp 4
is predicted 5 % too slow, layouts with tp 4 rank too low, although the mean error may be 0.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import log
from statistics import mean

from muster.validate.comparison import RowResult
from muster.validate.sweeps import distinct_plans, sweep_groups

_AXES = ("tp", "pp", "vpp", "cp", "ep", "micro-batch", "sp", "zero", "recompute")
"""Axes on which layouts are compared."""
_RECOMPUTE = ("none", "core_attention", "elementwise", "every_second_matmul", "full")
"""Recompute modes from the least to the most recomputation."""


@dataclass(frozen=True)
class AxisBias:
    """Excess of the predicted over the measured growth of the step time between two values of one axis.

    Compared are layouts of a sweep that differ in that axis alone (and in the remaining data-parallel ranks).
    """

    axis: str
    change: str
    """Both values, such as `1 → 2`."""
    pairs: int
    tilt: float
    """Mean over the pairs, in per cent; above 0 the second value is predicted too slow relative to the first."""
    positive: int
    """Number of pairs with a positive bias."""


def axis_biases(results: Iterable[RowResult]) -> list[AxisBias]:
    """Return the bias of each pair of neighbouring values of each axis, over all sweeps."""
    changes: dict[tuple[int, object, object], list[float]] = defaultdict(list)
    for group in sweep_groups(results).values():
        timed = [(_layout(result), log(1 + result.error)) for result in distinct_plans(group) if result.is_predicted]
        for axis in range(len(_AXES)):
            for alike in _groups_along(timed, axis):
                for (earlier, before), (later, after) in pairwise(alike):
                    changes[axis, earlier[axis], later[axis]].append(100 * (after - before))
    return [
        AxisBias(
            _AXES[axis],
            f"{_axis_value_text(axis, one)} → {_axis_value_text(axis, other)}",
            len(found),
            mean(found),
            sum(d > 0 for d in found),
        )
        for (axis, one, other), found in sorted(changes.items())
    ]


_Layout = tuple[int | str, ...]
"""Values of a layout by axis."""
_Timed = Sequence[tuple[_Layout, float]]
"""Layouts with the logarithm of their predicted over measured step time."""


def _groups_along(timed: _Timed, axis: int) -> Iterable[_Timed]:
    """Return groups of layouts that differ in that axis alone, sorted by it."""
    found: dict[_Layout, dict[_Layout, float]] = defaultdict(dict)
    for layout, error in timed:
        found[layout[:axis] + layout[axis + 1 :]].setdefault(layout, error)
    return [sorted(alike.items()) for alike in found.values()]


def _layout(result: RowResult) -> _Layout:
    """Return a sort key of the layout for each axis."""
    assert result.inputs is not None
    plan = result.case.plan
    strategy = plan.default_strategy
    degrees = plan.tp, plan.pp, plan.vpp, plan.cp, plan.ep, plan.micro_batch_size
    return *degrees, int(strategy.sp), strategy.zero, _RECOMPUTE.index(strategy.recompute)


def _axis_value_text(axis: int, value: object) -> str:
    if _AXES[axis] == "sp":
        return "yes" if value else "no"
    return _RECOMPUTE[value] if _AXES[axis] == "recompute" and isinstance(value, int) else str(value)
