"""Schedules made by their names, which stand in `muster/spec/schedules.py`."""

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
    """The schedule `name` for a setting.

    Raises ConfigError on an unknown name, InfeasibleError where the schedule can't serve the setting.
    """
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
    return schedule_function(entry)(spec)


def schedule_function(entry: ScheduleEntry) -> Callable[[ScheduleSpec], Schedule]:
    """The function that makes a schedule."""
    if not isinstance(entry.function, str):
        return entry.function
    file, function = entry.function.split(":")
    return getattr(import_module(f"muster.schedule.{file}"), function)


def solve_exact(spec: ScheduleSpec) -> ExactResult:
    """The `exact` schedule with what is known of it, from `auto`'s. Raises InfeasibleError, MusterError as `prove`."""
    return solve(spec, auto_schedule(spec))


def exact_schedule(spec: ScheduleSpec) -> Schedule:
    """The schedule `exact`."""
    return solve_exact(spec).schedule


def auto_schedule(spec: ScheduleSpec) -> Schedule:
    """The schedule `auto`, which chooses from all that are not searched for."""
    return best_auto_schedule([spec])[0]


def best_auto_schedule(specs: Sequence[ScheduleSpec]) -> tuple[Schedule, Timing]:
    """The best `auto` over settings that differ in their chunks."""
    return find_best_schedule([(spec, _comparable_schedules(spec)) for spec in specs])


def _comparable_schedules(spec: ScheduleSpec) -> ScheduleFunctions:
    return {
        name: schedule_function(entry)
        for name, entry in SCHEDULES.items()
        if not entry.searched and entry.supports_chunks(spec.chunks) and entry.replicas == spec.replicas
    }
