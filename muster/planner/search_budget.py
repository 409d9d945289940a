"""The budget of a search: work that it may do and, where that is asked for, a time at which it ends.

Work is counted, not timed: plans looked at and simulated, each with the fixed cost of its kind. So a search finds the
same plan on a busy machine as on a quiet one, and with one process as with several.
"""

from math import inf
from time import perf_counter
from typing import ClassVar

from muster.planner.lockstep import usable_processes
from muster.spec.plan import Plan
from muster.spec.workload import Workload

DEFAULT_WORK = 8000.0
"""Units of work of a search with effort 1. A unit is about a millisecond of one core on a quiet machine."""

SECONDS_PER_UNIT = 2e-3
"""Seconds that a unit is taken to last until that was seen: those of a machine with some other load."""

PACED_WORK = 20.0
"""Least work of a simulation by which the pace of this process is judged."""

LIMIT_SHARE = 0.9
"""Share of a time limit after which no search goes on: the rest is for the last simulation, the start of the program
and its output."""

SHAPE_WORK = 0.5
"""A mesh shape, with the bounds of its schedule choices."""

KNOWN_SHAPE_WORK = 0.15
"""The same for a narrower request, whose bounds are known from the wider one."""

CHOICE_WORK = 0.5
"""A schedule choice whose stages are timed."""

PLAN_WORK = 0.5
"""A plan that gets a bound of its own."""

FIT_WORK, FIT_WORK_PER_PASS = 3.0, 0.002
"""A plan whose memory is weighed."""

LAYER_FIT_WORK, LAYER_FIT_WORK_PER_PASS = 3.0, 0.004
"""The same for a plan that recomputes or offloads layer by layer so as to fit."""

SIMULATION_WORK, SIMULATION_WORK_PER_PASS = 2.5, 0.01
"""A simulated plan."""


def num_passes(plan: Plan, workload: Workload) -> int:
    """Return the number of passes of one pipeline in a step."""
    kinds = 3 if plan.schedule_entry.split_backward else 2
    return kinds * plan.stages_per_replica * plan.num_micro_batches(workload)


def simulation_work(plan: Plan, workload: Workload) -> float:
    """Return the work of simulating a plan."""
    return SIMULATION_WORK + SIMULATION_WORK_PER_PASS * num_passes(plan, workload)


def fit_work(plan: Plan, workload: Workload, by_layer: bool = False) -> float:
    """Return the work of weighing a plan's memory, and with `by_layer` of choosing recompute and offload by layer."""
    passes = num_passes(plan, workload)
    work = FIT_WORK + FIT_WORK_PER_PASS * passes
    return work + LAYER_FIT_WORK + LAYER_FIT_WORK_PER_PASS * passes if by_layer else work


class SearchBudget:
    """Work and time that are left; parts of it may be given to searches that one question takes."""

    seconds_per_unit: ClassVar[float] = SECONDS_PER_UNIT
    """Seconds of a unit of work in this process, for judging if there is time for more."""

    def __init__(
        self, work: float = inf, end_s: float = inf, whole: "SearchBudget | None" = None, processes: int = 1
    ) -> None:
        """`end_s`: value of `perf_counter` at the end. `whole`: budget that this one is a part of. `processes`: those
        that may work at the same time, with the same results."""
        self.work = work
        self.end_s = end_s
        self.whole = whole
        self.processes = processes
        self.spent = 0.0

    @classmethod
    def start(cls, effort: float = 1.0, limit_s: float | None = None, begin_s: float | None = None) -> "SearchBudget":
        """Return a budget of `effort` times the default work, and of `limit_s` seconds from `begin_s` (default: now)
        where given, for all cores of this process."""
        end_s = inf if limit_s is None else (perf_counter() if begin_s is None else begin_s) + LIMIT_SHARE * limit_s
        return cls(effort * DEFAULT_WORK, end_s, processes=usable_processes())

    def spend(self, work: float) -> None:
        """Count work that was done, for the whole budget too."""
        self.spent += work
        if self.whole is not None:
            self.whole.spend(work)

    @property
    def left(self) -> float:
        """Units of work that are left."""
        return max(0.0, self.work - self.spent)

    @property
    def is_spent(self) -> bool:
        """True if the work is done or the time over."""
        return self.spent >= self.work or self.is_late

    @property
    def is_late(self) -> bool:
        """True if the time is over."""
        return self.end_s < inf and perf_counter() >= self.end_s

    def has_time_for(self, work: float) -> bool:
        """Return True if so many units of work likely end before the time is over."""
        return self.end_s == inf or perf_counter() + work * SearchBudget.seconds_per_unit < self.end_s

    @staticmethod
    def note_pace(work: float, seconds: float) -> None:
        """Note what a simulation took: the slowest of this process says if there is time for another."""
        if work >= PACED_WORK:
            SearchBudget.seconds_per_unit = max(SearchBudget.seconds_per_unit, seconds / work)

    def share(self, part: float, time_part: float | None = None) -> "SearchBudget":
        """Return a budget of a part of the work and of the time that are left, whose work counts for this one too.
        `time_part`: part of the time, where that is another."""
        end_s = self.end_of_share(part if time_part is None else time_part)
        return SearchBudget(part * self.left, end_s, self, self.processes)

    def renew(self, effort: float = 1.0, time_part: float = 1.0) -> "SearchBudget":
        """Return a budget of `effort` times this one's work, as if nothing had been spent, for another search that is
        as thorough; it takes a part of the time that is left."""
        return SearchBudget(effort * self.work, self.end_of_share(time_part), processes=self.processes)

    def end_of_share(self, part: float) -> float:
        """Return the end of a part of the time that is left."""
        if self.end_s == inf:
            return inf
        now_s = perf_counter()
        return now_s + part * max(0.0, self.end_s - now_s)
