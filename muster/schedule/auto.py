"""The automatic schedule: the best of all registered ones and of an own search, for given times, delay and memory."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import inf

from muster.schedule.bound import Gap, lower_bound_s
from muster.schedule.collector import collector_paused
from muster.schedule.pipe import Pipe, codes_of, pipe_of, schedule_of
from muster.schedule.schedule import Schedule
from muster.schedule.search import Search, explore, improve
from muster.schedule.setting import Setting
from muster.schedule.timing import Timing, time_schedule
from muster.spec.errors import InfeasibleError
from muster.spec.placement import looped, waves

_JUST = 1e-9
_BUDGET = (130_000, 42, 600_000)
"""Passes that the search schedules: at least so many (0.15 s), else 42 times the setting's, at most so many."""
_SMALL = (1000, 240_000)
"""Several settings of up to so many passes each have time for so many."""
_LARGE = 60_000
"""Passes from which on registered schedules are made only if a shorter run of theirs promises to be the best."""

Makers = Mapping[str, Callable[[Setting], Schedule]]
Found = tuple[Timing, Schedule]
Begun = tuple[Search, Setting, list[list[int]]]
"""A search of a setting, and orders that it begins from."""


@collector_paused()
def auto_among(offers: Sequence[tuple[Setting, Makers]]) -> tuple[Schedule, Timing]:
    """The best schedule over settings that differ in their chunks, each with the schedules that it is compared with.

    Never takes longer than any of them (`Makers`: name → function) that fits in the same memory limit. Stages lie on
    the ranks in `waves` (with two chunks a V) or `looped`, or as the setting binds them. Where makespans are equal the
    smaller peak of memory wins, then the earlier setting. Raises InfeasibleError where nothing fits.
    """
    found: list[Found] = []
    searches: list[Begun] = []
    for setting, makers in offers:
        large = setting.replicas == 1 and 3 * setting.depth * setting.num_micro_batches > _LARGE
        known = [] if large else [one for maker in makers.values() if (one := _made(maker, setting))]
        found += known
        if setting.replicas == 1:
            searches += _searches(setting, known, large)
    found += _searched(searches, min((timing.makespan_s for timing, _ in found), default=inf))
    for setting, makers in offers:
        if setting.replicas == 1 and 3 * setting.depth * setting.num_micro_batches > _LARGE:
            for estimate_s, maker in _estimates(setting, makers):
                best_s = min(timing.makespan_s for timing, _ in found)
                if estimate_s < best_s and (made := _made(maker, setting)):
                    found.append(made)
    if not found:
        raise InfeasibleError(
            f"no schedule with {offers[0][0].replicas} replicas fits chunks, micro-batches and memory"
        )
    timing, schedule = min(found, key=_merit)
    return replace(schedule, name="auto"), timing


def pipes_of(setting: Setting) -> list[Pipe]:
    """The placements that `auto` searches. Raises InfeasibleError where memory holds no micro-batch."""
    placements = {waves(setting.num_ranks, setting.chunks), looped(setting.num_ranks, setting.chunks)}
    if setting.placement:
        placements = {setting.placement}
    return [pipe_of(setting, placement) for placement in sorted(placements, reverse=True)]


def bound_s(setting: Setting) -> float:
    """A makespan in seconds that no schedule on these placements can beat (one replica)."""
    return min(lower_bound_s(pipe) for pipe in pipes_of(setting))


def gap_of(setting: Setting, makespan_s: float) -> Gap:
    """How far a makespan is from what no schedule on these placements can beat."""
    stages = f"with {setting.chunks} stage{'s' * (setting.chunks > 1)} per rank"
    return Gap(makespan_s, bound_s(setting), stages)


def _merit(found: Found) -> tuple[float, float]:
    timing, _ = found
    return round(timing.makespan_s, 9), max(timing.peak_activation)


def _made(maker: Callable[[Setting], Schedule], setting: Setting) -> Found | None:
    """A registered schedule, unless it can't serve the setting or its memory."""
    try:
        schedule = maker(setting)
    except InfeasibleError:
        return None
    if setting.placement not in ((), schedule.placement):
        return None
    timing = time_schedule(schedule, setting)
    return (timing, schedule) if max(timing.peak_activation) <= setting.memory_limit + _JUST else None


def _estimates(setting: Setting, makers: Makers) -> Iterator[tuple[float, Callable[[Setting], Schedule]]]:
    """What the schedules will take, best first, from runs of fewer micro-batches: later ones take a period each."""
    fewer = replace(setting, num_micro_batches=min(setting.num_micro_batches, 2 * setting.num_ranks))
    rest = setting.num_micro_batches - fewer.num_micro_batches
    made = [(found[0], maker) for maker in makers.values() if (found := _made(maker, fewer))]
    for timing, maker in sorted(made, key=lambda one: one[0].makespan_s):
        yield timing.makespan_s + rest * max(timing.work_s) / fewer.num_micro_batches, maker


def _searches(setting: Setting, known: list[Found], large: bool) -> list[Begun]:
    """A search for each placement (of large settings the first alone), with the orders that it begins from."""
    pipes = pipes_of(setting)
    floor_s, found = min(lower_bound_s(pipe) for pipe in pipes), []
    for number, pipe in enumerate(pipes[: 1 if large else None]):
        same = sorted((one for one in known if one[1].placement == pipe.placement), key=_merit)
        bases = [codes_of(pipe, schedule) for _, schedule in same[: 2 - number]]
        found.append((Search(pipe, floor_s), setting, bases))
    return found


def _searched(found: list[Begun], known_s: float) -> Iterator[Found]:
    """What searches find that may do better than `known_s`: each explores, and the best of them goes on."""
    live = [one for one in found if one[0].bound_s < known_s - _JUST]
    if not live:
        return
    least, times, most = _BUDGET
    size = max(search.pipe.size for search, _, _ in live)
    several = len({setting.chunks for _, setting, _ in live}) > 1
    budget = _SMALL[1] if several and size <= _SMALL[0] else max(least, min(times * size, most))
    for search, _, bases in live:
        search.known_s = known_s
        explore(search, bases, budget // (3 * len(live)))
        known_s = min(known_s, search.best_s)
    search, setting, _ = min(live, key=lambda one: one[0].best_s)
    spent = sum(one.spent for one, _, _ in live)
    search.budget = search.spent + max(budget - spent, 2 * search.pipe.size)
    improve(search)
    if search.best is not None:
        schedule = schedule_of(search.pipe, search.best.passes, "auto")
        yield time_schedule(schedule, setting), schedule
