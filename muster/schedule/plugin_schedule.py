"""Plug-in schedules, made from a function that lists the passes of one pipeline rank."""

from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path

from muster.plugins.loader import error_location
from muster.schedule.action import Action, Kind, parse_action
from muster.schedule.schedule import Schedule
from muster.schedule.schedule_spec import ScheduleSpec
from muster.schedule.timing import time_schedule
from muster.spec.errors import InfeasibleError, MusterError
from muster.spec.schedules import ScheduleEntry, stage_placement

RankFunction = Callable[[int, ScheduleSpec], Iterable[Action | str]]
"""Function (rank, spec) → passes of a pipeline rank in order, as actions or their texts, such as `2F0`."""


def plugin_schedule_function(
    name: str, rank_function: RankFunction, entry: Callable[[], ScheduleEntry]
) -> Callable[[ScheduleSpec], Schedule]:
    """Return a function that makes the schedule for a spec and checks it: every pass once, in an order that works.

    `entry` returns its registry entry. The function raises InfeasibleError if the plug-in refuses or its order can't be
    run.
    """

    def make(spec: ScheduleSpec) -> Schedule:
        # One pass too many is enough to refuse a function that never ends.
        max_passes = 3 * spec.chunks * spec.num_micro_batches + 1
        try:
            ranks = tuple(
                tuple(map(_to_action, islice(rank_function(rank, spec), max_passes))) for rank in range(spec.num_ranks)
            )
        except MusterError:
            raise
        except Exception as error:
            code = getattr(rank_function, "__code__", None)
            location = error_location(Path(code.co_filename), error) if code else name
            raise InfeasibleError(f"schedule {name}: {location}: {type(error).__name__}: {error}") from error
        schedule = Schedule(name, stage_placement(entry(), spec.num_ranks, spec.chunks), spec.num_micro_batches, ranks)
        _require_complete(schedule, entry().split_backward)
        try:
            time_schedule(schedule, spec)
        except MusterError as error:
            raise InfeasibleError(f"schedule {name}: {error}") from error
        return schedule

    return make


def _to_action(action_or_text: Action | str) -> Action:
    return parse_action(action_or_text) if isinstance(action_or_text, str) else action_or_text


def _require_complete(schedule: Schedule, splits: bool) -> None:
    """Raise InfeasibleError unless each rank does each of its stages' passes once, and nothing else."""
    kinds = (Kind.F, Kind.I, Kind.W) if splits else (Kind.F, Kind.B)
    for rank, order in enumerate(schedule.ranks):
        stages = [stage for stage, where in enumerate(schedule.placement) if where == rank]
        wanted = {
            Action(kind, stage, micro_batch)
            for stage in stages
            for kind in kinds
            for micro_batch in range(schedule.num_micro_batches)
        }
        seen: set[Action] = set()
        for action in order:
            if action in seen or action not in wanted:
                what = (
                    "twice"
                    if action in seen
                    else f"which is none of {', '.join(f'{s}{k}N' for s in stages for k in kinds)}"
                )
                raise InfeasibleError(f"schedule {schedule.name}: rank {rank} does {action} {what}")
            seen.add(action)
        if missing := sorted(map(str, wanted - seen)):
            raise InfeasibleError(f"schedule {schedule.name}: rank {rank} leaves out {', '.join(missing[:4])}")
