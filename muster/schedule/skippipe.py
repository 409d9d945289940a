"""SkipPipe: a pipeline whose micro-batches skip some of the stages (Blagoev, Chen and Ersoy 2025, arXiv:2502.19913).

**It changes what is trained.** Each micro-batch passes through an ordered subset of the stages: the first, which reads
the data, the last, which has the loss, and as many between them as the skip ratio leaves. Its backward takes the same
way back. A stage averages its gradients over the micro-batches that it has seen.
"""

from collections.abc import Iterator, Sequence
from itertools import product
from math import comb

from muster.schedule.action import Action, Kind
from muster.schedule.path_search import PathProblem, find_paths, num_skipped
from muster.schedule.paths import Paths, stage_along
from muster.schedule.schedule import Schedule
from muster.schedule.schedule_spec import PathLimits, ScheduleSpec
from muster.schedule.timing import time_schedule
from muster.spec.schedules import SCHEDULES, stage_placement

MOST_AT_ONCE = (1, 2, 3)
"""Micro-batches that a rank may have at once, each of which is tried: a pass at a time, or with others that wait. The
authors' program has 3 (github.com/gensyn-ai/skippipe)."""

_NAME = "skippipe"


def skippipe(spec: ScheduleSpec) -> Schedule:
    """Each micro-batch skips a share of the stages; with none skipped it is 1F1B, or like interleaved 1F1B.

    The shortest of `skip_schedules` is kept. Raises InfeasibleError where no paths keep to the limits (`spec.paths`).
    """

    def rating(schedule: Schedule) -> tuple[float, float]:
        timing = time_schedule(schedule, spec)
        return round(timing.makespan_s, 12), max(timing.peak_activation)

    return min(skip_schedules(spec), key=rating)


def skip_schedules(spec: ScheduleSpec) -> Iterator[Schedule]:
    """Yield schedules with stages placed on ranks, and paths found, for the times of `spec.link_s` between ranks: for
    several numbers of micro-batches at once on a rank, and several depths of the warm-up. Raises as `skippipe`."""
    limits = spec.paths or PathLimits()
    skipped, min_visits = num_skipped(limits, spec.depth, spec.num_micro_batches)
    for placement in _placements(spec, skipped):
        tried: set[Paths] = set()
        for problem in _problems(spec, placement, skipped, min_visits):
            paths = tuple(path.stages for path in find_paths(problem))
            if paths in tried:
                continue
            tried.add(paths)
            for most_in_flight in warm_ups(spec):
                ranks = order_passes(spec, placement, paths, most_in_flight)
                yield Schedule(_NAME, placement, spec.num_micro_batches, ranks, paths=paths)


def _problems(spec: ScheduleSpec, placement: tuple[int, ...], skipped: int, min_visits: int) -> Iterator[PathProblem]:
    """Yield what paths are to be found for: forwards and their transfers alone, as at the beginning of a step, and,
    where links are known, each with the backward and the transfer of its way back, as in the midst of it."""
    hop_s, busy_s = (
        tuple(tuple(seconds(spec, one, other) for other in placement) for one in placement)
        for seconds in (_transfer_s, _busy_s)
    )
    alone = spec.forward_s, hop_s, busy_s
    passes_s = zip(spec.forward_s, spec.input_backward_s, spec.weight_backward_s, strict=True)
    both_busy_s = tuple(
        tuple(there_s + back_s for there_s, back_s in zip(row, column, strict=True))
        for row, column in zip(busy_s, zip(*busy_s, strict=True), strict=True)
    )
    with_backwards = tuple(map(sum, passes_s)), hop_s, both_busy_s
    times_s = [alone, with_backwards] if spec.link_busy_s and skipped else [alone]
    at_once = MOST_AT_ONCE if skipped else MOST_AT_ONCE[:1]
    swaps = sorted({False, bool(spec.paths and spec.paths.swaps)})
    for most, swap, times in product(at_once, swaps, times_s):
        yield PathProblem(*times, placement, spec.num_micro_batches, skipped, min_visits, most, swap)


def _transfer_s(spec: ScheduleSpec, one: int, other: int) -> float:
    """Return the p2p seconds from one rank to another."""
    if one == other:
        return 0.0
    return spec.link_s[one][other] if spec.link_s else spec.p2p_s


def _busy_s(spec: ScheduleSpec, one: int, other: int) -> float:
    """Return the seconds for which a transfer from one rank to another occupies the first one's outgoing link."""
    return spec.link_busy_s[one][other] if spec.link_busy_s and one != other else 0.0


def warm_ups(spec: ScheduleSpec) -> Iterator[tuple[int, ...]]:
    """Yield the most micro-batches in flight on each stage: those of 1F1B, and as many as the memory has room for,
    which bear longer transfers."""
    room = int(min(spec.memory_limit, spec.num_micro_batches))
    yield tuple(max(1, min(spec.depth - stage, room)) for stage in range(spec.depth))
    yield (max(1, min(spec.depth, room)),) * spec.depth


# ----------------------------------------------------------------------------------------------------------------------
# Places of the stages


