"""Schedules of people's own, made from a function that says what one pipeline rank does."""

from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path

from muster.schedule.action import Action, parse_action
from muster.schedule.schedule import Schedule
from muster.schedule.setting import Setting
from muster.schedule.timing import time_schedule
from muster.spec.errors import InfeasibleError, MusterError
from muster.spec.plugins import where_in
from muster.spec.schedules import Entry, place

Order = Callable[[int, Setting], Iterable[Action | str]]
"""The passes of a pipeline rank in a setting, in order, as actions or their texts, such as `2F0`."""


def own_maker(name: str, order: Order, entry: Callable[[], Entry]) -> Callable[[Setting], Schedule]:
    """What makes the schedule for a setting, and proves that it does every pass once in an order that can be followed.

    `entry` is what is known of it. Raises InfeasibleError where the function refuses or its order can't be run.
    """

    def make(setting: Setting) -> Schedule:
        # One pass more than there are is enough to refuse a function that gives them without end.
        most = 3 * setting.chunks * setting.num_micro_batches + 1
        try:
            ranks = tuple(tuple(map(_action, islice(order(rank, setting), most))) for rank in range(setting.num_ranks))
        except MusterError:
            raise
        except Exception as error:
            code = getattr(order, "__code__", None)
            place_ = where_in(Path(code.co_filename), error) if code else name
            raise InfeasibleError(f"schedule {name}: {place_}: {type(error).__name__}: {error}") from error
        found = Schedule(name, place(entry(), setting.num_ranks, setting.chunks), setting.num_micro_batches, ranks)
        _require_whole(found, entry().splits)
        try:
            time_schedule(found, setting)
        except MusterError as error:
            raise InfeasibleError(f"schedule {name}: {error}") from error
        return found

    return make


def _action(said: Action | str) -> Action:
    return parse_action(said) if isinstance(said, str) else said


def _require_whole(schedule: Schedule, splits: bool) -> None:
    """Raises InfeasibleError unless each rank does each of its stages' passes once, and nothing else."""
    kinds = "FIW" if splits else "FB"
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
