"""The best schedule there is, by constraint programming: intervals on ranks, with delays and memory (CP-SAT)."""

import os
from dataclasses import dataclass, replace
from fractions import Fraction
from math import lcm
from typing import TYPE_CHECKING, Any

from muster.schedule.bound import Gap, lower_bound_s
from muster.schedule.critical import begin_s, depth, source
from muster.schedule.pipe import Pipe, pipe_of, schedule_of
from muster.schedule.schedule import Schedule
from muster.schedule.setting import Setting
from muster.schedule.timing import time_schedule
from muster.spec.errors import InfeasibleError, MusterError

if TYPE_CHECKING:
    from ortools.sat.python.cp_model import CpModel, IntVar

_FINEST = 1000
"""Times are multiples of a common unit where they are fractions with denominators up to this."""
_UNITS = 100_000
"""Else they are cut down to so many units per period, which leaves a bound a bound."""

_MOST = 10_000


@dataclass(frozen=True, slots=True)
class Proof:
    """A schedule, and what is known of how good it is."""

    schedule: Schedule
    gap: Gap
    """Between schedules with the same stages on the same ranks."""


def prove(setting: Setting, start: Schedule, limit_s: float = 60.0) -> Proof:
    """The optimum on the placement of `start`, a schedule for the setting, or the best in `limit_s` seconds of search.

    Every stage takes micro-batches in order, which costs nothing since they are alike. Raises InfeasibleError with
    several replicas, MusterError where OR-Tools is not installed.
    """
    if setting.replicas > 1:
        raise InfeasibleError(f"schedule exact runs one replica, got {setting.replicas}; the nearest is auto")
    try:
        from ortools.sat.python import cp_model
    except ImportError:
        raise MusterError("schedule exact needs OR-Tools: pip install 'muster-llm[solver]'") from None
    pipe = pipe_of(setting, start.placement)
    if pipe.size > _MOST:
        raise InfeasibleError(f"schedule exact solves up to {_MOST} passes, this has {pipe.size}; the nearest is auto")
    model = _Model(pipe, cp_model.CpModel(), _in_order(pipe, start, setting))
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds, solver.parameters.num_workers = limit_s, os.cpu_count() or 1
    status = solver.solve(model.model)
    # A solver without time for a bound says 0.
    bound_s = max(solver.best_objective_bound * model.unit_s, lower_bound_s(pipe))
    best = replace(start, name="exact")
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        passes = sorted(range(pipe.size), key=lambda code: (solver.value(model.begin[code]), depth(pipe, code)))
        best = min(best, schedule_of(pipe, passes, "exact"), key=lambda one: time_schedule(one, setting).makespan_s)
    return Proof(best, Gap(time_schedule(best, setting).makespan_s, bound_s, "on its placement"))


def _in_order(pipe: Pipe, schedule: Schedule, setting: Setting) -> list[int]:
    """The passes of a schedule by their begin; a B is an I and a W."""
    timing, count = time_schedule(schedule, setting), pipe.num_micro_batches
    begins: list[tuple[float, int, int]] = []
    for order, times_s in zip(schedule.ranks, timing.begin_s, strict=True):
        for (kind, stage, micro_batch, *_), time_s in zip(order, times_s, strict=True):
            for one in {"B": (1, 2), "F": (0,), "I": (1,), "W": (2,)}[kind]:
                code = (one * pipe.num_stages + stage) * count + micro_batch
                begins.append((time_s, depth(pipe, code), code))
    return [code for *_, code in sorted(begins)]


class _Model:
    """The constraints, in whole units of time."""

    def __init__(self, pipe: Pipe, model: "CpModel", passes: list[int]) -> None:
        self.pipe, self.model = pipe, model
        self.unit_s = _unit_s(pipe)
        self.units = [[self._whole(time_s) for time_s in kind] for kind in pipe.times_s]
        begins_s = begin_s(pipe, passes)
        self.horizon = self._whole(max(begins_s)) + 2 * max(map(max, self.units)) + 1
        self.begin: list[IntVar] = []
        self.makespan: IntVar = model.new_int_var(0, self.horizon, "makespan")
        for code in range(pipe.size):
            begin = model.new_int_var(0, self.horizon, f"begin {code}")
            model.add_hint(begin, self._whole(begins_s[code]))
            self.begin.append(begin)
        self._order()
        for held in pipe.stages:
            self._rank(held)
        model.minimize(self.makespan)

    def _whole(self, time_s: float) -> int:
        return int(time_s / self.unit_s + 1e-6)

    def _end(self, code: int) -> Any:
        place = code // self.pipe.num_micro_batches
        return self.begin[code] + self.units[place // self.pipe.num_stages][place % self.pipe.num_stages]

    def _order(self) -> None:
        for code, begin in enumerate(self.begin):
            _, _, before, hop_s = source(self.pipe, code)
            if before >= 0:
                self.model.add(begin >= self._end(before) + self._whole(hop_s))
            if code % self.pipe.num_micro_batches:
                self.model.add(begin >= self._end(code - 1))
            self.model.add(self.makespan >= self._end(code))

    def _rank(self, held: tuple[int, ...]) -> None:
        """One pass at a time, and no more activations than the rank may keep, each from the begin of F to W's end."""
        count, stages, capacity = self.pipe.num_micro_batches, self.pipe.num_stages, self.pipe.capacity
        intervals = [
            self.model.new_fixed_size_interval_var(self.begin[code], self.units[kind][stage], f"pass {code}")
            for kind in range(3)
            for stage in held
            for code in range((kind * stages + stage) * count, (kind * stages + stage + 1) * count)
        ]
        self.model.add_no_overlap(intervals)
        kept = [stage * count + index for stage in held for index in range(count)]
        if len(held) == 1:
            for code in kept[capacity:]:
                self.model.add(self.begin[code] >= self._end(code - capacity + 2 * stages * count))
        elif capacity < len(kept):
            spans = []
            for code in kept:
                end = self.model.new_int_var(0, self.horizon, f"free {code}")
                self.model.add(end == self._end(code + 2 * stages * count))
                span = self.model.new_int_var(0, self.horizon, f"span {code}")
                spans.append(self.model.new_interval_var(self.begin[code], span, end, f"kept {code}"))
            self.model.add_cumulative(spans, [1] * len(spans), capacity)


def _unit_s(pipe: Pipe) -> float:
    """A unit that all times are whole multiples of, or a very small one."""
    times_s = [time_s for kind in (*pipe.times_s, pipe.hops_s) for time_s in kind]
    fractions = [Fraction(time_s).limit_denominator(_FINEST) for time_s in times_s]
    common = lcm(*(one.denominator for one in fractions))
    exact = all(abs(one - time_s) < 1e-9 * pipe.period_s for one, time_s in zip(fractions, times_s, strict=True))
    return 1 / common if exact and common <= _UNITS else pipe.period_s / _UNITS
