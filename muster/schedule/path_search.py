"""Conflict-based search for the paths of micro-batches through a pipeline (SkipPipe, arXiv:2502.19913 §4).

Each micro-batch alone has a fastest path, which A* finds. Together such paths collide: more micro-batches come to a
rank than it may have at once, two want a rank's outgoing link, or too few see a stage. Conflict-based search (Sharon et
al. 2015, Artificial Intelligence 219) resolves one collision at a time by a constraint on one of the micro-batches that
take part, tries each of them, and plans that one anew. Of the constraint sets it takes up next the one with the fewest
collisions left (greedy, Barer et al. 2014), which soon finds paths without any; they needn't be the fastest together.
Paths planned one micro-batch after another, each around those before it, always exist, and bound what the search has to
beat.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count, pairwise
from typing import NamedTuple

from muster.schedule.schedule_spec import PathLimits
from muster.spec.errors import InfeasibleError

MAX_TRIED = 150
"""Sets of constraints that the search takes up: a second for 8 stages and 16 micro-batches."""
MAX_CHECKED = 40_000
"""Paths that it looks at for collisions, those of all micro-batches whenever one is planned anew, which ends the search
where there are many micro-batches."""

Intervals = tuple[tuple[float, float], ...]


class TimedPath(NamedTuple):
    """Stages of a micro-batch with the seconds at which its forward begins on each, were it alone on the ranks."""

    stages: tuple[int, ...]
    begin_s: tuple[float, ...]
    send_s: tuple[float, ...]
    """Seconds at which its transfer to each stage after the first begins."""
    end_s: float


@dataclass(frozen=True, slots=True)
class PathProblem:
    """Pipeline whose micro-batches need paths."""

    forward_s: tuple[float, ...]
    """Seconds of each stage's forward."""
    hop_s: tuple[tuple[float, ...], ...]
    """Seconds from the begin of a transfer from one stage until it is at another."""
    busy_s: tuple[tuple[float, ...], ...]
    """Seconds of it for which the outgoing link of the sender's rank is in use, by one transfer at a time."""
    placement: tuple[int, ...]
    """Rank of each stage."""
    num_micro_batches: int
    num_skipped: int
    """Stages that each micro-batch skips."""
    min_visits: int
    """Micro-batches that each stage sees at least."""
    max_at_once: int
    """Most micro-batches on a rank at a time."""
    swaps: bool
    """True if neighbours on a path may be in the other order than in the model."""

    @property
    def num_stages(self) -> int:
        return len(self.forward_s)

    @property
    def length(self) -> int:
        """Stages of each path."""
        return self.num_stages - self.num_skipped