def _placements(spec: ScheduleSpec, skipped: int) -> list[tuple[int, ...]]:
    """Return the ranks of the stages to try: in turn, and as a search over the links places them."""
    if spec.placement:
        return [spec.placement]
    plain = stage_placement(SCHEDULES[_NAME], spec.num_ranks, spec.chunks)
    if not spec.link_s:
        return [plain]
    order = place_on_links(spec.link_s, plain, skipped)
    return list(dict.fromkeys((plain, tuple(order[rank] for rank in plain))))


def place_on_links(link_s: Sequence[Sequence[float]], plain: Sequence[int], skipped: int) -> tuple[int, ...]:
    """Return the rank that takes the place of each, so that the hops of a mean path take least: swaps of two ranks, and
    moves of one, as long as one of them helps, from each rotation of the ranks on.

    A hop's weight is the share of all paths with as many skipped stages that have it.
    """
    weights = hop_weights(len(plain), skipped)

    def cost_s(order: Sequence[int]) -> float:
        return sum(
            weight * (link_s[order[plain[one]]][order[plain[other]]] + link_s[order[plain[other]]][order[plain[one]]])
            for (one, other), weight in weights.items()
            if plain[one] != plain[other]
        )

    count = len(link_s)
    best: tuple[float, tuple[int, ...]] | None = None
    for turn in range(count):
        order = tuple((rank + turn) % count for rank in range(count))
        now_s = cost_s(order)
        while (better := min(((cost_s(other), other) for other in _neighbours(order)), default=None)) is not None:
            if better[0] >= now_s * (1 - 1e-12):
                break
            now_s, order = better
        if best is None or now_s < best[0] * (1 - 1e-12):
            best = now_s, order
    assert best is not None
    return best[1]


def _neighbours(order: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yield the orders that differ by a swap of two, by one that has moved, or by a run that is turned round."""
    for one in range(len(order)):
        for other in range(one + 1, len(order)):
            swapped = list(order)
            swapped[one], swapped[other] = order[other], order[one]
            yield tuple(swapped)
            yield (*order[:one], *order[one + 1 : other + 1], order[one], *order[other + 1 :])
            yield (*order[:one], *reversed(order[one : other + 1]), *order[other + 1 :])


def hop_weights(num_stages: int, skipped: int) -> dict[tuple[int, int], float]:
    """Return each pair of stages with the share of the paths, of all that skip so many, that go from one to the other:
    of n − 2 stages, those between the two are skipped, and the other skipped ones lie anywhere else."""
    inner, total = num_stages - 2, comb(max(num_stages - 2, 0), skipped)
    found = {}
    for one in range(num_stages - 1):
        for other in range(one + 1, num_stages):
            between = other - one - 1
            ends = (one > 0) + (other < num_stages - 1)
            if between <= skipped:
                found[one, other] = comb(inner - between - ends, skipped - between) / total
    return {pair: weight for pair, weight in found.items() if weight}


# ----------------------------------------------------------------------------------------------------------------------
# Order of the passes


def order_passes(
    spec: ScheduleSpec, placement: Sequence[int], paths: Paths, most_in_flight: Sequence[int]
) -> tuple[tuple[Action, ...], ...]:
    """Return the passes of each rank in order: a free rank runs the oldest micro-batch's backward that is ready, else
    the oldest forward whose stage has room.

    Where swapped paths let stages without room wait for each other, the oldest forward goes on without it.
    """
    orders: list[list[Action]] = [[] for _ in range(spec.num_ranks)]
    free_s, link_free_s = [0.0] * spec.num_ranks, [0.0] * spec.num_ranks
    ready: list[dict[Action, float]] = [{} for _ in range(spec.num_ranks)]
    in_flight = [0] * spec.depth
    ready[placement[0]][Action(Kind.F, 0, 0)] = 0.0

    def has_room(action: Action) -> bool:
        return action.kind != Kind.F or in_flight[action.stage] < most_in_flight[action.stage]

    def candidates(any_room: bool) -> Iterator[tuple[float, bool, int, int, Action]]:
        for rank, own in enumerate(ready):
            for action, ready_s in own.items():
                if any_room or has_room(action):
                    yield max(free_s[rank], ready_s), action.kind == Kind.F, action.micro_batch, rank, action

    while any(ready):
        begin_s, is_forward, micro_batch, rank, action = min(candidates(False), default=None) or min(
            candidates(True), key=lambda one: (one[2], *one)
        )
        stage = action.stage
        del ready[rank][action]
        if is_forward and stage == 0 and micro_batch + 1 < spec.num_micro_batches:
            ready[rank][Action(Kind.F, 0, micro_batch + 1)] = 0.0
        orders[rank].append(action)
        spent_s = spec.forward_s[stage] if is_forward else spec.input_backward_s[stage] + spec.weight_backward_s[stage]
        free_s[rank] = end_s = begin_s + spent_s
        in_flight[stage] += 1 if is_forward else -1
        other = stage_along(paths, stage, micro_batch, 1 if is_forward else -1)
        if other >= 0:
            made, to = Action(action.kind, other, micro_batch), placement[other]
            sent_s = end_s if to == rank else max(end_s, link_free_s[rank])
            link_free_s[rank] = max(link_free_s[rank], sent_s + _busy_s(spec, rank, to))
            ready[to][made] = sent_s + _transfer_s(spec, rank, to)
        elif is_forward:
            ready[rank][Action(Kind.B, stage, micro_batch)] = end_s
    return tuple(map(tuple, orders))
