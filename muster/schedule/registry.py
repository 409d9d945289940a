"""Schedules made by their names, which are registered in `muster/spec/schedules.py`."""

from collections.abc import Callable, Sequence
from importlib import import_module

from muster.schedule.auto import ScheduleFunctions, find_best_schedule
from muster.schedule.exact import ExactResult, solve
from muster.schedule.schedule import Schedule
from muster.schedule.schedule_spec import ScheduleSpec
from muster.schedule.timing import Timing
from muster.spec.errors import InfeasibleError
from muster.spec.schedules import SCHEDULES, ScheduleEntry, find_schedule


def make_schedule(name: str, spec: ScheduleSpec) -> Schedule:
    """Return the schedule `name` for a spec.

    Raises ConfigError for an unknown name, InfeasibleError if the schedule doesn't support the spec.
    """
    require_runs(name, spec)
    return schedule_function(find_schedule(name))(spec)


def require_runs(name: str, spec: ScheduleSpec) -> None:
    """Raise ConfigError for an unknown schedule, InfeasibleError if it doesn't support the spec."""
    entry = find_schedule(name)
    if entry.chunks not in (None, spec.chunks):
        stages = "one stage" if entry.chunks == 1 else f"{entry.chunks} stages"
        raise InfeasibleError(
            f"schedule {name} runs {stages} per pipeline rank, got {spec.chunks};"
            f" the nearest that runs has vpp {entry.chunks}"
        )
    if entry.replicas not in (None, spec.replicas):
        raise InfeasibleError(
            f"schedule {name} runs {entry.replicas} {'copy' if entry.replicas == 1 else 'copies'} of the model,"
            f" got replicas {spec.replicas}; the nearest that runs has {entry.replicas}"
        )
    if spec.num_slices > 1 and not entry.has_slices:
        legal = ", ".join(other for other, one in SCHEDULES.items() if one.has_slices)
        raise InfeasibleError(f"schedule {name} has no order for slices of sequences; those that have: {legal}")


def schedule_function(entry: ScheduleEntry) -> Callable[[ScheduleSpec], Schedule]:
    """Return the function of a registry entry, importing its file."""
    if not isinstance(entry.function, str):
        return entry.function
    file, function = entry.function.split(":")
    return getattr(import_module(f"muster.schedule.{file}"), function)


def solve_exact(spec: ScheduleSpec) -> ExactResult:
    """Return the `exact` schedule with its optimality gap, starting from `auto`'s. Raises as `exact.solve` and
    `make_schedule`."""
    require_runs("exact", spec)
    return solve(spec, auto_schedule(spec))


def exact_schedule(spec: ScheduleSpec) -> Schedule:
    """Return the schedule `exact`."""
    return solve_exact(spec).schedule


def auto_schedule(spec: ScheduleSpec) -> Schedule:
    """Return the schedule `auto`, the best of a search and of all schedules that need no search."""
    return best_auto_schedule([spec])[0]


def best_auto_schedule(specs: Sequence[ScheduleSpec]) -> tuple[Schedule, Timing]:
    """Return the best `auto` over specs that differ in their chunks."""
    return find_best_schedule([(spec, _comparable_schedules(spec)) for spec in specs])


def _comparable_schedules(spec: ScheduleSpec) -> ScheduleFunctions:
    return {
        name: schedule_function(entry)
        for name, entry in SCHEDULES.items()
        if not (entry.searched or entry.is_asynchronous)
        and entry.supports_chunks(spec.chunks)
        and entry.replicas == spec.replicas
    }