def num_skipped(limits: PathLimits, num_stages: int, num_micro_batches: int) -> tuple[int, int]:
    """Return the stages that each micro-batch skips, and the micro-batches that each stage sees at least. Raises
    InfeasibleError where no paths keep to the limits."""
    skipped = int(limits.skip_ratio * num_stages + 0.5)
    inner = max(0, num_stages - 2)
    if skipped > inner:
        raise InfeasibleError(
            f"skip_ratio {limits.skip_ratio:g} skips {skipped} of {num_stages} stages, but only the {inner} between the"
            " first and the last can be skipped: take a smaller ratio, or more stages"
        )
    wanted = max(1, -int(-limits.min_visits * num_micro_batches // 1))
    seen = num_micro_batches * (inner - skipped)
    if wanted * inner > seen:
        raise InfeasibleError(
            f"with skip_ratio {limits.skip_ratio:g} the {inner} inner stages see"
            f" {seen} micro-batch{'es' * (seen != 1)} between them, but each needs {wanted}:"
            f" take a smaller skip_ratio{' or min_visits' * (wanted > 1)}, or more micro-batches"
        )
    return skipped, wanted


def find_paths(problem: PathProblem) -> tuple[TimedPath, ...]:
    """Return the path of each micro-batch, without collisions: those of the conflict-based search where it finds some
    that end earlier, taken together, than paths planned one after another."""
    planned = _one_after_another(problem)
    found = _conflict_based(problem, _total_s(planned))
    return planned if found is None else found


def _total_s(paths: Sequence[TimedPath]) -> float:
    return sum(path.end_s for path in paths)


# ----------------------------------------------------------------------------------------------------------------------
# One micro-batch


class _Constraints(NamedTuple):
    """Constraints on one micro-batch."""

    closed: Mapping[int, Intervals] = {}
    """Rank, or `outgoing_link` of one → times at which the micro-batch mustn't be there."""
    required: frozenset[int] = frozenset()
    """Stages that it has to see."""


def fastest_path(
    problem: PathProblem, micro_batch: int, constraints: _Constraints, visits: Mapping[int, int] | None = None
) -> TimedPath | None:
    """Return the path of one micro-batch that ends earliest (A*), None where its first pass mustn't be. Of paths that
    end at the same time it is one whose stages have the fewest `visits` so far.

    It waits before a link, and before it comes to a rank, so that an earlier end of a stage is never worse. Estimate of
    what is left: the fastest walk over as many stages, in any order.
    """
    first_s = micro_batch * problem.forward_s[0]
    if _earliest(first_s, problem.forward_s[0], constraints.closed.get(problem.placement[0], ())) > first_s:
        return None
    left = problem.length - 1
    rest_s = _least_rests(problem)
    begin_s = first_s + problem.forward_s[0]
    serial = count()
    heap: list[tuple[float, int, int, float, tuple[int, int, int, int], tuple[tuple[int, float, float], ...]]]
    heap = [(begin_s + rest_s[left][0], 0, next(serial), begin_s, (0, 0, -1, left), ((0, first_s, first_s),))]
    seen: set[tuple[int, int, int, int]] = set()
    while heap:
        _, crowd, _, now_s, state, trail = heappop(heap)
        stage, floor, pending, left = state
        if left == 0:
            stages, begins_s, sends_s = zip(*trail, strict=True)
            return TimedPath(stages, begins_s, sends_s[1:], now_s)
        if state in seen:
            continue
        seen.add(state)
        link = constraints.closed.get(outgoing_link(problem.placement[stage]), ())
        for to, to_floor, to_pending in _next_stages(problem, floor, pending, left, constraints.required):
            closed = constraints.closed.get(problem.placement[to], ())
            busy_s = problem.busy_s[stage][to]
            send_s = _earliest(now_s, busy_s, link) if busy_s else now_s
            arrival_s = _earliest(send_s + problem.hop_s[stage][to], problem.forward_s[to], closed)
            end_s = arrival_s + problem.forward_s[to]
            following = to, to_floor, to_pending, left - 1
            if following not in seen:
                bound_s = round(end_s + rest_s[left - 1][to], 12)
                met = crowd + (visits or {}).get(to, 0)
                heappush(heap, (bound_s, met, next(serial), end_s, following, (*trail, (to, arrival_s, send_s))))
    return None


def _next_stages(
    problem: PathProblem, floor: int, pending: int, left: int, required: frozenset[int]
) -> Iterator[tuple[int, int, int]]:
    """Yield where a path may go: (stage, highest stage so far, stage that has to come next: −1 if any may).

    `left` stages are to come, the last one among them; `floor` is the highest so far.
    """
    if pending >= 0:
        yield pending, floor, -1
        return
    last = problem.num_stages - 1
    if left == 1:
        if not any(floor < stage < last for stage in required):
            yield last, last, -1
        return
    for to in range(floor + 1, last):
        if last - to >= left - 1:
            yield to, to, -1
        if problem.swaps and left > 2:
            for over in range(to + 1, last):
                if not any(to < stage < over for stage in required) and last - over >= left - 2:
                    yield over, over, to
        if to in required:
            return


def _earliest(ready_s: float, duration_s: float, closed: Intervals) -> float:
    """Return the earliest time from `ready_s` on at which so long a stay touches no closed interval."""
    for begin_s, end_s in sorted(closed):
        if begin_s < ready_s + duration_s - _EPSILON_S and ready_s < end_s - _EPSILON_S:
            ready_s = end_s
    return ready_s


_EPSILON_S = 1e-12


def _least_rests(problem: PathProblem) -> list[list[float]]:
    """Return, by the number of stages to come and the present one, the least seconds of a walk to the last stage."""
    last, stages = problem.num_stages - 1, range(problem.num_stages)
    rests = [[0.0] * problem.num_stages]
    for left in range(1, problem.length):
        ends = (last,) if left == 1 else range(1, last)
        rests.append(
            [
                min((problem.hop_s[one][to] + problem.forward_s[to] + rests[-1][to] for to in ends), default=0.0)
                for one in stages
            ]
        )
    return rests


# ----------------------------------------------------------------------------------------------------------------------
# All micro-batches


def outgoing_link(rank: int) -> int:
    """Return the number of a rank's outgoing link beside those of the ranks."""
    return -1 - rank


def stays(problem: PathProblem, path: TimedPath) -> Iterator[tuple[int, float, float]]:
    """Yield the rank of each pass of a path, and the outgoing link of each transfer, with its begin and its end there:
    the first pass first."""
    for stage, begin_s in zip(path.stages, path.begin_s, strict=True):
        yield problem.placement[stage], begin_s, begin_s + problem.forward_s[stage]
    for (stage, to), begin_s in zip(pairwise(path.stages), path.send_s, strict=True):
        if busy_s := problem.busy_s[stage][to]:
            yield outgoing_link(problem.placement[stage]), begin_s, begin_s + busy_s


def capacity(problem: PathProblem, place: int) -> int:
    """Return the most micro-batches that may be at a time on a rank, or on the outgoing link of one."""
    return problem.max_at_once if place >= 0 else 1


def _one_after_another(problem: PathProblem) -> tuple[TimedPath, ...]:
    """Return paths planned for one micro-batch after another, around those before it and all first passes.

    First passes of those to come are one stay on the first rank. A stage that would otherwise be seen too seldom is
    required: stages with the most visits to come, as many as the micro-batches after this one couldn't make up for.
    """
    first = problem.forward_s[0]
    end_of_firsts_s = problem.num_micro_batches * first
    paths: list[TimedPath] = []
    present: list[tuple[int, float, float]] = []
    missing = dict.fromkeys(range(1, problem.num_stages - 1), problem.min_visits)
    visits = dict.fromkeys(missing, 0)
    for number in range(problem.num_micro_batches):
        first_s = number * first
        after = problem.num_micro_batches - number - 1
        excess = sum(missing.values()) - after * (problem.length - 2)
        urgent = sum(visits > after for visits in missing.values())
        ordered = sorted(missing, key=lambda stage: (-missing[stage], stage))
        required = frozenset(stage for stage in ordered[: max(excess, urgent, 0)] if missing[stage])
        present = [stay for stay in present if stay[2] > first_s]  # this micro-batch comes too late to meet the others
        closed = _full_times(problem, [*present, (problem.placement[0], first_s + first, end_of_firsts_s)])
        path = fastest_path(problem, number, _Constraints(closed, required), visits)
        assert path is not None, "a micro-batch can always wait until the ranks are free"
        paths.append(path)
        present += stays(problem, path)
        for stage in path.stages[1:-1]:
            missing[stage] = max(0, missing[stage] - 1)
            visits[stage] += 1
    return tuple(paths)


def _full_times(problem: PathProblem, known: Sequence[tuple[int, float, float]]) -> dict[int, Intervals]:
    """Return the times at which as many micro-batches as may be are on a rank or a link, in order."""
    changes: dict[int, list[tuple[float, int]]] = {}
    for place, begin_s, end_s in known:
        changes.setdefault(place, []).extend(((begin_s, 1), (end_s, -1)))
    return {place: _times_of(own, capacity(problem, place)) for place, own in changes.items()}


def _times_of(changes: list[tuple[float, int]], most: int) -> Intervals:
    """Return the intervals in which a number that changes so from 0 on is at least `most`, joined where they touch."""
    full: list[tuple[float, float]] = []
    there, since_s = 0, 0.0
    for moment_s, change in sorted(changes):
        if there >= most and moment_s > since_s:
            begin_s = full.pop()[0] if full and full[-1][1] == since_s else since_s
            full.append((begin_s, moment_s))
        there, since_s = there + change, moment_s
    return tuple(full)


class Collision(NamedTuple):
    """Micro-batches of which one has to change its path."""

    micro_batches: tuple[int, ...]
    stage: int
    """Stage that too few of the others see; −1: more are at `place` than may be."""
    place: int = -1
    """Rank, or `outgoing_link` of one."""
    begin_s: float = 0.0
    """Time at which the last of them comes there."""
    ends_s: tuple[float, ...] = ()
    """Times at which they leave."""


def collisions(problem: PathProblem, paths: Sequence[TimedPath]) -> list[Collision]:
    """Return what is wrong with the paths of all micro-batches together, the earliest first."""
    found = []
    for stage in range(1, problem.num_stages - 1):
        absent = tuple(number for number, path in enumerate(paths) if stage not in path.stages)
        if len(paths) - len(absent) < problem.min_visits:
            found.append(Collision(absent, stage))
    by_place: dict[int, list[tuple[float, float, int]]] = {}
    for number, path in enumerate(paths):
        for at, begin_s, end_s in stays(problem, path):
            by_place.setdefault(at, []).append((begin_s, end_s, number))
    crowds = []
    for at, own in by_place.items():
        own.sort()
        present: list[tuple[float, float, int]] = []
        for stay in own:
            present = [other for other in present if other[1] > stay[0] + _EPSILON_S] + [stay]
            if len(present) > capacity(problem, at):
                ends = tuple(end_s for _, end_s, _ in present)
                crowds.append(Collision(tuple(number for *_, number in present), -1, at, stay[0], ends))
    return found + sorted(crowds, key=lambda crowd: (crowd.begin_s, crowd.place))


def _conflict_based(problem: PathProblem, limit_s: float) -> tuple[TimedPath, ...] | None:
    """Return paths without collisions that end earlier, taken together, than `limit_s`, or None."""
    free = tuple(_Constraints() for _ in range(problem.num_micro_batches))
    alone = [fastest_path(problem, number, one) for number, one in enumerate(free)]
    root = tuple(path for path in alone if path is not None)
    serial = count()
    heap = [(len(collisions(problem, root)), _total_s(root), next(serial), free, root)]
    checked = 0
    for _ in range(MAX_TRIED):
        if not heap:
            return None
        left, _, _, constraints, paths = heappop(heap)
        if not left:
            return paths
        for number, constraint in _resolutions(problem, collisions(problem, paths)[0], constraints):
            path = fastest_path(problem, number, constraint)
            if path is None:
                continue
            if (checked := checked + len(paths)) > MAX_CHECKED:
                return None
            changed = (*paths[:number], path, *paths[number + 1 :])
            if (total_s := _total_s(changed)) < limit_s - _EPSILON_S:
                own = (*constraints[:number], constraint, *constraints[number + 1 :])
                heappush(heap, (len(collisions(problem, changed)), total_s, next(serial), own, changed))
    return None


def _resolutions(
    problem: PathProblem, collision: Collision, constraints: Sequence[_Constraints]
) -> Iterator[tuple[int, _Constraints]]:
    """Yield each micro-batch of a collision with its constraints and one more, by which it leaves the collision."""
    for place, number in enumerate(collision.micro_batches):
        own = constraints[number]
        if collision.stage >= 0:
            required = own.required | {collision.stage}
            if len(required) <= problem.length - 2:
                yield number, own._replace(required=required)
            continue
        others = [end_s for other, end_s in enumerate(collision.ends_s) if other != place]
        interval = collision.begin_s, min(others)
        closed = {**own.closed, collision.place: (*own.closed.get(collision.place, ()), interval)}
        yield number, own._replace(closed=closed)
