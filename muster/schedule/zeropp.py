"""ZeroPP: units of micro-batches, breadth first, backwards in two parts (Tang et al. 2024, arXiv:2402.03791)."""

from muster.schedule.action import Action, Kind
from muster.schedule.bubble_fill import fill_bubbles
from muster.schedule.interleaved import group_sizes
from muster.schedule.schedule import Schedule
from muster.schedule.schedule_spec import ScheduleSpec
from muster.spec.errors import InfeasibleError
from muster.spec.stage_placement import looped_placement


def zeropp(spec: ScheduleSpec) -> Schedule:
    """Bubble (p − 1)(tF + tI) / v with the activations of two units of p micro-batches.

    A unit runs all its forwards stage by stage, then all its input backwards; its W fill the slots in which a rank
    would idle, until the end of the next unit. Data-parallel ranks that shard the parameters gather each stage's once
    for a unit's forwards and once for its backwards. A memory limit makes the units smaller.
    """
    ranks, count, chunks = spec.num_ranks, spec.num_micro_batches, spec.chunks
    largest = int(min(spec.memory_limit, count))
    if largest < 1:
        raise InfeasibleError(f"zeropp keeps one micro-batch's activations or more, the limit is {spec.memory_limit:g}")
    sizes = group_sizes(count, max(1, count // ranks, -(-count // largest)))
    orders: list[list[Action]] = [[] for _ in range(ranks)]
    first = 0
    for size in sizes:
        unit = range(first, first + size)
        first += size
        for rank, order in enumerate(orders):
            stages = range(rank, spec.depth, ranks)
            order += [Action(Kind.F, stage, index) for stage in stages for index in unit]
            order += [Action(Kind.I, stage, index) for stage in reversed(stages) for index in unit]
            order += [Action(Kind.W, stage, index) for stage in reversed(stages) for index in unit]
    schedule = Schedule("zeropp", looped_placement(ranks, chunks), count, tuple(map(tuple, orders)))
    return fill_bubbles(schedule, spec, min(2 * sizes[0], spec.memory_limit) * chunks)
