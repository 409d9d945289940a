"""Whether predictions favour a value of an axis: an order of layouts suffers from that, and a mean error doesn't show
it."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import log
from statistics import mean

from muster.validate.comparison import RowResult
from muster.validate.sweeps import distinct_plans, sweep_groups

_AXES = ("tp", "pp", "vpp", "cp", "ep", "micro-batch", "sp", "zero", "recompute")
_RECOMPUTE = ("none", "core_attention", "elementwise", "every_second_matmul", "full")
"""From the least to the most."""


@dataclass(frozen=True)
class AxisBias:
    """How much more the step time is predicted to grow than it was measured to, where two layouts of a sweep differ in
    one axis alone (and in the data-parallel ranks that are left)."""

    axis: str
    change: str
    """`1 → 2`."""
    pairs: int
    tilt: float
    """Mean over the pairs, in percent; above 0: the second value is predicted too slow beside the first."""
    positive: int
    """Pairs in which it is."""


def axis_biases(results: Iterable[RowResult]) -> list[AxisBias]:
    """Of neighbouring values of each axis, over all sweeps."""
    changes: dict[tuple[int, object, object], list[float]] = defaultdict(list)
    for group in sweep_groups(results).values():
        timed = [(_layout(result), log(1 + result.error)) for result in distinct_plans(group) if result.is_predicted]
        for axis in range(len(_AXES)):
            for alike in _alike(timed, axis):
                for (one, before), (other, after) in pairwise(alike):
                    changes[axis, one[axis], other[axis]].append(100 * (after - before))
    return [
        AxisBias(
            _AXES[axis],
            f"{_word(axis, one)} → {_word(axis, other)}",
            len(found),
            mean(found),
            sum(d > 0 for d in found),
        )
        for (axis, one, other), found in sorted(changes.items())
    ]


_Layout = tuple[int | str, ...]
_Timed = Sequence[tuple[_Layout, float]]


def _alike(timed: _Timed, axis: int) -> Iterable[_Timed]:
    """Layouts that differ in that axis alone, in its order."""
    found: dict[_Layout, dict[_Layout, float]] = defaultdict(dict)
    for layout, error in timed:
        found[layout[:axis] + layout[axis + 1 :]].setdefault(layout, error)
    return [sorted(alike.items()) for alike in found.values()]


def _layout(result: RowResult) -> _Layout:
    """A value for each axis, which grows with how much of it there is."""
    assert result.inputs is not None
    plan = result.inputs.cases[result.chosen].plan
    strategy = plan.default_strategy
    degrees = plan.tp, plan.pp, plan.vpp, plan.cp, plan.ep, plan.micro_batch_size
    return *degrees, int(strategy.sp), strategy.zero, _RECOMPUTE.index(strategy.recompute)


def _word(axis: int, value: object) -> str:
    if _AXES[axis] == "sp":
        return "yes" if value else "no"
    return _RECOMPUTE[value] if _AXES[axis] == "recompute" and isinstance(value, int) else str(value)
