"""Interpolation between the sizes at which a machine was measured."""

from bisect import bisect_right
from collections.abc import Sequence
from functools import cached_property
from math import exp, log
from statistics import mean
from typing import get_args

from muster.spec.errors import ConfigError
from muster.spec.machine_rates import (
    PROFILED_PRECISIONS,
    Curve,
    GroupedKernel,
    GroupedMatmuls,
    MachineRates,
    MatmulPass,
)
from muster.spec.plan import Precision


class RateInterpolator:
    """Rates of a machine in one precision.

    Times between two sizes follow a power law. Beyond the largest size they grow in proportion to the work; below the
    smallest they stay constant, as a call's overhead does.

    Raises ConfigError for a precision that was not measured.
    """

    def __init__(self, machine: MachineRates, precision: Precision) -> None:
        if precision not in machine.kernels:
            first, *_ = known = list(machine.kernels)
            full = " 'muster profile' without --quick measures it, too" if precision in PROFILED_PRECISIONS else ""
            raise ConfigError(
                f"this cluster was measured in {', '.join(known)}, not in {precision}: give a plan in {first} (-{first}"
                f" in its name, or --precision {first}){full and ';'}{full}"
            )
        self.machine, self.kernels = machine, machine.kernels[precision]
        self._matmuls = {kind: _RateGrid(points) for kind, points in self.kernels.matmuls.items()}
        self._attention = {kind: _RateGrid(points) for kind, points in self.kernels.attention.items()}
        self._known: dict[tuple, float] = {}
        self.grouped = GroupedMatmulRates(self.kernels.grouped_matmuls)
        """Rates of the experts' matmuls."""

    def matmul(self, kind: MatmulPass, tokens: int, inner: int, outer: int) -> float:
        """Return the seconds of one matmul of a linear layer of `inner` inputs and `outer` outputs."""
        return self._read(self._matmuls[kind], kind, tokens, inner, outer)

    def attention(self, kind: str, positions: int, width: int) -> float:
        """Return the seconds of one head of one sequence."""
        return self._read(self._attention[kind], kind, positions, width)

    def kernel(self, name: str, numbers: int) -> float:
        """Return the seconds of another kernel on so many elements; 0 for none."""
        return _on_curve(self.kernels.curves[name], numbers) if numbers else 0.0

    def collective(self, name: str, ranks: int, count: int) -> float:
        """Return the seconds of a collective of `count` bytes, as its call counts them.

        Takes the measured number of ranks that is nearest, in proportion to the bytes that a ring sends. Raises
        ConfigError for a machine that was measured by one rank alone.
        """
        if ranks < 2 or not count:
            return 0.0
        if name not in self._ranks:
            raise ConfigError(
                f"this machine's profile has no time of {name}, because {self.machine.ranks} rank measured it: run"
                " 'muster profile' again with --ranks 2 or more"
            )
        near = min(self._ranks[name], key=lambda known: abs(log(known / ranks)))
        time_s = _on_curve(self._ranks[name][near], count)
        steps = ranks - 1 if name == "all_gather" else (ranks - 1) / ranks
        known = near - 1 if name == "all_gather" else (near - 1) / near
        return time_s * (1.0 if near == ranks or name == "send" else steps / known)

    def overhead(self, name: str) -> float:
        """Return the seconds of one kind of runtime overhead; 0 where it was not measured."""
        return self.machine.overheads.get(name, 0.0)

    def contention(self, level: str) -> float:
        """Return the factor by which work within a step is slower than alone, under a sharding level.

        A level that was not measured has the mean of the measured ones.
        """
        known = self.machine.contention
        return known.get(level) or (mean(known.values()) if known else 1.0)

    @cached_property
    def _ranks(self) -> dict[str, dict[int, Curve]]:
        found: dict[str, dict[int, Curve]] = {}
        for name, points in self.machine.collectives.items():
            for ranks, count, time_s in sorted(points):
                curves = found.setdefault(name, {})
                curves[ranks] = (*curves.get(ranks, ()), (count, time_s))
        return found

    def _read(self, grid: "_RateGrid", *at: str | int) -> float:
        if at not in self._known:
            self._known[at] = grid.interpolate([float(number) for number in at[1:]])
        return self._known[at]


class GroupedMatmulRates:
    """Rates of a machine's grouped matmuls, from which predictions and the runtime take the same kernel."""

    def __init__(self, measured: GroupedMatmuls) -> None:
        self._grids: dict[MatmulPass, dict[GroupedKernel, _RateGrid]] = {
            kind: {kernel: _RateGrid(passes[kind]) for kernel, passes in measured.items() if kind in passes}
            for kind in get_args(MatmulPass)
        }

    def __bool__(self) -> bool:
        """Return True where grouped matmuls were measured."""
        return any(self._grids.values())

    def fastest(
        self, kind: MatmulPass, rows: float, most_rows: float, inner: int, outer: int
    ) -> tuple[GroupedKernel, float]:
        """Return the fastest kernel for experts with `rows` rows on average and `most_rows` at most, to which one of
        them pads, and the seconds that it takes for each expert."""
        times_s: dict[GroupedKernel, float] = {
            kernel: grid.interpolate([most_rows if kernel == "padded" else rows, inner, outer])
            for kernel, grid in self._grids[kind].items()
        }
        return min(times_s.items(), key=lambda one: one[1])


class _RateGrid:
    """Seconds on a grid of sizes. A missing corner takes the time per unit of work of the nearest smaller one."""

    def __init__(self, points: Sequence[tuple[float, ...]]) -> None:
        self.known = {tuple(map(float, at)): time_s for *at, time_s in points}
        self.axes = [sorted(set(column)) for column in zip(*self.known, strict=True)]

    def interpolate(self, sizes: Sequence[float]) -> float:
        """Return the seconds of a size.

        Between corners the logarithm of the time is linear in the logarithms of the sizes. Beyond the grid the time
        grows with the work, below it stays constant. Example: with 1 s at 10 and 4 s at 20, 15 takes 2.25 s (a power
        law of exponent 2).
        """
        corners, beyond = [((), 1.0)], 1.0
        for axis, size in zip(self.axes, sizes, strict=True):
            inside = min(max(size, axis[0]), axis[-1])
            beyond *= max(1.0, size / axis[-1])
            place = min(max(bisect_right(axis, inside) - 1, 0), max(0, len(axis) - 2))
            low, high = axis[place], axis[min(place + 1, len(axis) - 1)]
            part = 0.0 if high == low else log(inside / low) / log(high / low)
            corners = [
                ((*at, edge), weight * share)
                for at, weight in corners
                for edge, share in ((low, 1 - part), (high, part))
                if share
            ]
        return beyond * exp(sum(weight * log(self._corner(at)) for at, weight in corners))

    def _corner(self, at: tuple[float, ...]) -> float:
        if at in self.known:
            return self.known[at]
        smaller = [known for known in self.known if all(a <= b for a, b in zip(known, at, strict=True))]
        nearest = max(smaller or self.known, key=_work)
        return self.known[nearest] * _work(at) / _work(nearest)


def _work(at: tuple[float, ...]) -> float:
    product = 1.0
    for size in at:
        product *= size
    return product


def _on_curve(curve: Curve, size: float) -> float:
    sizes = [point[0] for point in curve]
    if size <= sizes[0]:
        return curve[0][1]
    if size >= sizes[-1]:
        return curve[-1][1] * size / sizes[-1]
    place = bisect_right(sizes, size) - 1
    (low, low_s), (high, high_s) = curve[place], curve[place + 1]
    part = log(size / low) / log(high / low)
    return exp((1 - part) * log(low_s) + part * log(high_s))
