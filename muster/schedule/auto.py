"""The automatic schedule: the best of all registered ones and of an own search, for given times, delay and memory."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from math import inf

from muster.schedule.bound import Gap, lower_bound_s
from muster.schedule.pipe import Pipe, codes_of, pipe_of, schedule_of
from muster.schedule.schedule import Schedule
from muster.schedule.search import NUM_RULES, Search, explore, improve
from muster.schedule.setting import Setting
from muster.schedule.timing import Timing, time_schedule
from muster.spec.errors import InfeasibleError
from muster.spec.placement import looped, waves

_JUST = 1e-9
_BUDGET = (130_000, 50, 600_000)
"""Passes that the search schedules: at least so many (0.15 s), else 50 times the setting's, at most so many."""
_LARGE = 60_000
"""Passes from which on registered schedules are made only if a shorter run of theirs promises to be the best."""

Makers = Mapping[str, Callable[[Setting], Schedule]]


def auto(setting: Setting, makers: Makers) -> Schedule:
    """Never takes longer than any schedule of `makers` (name → function) that fits in the same memory limit.

    Stages lie on the ranks in `waves` (with two chunks a V) or `looped`, or as the setting binds them. A schedule for
    several replicas is the best of `makers` alone. Where makespans are equal the smaller peak of memory wins. Raises
    InfeasibleError where nothing fits.
    """
    if setting.replicas > 1:
        known = [found for maker in makers.values() if (found := _made(maker, setting))]
        if not known:
            raise InfeasibleError(f"no schedule with {setting.replicas} replicas fits chunks, micro-batches and memory")
        return replace(min(known, key=_merit)[1], name="auto")
    pipes = pipes_of(setting)
    large = pipes[0].size > _LARGE
    known = [] if large else [found for maker in makers.values() if (found := _made(maker, setting))]
    found = [*known, *_searched(setting, pipes, known)]
    if large:
        best_s = min(timing.makespan_s for timing, _ in found)
        for estimate_s, maker in _estimates(setting, makers):
            if estimate_s < best_s and (made := _made(maker, setting)):
                found.append(made)
                best_s = min(best_s, made[0].makespan_s)
    return replace(min(found, key=_merit)[1], name="auto")


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


def _merit(found: tuple[Timing, Schedule]) -> tuple[float, float]:
    timing, _ = found
    return round(timing.makespan_s, 9), max(timing.peak_activation)


def _made(maker: Callable[[Setting], Schedule], setting: Setting) -> tuple[Timing, Schedule] | None:
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


def _searched(
    setting: Setting, pipes: list[Pipe], known: list[tuple[Timing, Schedule]]
) -> Iterator[tuple[Timing, Schedule]]:
    """The best that is found; the placements are explored one by one (of large settings the waves alone), and the best
    of them is worked on."""
    floor_s, searches = min(lower_bound_s(pipe) for pipe in pipes), []
    if min((timing.makespan_s for timing, _ in known), default=inf) <= floor_s + _JUST:
        return
    least, times, most = _BUDGET
    budget = max(least, min(times * pipes[0].size, most))
    num_rules = min(16, budget // (4 * pipes[0].size)) if pipes[0].size > 1000 else NUM_RULES
    for number, pipe in enumerate(pipes[: 1 if pipes[0].size > _LARGE else None]):
        same = sorted((one for one in known if one[1].placement == pipe.placement), key=_merit)
        search = Search(pipe, floor_s)
        explore(search, [codes_of(pipe, schedule) for _, schedule in same[: 2 - number]], max(4, num_rules))
        searches.append(search)
        num_rules //= 4
    search = min(searches, key=lambda one: one.limit_s(0))
    search.budget = search.spent + max(budget - sum(one.spent for one in searches), 2 * search.pipe.size)
    improve(search)
    if search.best is not None:
        schedule = schedule_of(search.pipe, search.best.passes, "auto")
        yield time_schedule(schedule, setting), schedule
