"""The order of passes for one plan's own times, where the way from one stage to the next takes long, or not as long
everywhere."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from muster.schedule.action import Action
from muster.schedule.bound import lower_bound_s
from muster.schedule.collector import collector_paused
from muster.schedule.pipe import pipe_of, schedule_of
from muster.schedule.schedule import Schedule
from muster.schedule.search import Search, explore, improve
from muster.schedule.setting import Setting

EXPLORED = 60_000
"""Passes that the rules are tried with."""

RUNS = 12
"""Runs of all passes in which the best of them is changed, and most of these passes."""
MOST = 120_000


@collector_paused()
def timed_schedules(setting: Setting, hops_s: Sequence[float]) -> Iterator[Schedule]:
    """Orders for a setting's times on its placement, where it takes `hops_s` from each stage to the one after it: the
    shortest that is found, and the same with what each rank does last by stage (`stage_by_stage`).

    Raises InfeasibleError where memory holds no micro-batch.
    """
    pipe = replace(pipe_of(setting, setting.placement), hops_s=tuple(hops_s))
    search = Search(pipe, lower_bound_s(pipe))
    explore(search, [], EXPLORED)
    search.budget = search.spent + min(RUNS * pipe.size, MOST)
    if search.rules and not search.over:
        improve(search)
    if search.best is not None:
        found = schedule_of(pipe, search.best.passes, "auto")
        yield found
        yield stage_by_stage(found)


def stage_by_stage(schedule: Schedule) -> Schedule:
    """The schedule with the weight backwards that end each rank's order sorted by stage, the last stage first: the
    gradients of one are then complete, and travel, while those of the others are computed."""
    return replace(schedule, ranks=tuple(map(_sorted_end, schedule.ranks)))


def _sorted_end(order: tuple[Action, ...]) -> tuple[Action, ...]:
    begin = len(order)
    while begin and order[begin - 1].kind == "W":
        begin -= 1
    return order[:begin] + tuple(sorted(order[begin:], key=lambda action: (-action.stage, action.micro_batch)))
