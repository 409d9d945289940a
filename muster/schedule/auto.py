"""Schedule `auto`: the best of all registered schedules and of a search, for given times, delay and memory."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from heapq import nsmallest
from math import inf

from muster.schedule.makespan_bound import OptimalityGap, lower_bound_s
from muster.schedule.order_search import OrderSearch, explore, improve
from muster.schedule.schedule import Schedule
from muster.schedule.schedule_spec import ScheduleSpec
from muster.schedule.search_problem import SearchProblem, make_search_problem, pass_codes, schedule_from_passes
from muster.schedule.timing import Timing, time_schedule
from muster.spec.errors import InfeasibleError
from muster.spec.gc_pause import gc_paused
from muster.spec.stage_placement import bidirectional_placement, looped_placement, wave_placement

_EPSILON = 1e-9
_BUDGET = (130_000, 42, 600_000)
"""Passes to schedule in a search: at least the first number (0.15 s), else the second times the problem's passes, at
most the third."""
_SMALL_SPEC = (1000, 240_000)
"""Size of small problems in passes, and the budget of passes for several of them."""
_LARGE_SPEC = 60_000
"""Size of a problem in passes beyond which one placement is searched, and only the best registered schedule is kept: a
schedule of 400,000 passes takes 30 MB."""

ScheduleFunctions = Mapping[str, Callable[[ScheduleSpec], Schedule]]
TimedSchedule = tuple[Timing, Schedule]
SeededSearch = tuple[OrderSearch, ScheduleSpec, list[list[int]]]
"""Search of a spec, with the orders that it starts from."""


@gc_paused()
def find_best_schedule(candidates: Sequence[tuple[ScheduleSpec, ScheduleFunctions]]) -> tuple[Schedule, Timing]:
    """Return the best schedule over specs that differ in their chunks, each with the schedules to compare it with.

    It never takes longer than any of these schedules that fits the same memory limit. Stages lie on the ranks in waves
    (with two chunks a V) or looped, those of a second replica from the other end, or as the spec's placement fixes
    them. Ties go to the smaller peak of memory, then to the earlier spec. Raises InfeasibleError if nothing fits.
    """
    found: list[TimedSchedule] = []
    searches: list[SeededSearch] = []
    for spec, functions in candidates:
        made = (one for function in functions.values() if (one := _make_if_fitting(function, spec)))
        known = nsmallest(1, made, key=_sort_key) if _is_large(spec) else list(made)
        found += known
        searches += _seed_searches(spec, known)
    found += _run_searches(searches, min((timing.makespan_s for timing, _ in found), default=inf))
    if not found:
        raise InfeasibleError(
            f"no schedule with {candidates[0][0].replicas} replicas fits chunks, micro-batches and memory"
        )
    timing, schedule = min(found, key=_sort_key)
    return replace(schedule, name="auto" if schedule.replicas == 1 else "auto-bidirectional"), timing


def _is_large(spec: ScheduleSpec) -> bool:
    return 3 * spec.depth * spec.num_micro_batches > _LARGE_SPEC


def search_problems(spec: ScheduleSpec) -> list[SearchProblem]:
    """Return a search problem for each placement. Raises InfeasibleError if memory holds no micro-batch of each
    replica, or these don't share micro-batches evenly."""
    chunks = spec.chunks // spec.replicas
    placements = {wave_placement(spec.num_ranks, chunks), looped_placement(spec.num_ranks, chunks)}
    if spec.replicas > 1:
        placements = {bidirectional_placement(one, spec.num_ranks) for one in placements}
    if spec.placement:
        placements = {spec.placement}
    return [make_search_problem(spec, placement) for placement in sorted(placements, reverse=True)]


def makespan_bound_s(spec: ScheduleSpec) -> float:
    """Return a lower bound in seconds of the makespan of any schedule on these placements."""
    return min(lower_bound_s(problem) for problem in search_problems(spec))


def optimality_gap(spec: ScheduleSpec, makespan_s: float) -> OptimalityGap:
    """Return the gap between a makespan and the lower bound of any schedule on these placements."""
    stages = f"with {spec.chunks} stage{'s' * (spec.chunks > 1)} per rank"
    return OptimalityGap(makespan_s, makespan_bound_s(spec), stages)


def _sort_key(timed: TimedSchedule) -> tuple[float, float]:
    return timed[0].sort_key


def _make_if_fitting(function: Callable[[ScheduleSpec], Schedule], spec: ScheduleSpec) -> TimedSchedule | None:
    """Return a registered schedule with its timing, None if it refuses the spec or exceeds its memory."""
    try:
        schedule = function(spec)
    except InfeasibleError:
        return None
    if spec.placement not in ((), schedule.placement):
        return None
    timing = time_schedule(schedule, spec)
    return (timing, schedule) if max(timing.peak_activation) <= spec.memory_limit + _EPSILON else None


def _seed_searches(spec: ScheduleSpec, known: list[TimedSchedule]) -> list[SeededSearch]:
    """Return a search for each placement (for large specs of the first alone), with the orders to start from; none
    where replicas can't be searched."""
    try:
        problems = search_problems(spec)
    except InfeasibleError:
        if spec.replicas > 1:
            return []
        raise
    floor_s = min(lower_bound_s(problem) for problem in problems)
    found = []
    for number, problem in enumerate(problems[: 1 if _is_large(spec) else None]):
        same = sorted((one for one in known if _begins_search(one[1], problem)), key=_sort_key)
        bases = [pass_codes(problem, schedule) for _, schedule in same[: 2 - number]]
        found.append((OrderSearch(problem, floor_s), spec, bases))
    return found


def _begins_search(schedule: Schedule, problem: SearchProblem) -> bool:
    """Return True for a schedule on the problem's placement whose replicas have the micro-batches that its have."""
    return schedule.placement == problem.placement and all(
        action.micro_batch // problem.num_micro_batches == action.stage // problem.depth
        for order in schedule.ranks
        for action in order
    )


def _run_searches(searches: list[SeededSearch], known_s: float) -> Iterator[TimedSchedule]:
    """Yield schedules that beat `known_s`: every search explores, then the best of them continues."""
    live = [one for one in searches if one[0].bound_s < known_s - _EPSILON]
    if not live:
        return
    least, times, most = _BUDGET
    size = max(search.problem.num_passes for search, _, _ in live)
    several = len({spec.chunks for _, spec, _ in live}) > 1
    budget = _SMALL_SPEC[1] if several and size <= _SMALL_SPEC[0] else max(least, min(times * size, most))
    for search, _, bases in live:
        search.incumbent_s = known_s
        explore(search, bases, budget // (3 * len(live)))
        known_s = min(known_s, search.best_s)
    search, spec, _ = min(live, key=lambda one: one[0].best_s)
    spent = sum(one.spent for one, _, _ in live)
    search.budget = search.spent + max(budget - spent, 2 * search.problem.num_passes)
    improve(search)
    if search.best is not None:
        schedule = schedule_from_passes(search.problem, search.best.passes, "auto")
        yield time_schedule(schedule, spec), schedule
