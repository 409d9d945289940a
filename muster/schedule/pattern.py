"""Orders of forwards and input backwards from one block that repeats: a micro-batch's way down and back, every period.

Building blocks as in Qi et al. 2024 (arXiv:2405.15362, §3), but laid out with the given times and delays: a way that
takes longer keeps more micro-batches under way, a shorter one needs less memory.
"""

from dataclasses import dataclass, replace
from random import Random

from muster.schedule.pipe import Pipe


@dataclass(frozen=True, slots=True)
class Pattern:
    """All but the last two in periods of the pipe."""

    hops: tuple[float, ...]
    """What a micro-batch waits at each change of rank: forward in each chunk, then backward in each, deepest first."""
    turns: tuple[float, ...]
    """What it waits at the end of each of these legs but the last, where it turns round or goes into the next chunk."""
    lead: float
    """How much earlier than one period apart the later forwards are, as long as they are `spacing` apart."""
    spacing: float
    period: float
    patience: float
    """As in `follow`, and `overtake`."""
    overtake: int


def pattern_orders(pipe: Pipe, pattern: Pattern) -> list[list[int]] | None:
    """The F and I of each rank by the times of the pattern; None where a rank would have to keep too much."""
    begins_s = _first_s(pipe, pattern)
    count, stages, period_s = pipe.num_micro_batches, pipe.num_stages, pipe.period_s
    backward_s = [index * pattern.period * period_s for index in range(count)]
    lead_s, spacing_s = pattern.lead * period_s, min(pattern.spacing, pattern.period) * period_s
    forward_s = [max(index * spacing_s, time_s - lead_s) for index, time_s in enumerate(backward_s)]
    orders: list[list[int]] = []
    for held in pipe.stages:
        times: list[tuple[float, int]] = []
        for stage in held:
            for place, later_s in ((stage, forward_s), (stages + stage, backward_s)):
                first, begin_s = place * count, begins_s[place]
                times += [(begin_s + one_s, first + index) for index, one_s in enumerate(later_s)]
        order = [code for _, code in sorted(times)]
        kept = 0
        for code in order:
            kept += 1 if code < stages * count else -1
            if kept > pipe.capacity:
                return None
        orders.append(order)
    return orders


def _first_s(pipe: Pipe, pattern: Pattern) -> list[float]:
    """When the first micro-batch's F and then its I begin, by stage."""
    stages, ranks, period_s = pipe.num_stages, pipe.num_ranks, pipe.period_s
    way = [*range(stages), *range(2 * stages - 1, stages - 1, -1)]
    begins_s, time_s = [0.0] * (2 * stages), 0.0
    for step, place in enumerate(way):
        begins_s[place] = time_s
        time_s += pipe.times_s[place // stages][place % stages]
        leg, turn = divmod(step + 1, ranks)
        if turn:
            time_s += pattern.hops[leg] * period_s
        elif leg < len(pattern.turns):
            time_s += pattern.turns[leg - 1] * period_s
        if step + 1 < len(way) and step + 1 != stages:
            time_s += pipe.hops_s[min(place % stages, way[step + 1] % stages)]
    return begins_s


def first_patterns(pipe: Pipe) -> list[Pattern]:
    """From a way that takes as long as the memory allows to one that takes no longer than it must."""
    legs, period_s = 2 * pipe.num_stages // pipe.num_ranks, pipe.period_s
    longest_s = pipe.capacity * pipe.num_ranks / pipe.num_stages * period_s
    spare_s = max(0.0, longest_s - pipe.trip_s(0) - pipe.times_s[1][0] - pipe.times_s[2][0])
    wait = min(1.0, spare_s / (period_s * legs * max(1, pipe.num_ranks - 1)))
    plain = Pattern((0.0,) * legs, (0.15,) * legs, 0.5, 0.67, 1.0, 0.5, 3)
    return [replace(plain, hops=(wait * share,) * legs) for share in (1.0, 0.7, 0.4, 0.2, 0.0)]


def varied(pattern: Pattern, random: Random) -> Pattern:
    """A pattern near another one."""
    for _ in range(random.choice((1, 2, 3))):
        what = random.randrange(8)
        if what < 2:
            pattern = replace(pattern, hops=_moved(pattern.hops, 0.1, random))
        elif what < 4:
            pattern = replace(pattern, turns=_moved(pattern.turns, 0.2, random))
        elif what == 4:
            pattern = replace(pattern, lead=max(0.0, pattern.lead + random.gauss(0, 0.7)))
        elif what == 5:
            pattern = replace(pattern, spacing=random.choice((0.33, 0.5, 0.67, 1.0)))
        elif what == 6:
            pattern = replace(pattern, period=random.choice((1.0, 1.0, 1.0, 1.05, 1.1)))
        else:
            pattern = replace(pattern, patience=random.choice((0, 0.5, 1, 2, 4)), overtake=random.choice((0, 1, 3)))
    return pattern


def _moved(waits: tuple[float, ...], by: float, random: Random) -> tuple[float, ...]:
    """One of the waits changed, or all of them."""
    change = random.gauss(0, by)
    which = random.randrange(len(waits) + 1)
    return tuple(max(0.0, wait + change * (which in (index, len(waits)))) for index, wait in enumerate(waits))
