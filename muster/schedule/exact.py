"""Schedule `exact`: the optimum by constraint programming (CP-SAT).

Each pass is an interval of fixed length with an unknown begin. Passes of a rank don't overlap; a pass begins after the
end of the pass that it needs, plus a p2p transfer; and on each rank the intervals from a micro-batch's F to its W, each
holding one activation, never exceed the capacity (a cumulative constraint). The solver minimizes the last end, and its
bound proves how far a schedule is from the optimum. `auto`'s schedule is the hint that it starts from.
"""

import os
from dataclasses import dataclass, replace
from fractions import Fraction
from math import lcm
from typing import TYPE_CHECKING, Any

from muster.schedule.action import Kind
from muster.schedule.critical_path import begin_times_s, dependency, path_depth
from muster.schedule.makespan_bound import OptimalityGap, lower_bound_s
from muster.schedule.schedule import Schedule
from muster.schedule.schedule_spec import ScheduleSpec
from muster.schedule.search_problem import SearchProblem, make_search_problem, schedule_from_passes
from muster.schedule.timing import time_schedule
from muster.spec.errors import InfeasibleError, MusterError

if TYPE_CHECKING:
    from ortools.sat.python.cp_model import CpModel, IntVar

_MAX_DENOMINATOR = 1000
"""Largest denominator of times as fractions of a common unit."""
_UNITS_PER_PERIOD = 100_000
"""Units per period where times have no such common unit; they are rounded down, so that a bound stays one."""

_MAX_PASSES = 10_000


@dataclass(frozen=True, slots=True)
class ExactResult:
    """Schedule with its proven optimality gap."""

    schedule: Schedule
    gap: OptimalityGap
    """Gap among schedules with the same stages on the same ranks."""


def solve(spec: ScheduleSpec, initial: Schedule, limit_s: float = 60.0) -> ExactResult:
    """Return the optimum on the placement of `initial`, a schedule for the spec, or the best found in `limit_s`
    seconds.

    Every stage takes micro-batches in order, which costs nothing since they are alike. Raises InfeasibleError for two
    replicas and for large specs, MusterError if OR-Tools is not installed.
    """
    if spec.replicas > 1:
        raise InfeasibleError(f"schedule exact runs one replica, got {spec.replicas}; the nearest is auto")
    try:
        from ortools.sat.python import cp_model
    except ImportError:
        raise MusterError("schedule exact needs OR-Tools: pip install 'muster-llm[solver]'") from None
    problem = make_search_problem(spec, initial.placement)
    if problem.num_passes > _MAX_PASSES:
        raise InfeasibleError(
            f"schedule exact solves up to {_MAX_PASSES} passes, this has {problem.num_passes}; the nearest is auto"
        )
    model = _ConstraintModel(problem, cp_model.CpModel(), _passes_by_begin(problem, initial, spec))
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = limit_s
    solver.parameters.num_workers = os.cpu_count() or 1
    status = solver.solve(model.model)
    # A solver without time for a bound says 0.
    bound_s = max(solver.best_objective_bound * model.unit_s, lower_bound_s(problem))
    best = replace(initial, name="exact")
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        passes = sorted(
            range(problem.num_passes), key=lambda code: (solver.value(model.begin[code]), path_depth(problem, code))
        )
        best = min(
            best, schedule_from_passes(problem, passes, "exact"), key=lambda one: time_schedule(one, spec).makespan_s
        )
    return ExactResult(best, OptimalityGap(time_schedule(best, spec).makespan_s, bound_s, "on its placement"))


def _passes_by_begin(problem: SearchProblem, schedule: Schedule, spec: ScheduleSpec) -> list[int]:
    """Return the codes of the passes of a schedule by their begin; a B counts as an I and a W."""
    timing = time_schedule(schedule, spec)
    count = problem.num_micro_batches
    begins: list[tuple[float, int, int]] = []
    for order, times_s in zip(schedule.ranks, timing.begin_s, strict=True):
        for (kind, stage, micro_batch, *_), time_s in zip(order, times_s, strict=True):
            for one in {Kind.B: (1, 2), Kind.F: (0,), Kind.I: (1,), Kind.W: (2,)}[kind]:
                code = (one * problem.num_stages + stage) * count + micro_batch
                begins.append((time_s, path_depth(problem, code), code))
    return [code for *_, code in sorted(begins)]


class _ConstraintModel:
    """Constraint model in whole units of time."""

    def __init__(self, problem: SearchProblem, model: "CpModel", passes: list[int]) -> None:
        self.problem, self.model = problem, model
        self.unit_s = _unit_s(problem)
        self.units = [[self._whole(time_s) for time_s in kind] for kind in problem.times_s]
        begins_s = begin_times_s(problem, passes)
        self.horizon = self._whole(max(begins_s)) + 2 * max(map(max, self.units)) + 1
        self.begin: list[IntVar] = []
        self.makespan: IntVar = model.new_int_var(0, self.horizon, "makespan")
        for code in range(problem.num_passes):
            begin = model.new_int_var(0, self.horizon, f"begin {code}")
            model.add_hint(begin, self._whole(begins_s[code]))
            self.begin.append(begin)
        self._order()
        for held in problem.stages:
            self._rank(held)
        model.minimize(self.makespan)

    def _whole(self, time_s: float) -> int:
        return int(time_s / self.unit_s + 1e-6)

    def _end(self, code: int) -> Any:
        place = code // self.problem.num_micro_batches
        return self.begin[code] + self.units[place // self.problem.num_stages][place % self.problem.num_stages]

    def _order(self) -> None:
        for code, begin in enumerate(self.begin):
            _, _, before, transfer_s = dependency(self.problem, code)
            if before >= 0:
                self.model.add(begin >= self._end(before) + self._whole(transfer_s))
            if code % self.problem.num_micro_batches:
                self.model.add(begin >= self._end(code - 1))
            self.model.add(self.makespan >= self._end(code))

    def _rank(self, held: tuple[int, ...]) -> None:
        """Constrain a rank: one pass at a time, and within the capacity the spans from F to the end of W."""
        count, stages, capacity = self.problem.num_micro_batches, self.problem.num_stages, self.problem.capacity
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


def _unit_s(problem: SearchProblem) -> float:
    """Return a unit of which all times are whole multiples, or a very small one."""
    times_s = [time_s for kind in (*problem.times_s, problem.p2p_s) for time_s in kind]
    fractions = [Fraction(time_s).limit_denominator(_MAX_DENOMINATOR) for time_s in times_s]
    common = lcm(*(one.denominator for one in fractions))
    exact = all(abs(one - time_s) < 1e-9 * problem.period_s for one, time_s in zip(fractions, times_s, strict=True))
    return 1 / common if exact and common <= _UNITS_PER_PERIOD else problem.period_s / _UNITS_PER_PERIOD
