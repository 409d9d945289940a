"""Interleaved 1F1B: several stages on each rank, round by round (Narayanan et al. 2021, arXiv:2104.04473, §2.2.2)."""

from itertools import chain

from muster.schedule.action import Action, Kind, actions_of_stage
from muster.schedule.schedule import Schedule
from muster.schedule.schedule_spec import ScheduleSpec
from muster.spec.stage_placement import looped_placement


def interleaved(spec: ScheduleSpec) -> Schedule:
    """`chunks` stages per rank. Bubble (p − 1)(tF + tB) / v from m = p on; rank 0 keeps (pv + p − 1) / v micro-batches.

    Micro-batches go through all stages in groups of p. If their number is no multiple of p, the groups are larger, and
    equal up to one micro-batch: that keeps the bubble and costs memory.
    """
    sizes = group_sizes(spec.num_micro_batches, max(1, spec.num_micro_batches // spec.num_ranks))
    warm_ups = [2 * (spec.num_ranks - 1 - rank) + (spec.chunks - 1) * sizes[0] for rank in range(spec.num_ranks)]
    return interleave_groups("interleaved", spec, sizes, warm_ups)


def group_sizes(num_micro_batches: int, num_groups: int) -> list[int]:
    """Return the sizes of groups that differ by one at most, the largest first."""
    size, larger = divmod(num_micro_batches, num_groups)
    return [size + (index < larger) for index in range(num_groups)]


def interleave_groups(name: str, spec: ScheduleSpec, sizes: list[int], warm_ups: list[int]) -> Schedule:
    """Return a schedule of one forward, one backward in turn, after `warm_ups` forwards on each rank.

    Each group of micro-batches runs through a rank's first stage, then through its second, and so on; backwards run
    from the last. No rank waits for another in a circle if sizes never grow, the warm-ups fall from rank to rank, by no
    more than two groups in all, and the last rank's is (v − 1) groups or more.
    """
    num_ranks, chunks = spec.num_ranks, spec.chunks
    steps: list[tuple[int, int]] = []
    """(chunk, micro-batch) in the order of the forwards; backwards take the chunks from the other end."""
    first = 0
    for size in sizes:
        steps += [(chunk, index) for chunk in range(chunks) for index in range(first, first + size)]
        first += size
    orders = []
    for rank, warm_up in enumerate(warm_ups):
        stages = range(rank, num_ranks * chunks, num_ranks)
        forward, backward = (
            [actions_of_stage(kind, stage, spec.num_micro_batches) for stage in own]
            for kind, own in ((Kind.F, stages), (Kind.B, stages[::-1]))
        )
        forwards = [forward[chunk][index] for chunk, index in steps]
        orders.append(alternate_passes(forwards, [backward[chunk][index] for chunk, index in steps], warm_up))
    return Schedule(name, looped_placement(num_ranks, chunks), spec.num_micro_batches, tuple(orders))


def alternate_passes(forwards: list[Action], backwards: list[Action], warm_up: int) -> tuple[Action, ...]:
    """Return `warm_up` forwards, then one forward and one backward in turn, then the remaining backwards."""
    turns = chain.from_iterable(zip(forwards[warm_up:], backwards, strict=False))
    return (*forwards[:warm_up], *turns, *backwards[max(0, len(forwards) - warm_up) :])
