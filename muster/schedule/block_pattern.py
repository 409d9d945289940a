"""Orders of F and I from one repeating block: the path of a micro-batch through all stages and back, every period.

Building blocks as in Qi et al. 2024 (arXiv:2405.15362, §3), but laid out with the given times and delays instead of
unit slots. A block with longer waits keeps more micro-batches in flight and hides delays; a shorter one saves memory.
"""

from dataclasses import dataclass, replace
from random import Random

from muster.schedule.search_problem import SearchProblem


@dataclass(frozen=True, slots=True)
class BlockPattern:
    """Parameters of a block; all but `patience` and `overtake` are in periods of the problem."""

    rank_delays: tuple[float, ...]
    """Wait at each change of rank, per leg: forward in each chunk, then backward in each, deepest first."""
    turn_delays: tuple[float, ...]
    """Wait at the end of each leg but the last, where a micro-batch turns or enters the next chunk."""
    lead: float
    """Lead of later forwards over a distance of one period, as long as they are `spacing` apart."""
    spacing: float
    period: float
    patience: float
    """Options of `place_weight_grads`, with `overtake`."""
    overtake: int


def pattern_orders(problem: SearchProblem, pattern: BlockPattern) -> list[list[int]] | None:
    """Return the F and I of each rank by the times of the pattern; None if a rank exceeds its memory."""
    begins_s = _first_begin_times_s(problem, pattern)
    count, stages, period_s = problem.num_micro_batches, problem.num_stages, problem.period_s
    backward_s = [index * pattern.period * period_s for index in range(count)]
    lead_s = pattern.lead * period_s
    spacing_s = min(pattern.spacing, pattern.period) * period_s
    forward_s = [max(index * spacing_s, time_s - lead_s) for index, time_s in enumerate(backward_s)]
    orders: list[list[int]] = []
    for held in problem.stages:
        times: list[tuple[float, int]] = []
        for stage in held:
            for place, later_s in ((stage, forward_s), (stages + stage, backward_s)):
                first = place * count
                begin_s = begins_s[place]
                times += [(begin_s + one_s, first + index) for index, one_s in enumerate(later_s)]
        order = [code for _, code in sorted(times)]
        kept = 0
        for code in order:
            kept += 1 if code < stages * count else -1
            if kept > problem.capacity:
                return None
        orders.append(order)
    return orders


def _first_begin_times_s(problem: SearchProblem, pattern: BlockPattern) -> list[float]:
    """Return by stage when the first micro-batch's F, then its I, begins; that of all replicas begins at once."""
    stages, depth, ranks, period_s = problem.num_stages, problem.depth, problem.num_ranks, problem.period_s
    begins_s = [0.0] * (2 * stages)
    for first in problem.first_stages:
        way = [*range(first, first + depth), *range(stages + first + depth - 1, stages + first - 1, -1)]
        time_s = 0.0
        for step, place in enumerate(way):
            begins_s[place] = time_s
            time_s += problem.times_s[place // stages][place % stages]
            leg, turn = divmod(step + 1, ranks)
            if turn:
                time_s += pattern.rank_delays[leg] * period_s
            elif leg < len(pattern.turn_delays):
                time_s += pattern.turn_delays[leg - 1] * period_s
            if step + 1 < len(way) and step + 1 != depth:
                time_s += problem.p2p_s[min(place % stages, way[step + 1] % stages)]
    return begins_s


def initial_patterns(problem: SearchProblem) -> list[BlockPattern]:
    """Return patterns from the longest block that memory allows to the shortest possible one."""
    legs = 2 * problem.depth // problem.num_ranks
    period_s = problem.period_s
    longest_s = problem.capacity * problem.num_ranks / problem.num_stages * period_s
    spare_s = max(0.0, longest_s - problem.round_trip_s(0) - problem.times_s[1][0] - problem.times_s[2][0])
    wait = min(1.0, spare_s / (period_s * legs * max(1, problem.num_ranks - 1)))
    plain = BlockPattern((0.0,) * legs, (0.15,) * legs, 0.5, 0.67, 1.0, 0.5, 3)
    return [replace(plain, rank_delays=(wait * share,) * legs) for share in (1.0, 0.7, 0.4, 0.2, 0.0)]


def mutate_pattern(pattern: BlockPattern, random: Random) -> BlockPattern:
    """Return a random pattern near another one."""
    for _ in range(random.choice((1, 2, 3))):
        draw = random.randrange(8)
        if draw < 2:
            pattern = replace(pattern, rank_delays=_perturb(pattern.rank_delays, 0.1, random))
        elif draw < 4:
            pattern = replace(pattern, turn_delays=_perturb(pattern.turn_delays, 0.2, random))
        elif draw == 4:
            pattern = replace(pattern, lead=max(0.0, pattern.lead + random.gauss(0, 0.7)))
        elif draw == 5:
            pattern = replace(pattern, spacing=random.choice((0.33, 0.5, 0.67, 1.0)))
        elif draw == 6:
            pattern = replace(pattern, period=random.choice((1.0, 1.0, 1.0, 1.05, 1.1)))
        else:
            pattern = replace(pattern, patience=random.choice((0, 0.5, 1, 2, 4)), overtake=random.choice((0, 1, 3)))
    return pattern


def _perturb(waits: tuple[float, ...], by: float, random: Random) -> tuple[float, ...]:
    """Return the waits with one of them, or all, changed at random."""
    change = random.gauss(0, by)
    which = random.randrange(len(waits) + 1)
    return tuple(max(0.0, wait + change * (which in (index, len(waits)))) for index, wait in enumerate(waits))
