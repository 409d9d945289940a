"""Breadth-first: all micro-batches through a rank's first stage, then through its next (Lamy-Poirier 2022,
arXiv:2211.05953)."""

from muster.schedule.action import Action, Kind
from muster.schedule.schedule import Schedule
from muster.schedule.schedule_spec import ScheduleSpec
from muster.spec.stage_placement import looped_placement


def breadth_first(spec: ScheduleSpec) -> Schedule:
    """Bubble (p − 1)(tF + tB) / v; every rank keeps the activations of all micro-batches.

    A stage's parameters are needed once for all forwards and once for all backwards, and its gradients are complete
    early: little to gather and reduce where data-parallel ranks shard them.
    """
    count = spec.num_micro_batches
    placement = looped_placement(spec.num_ranks, spec.chunks)
    orders = []
    for rank in range(spec.num_ranks):
        stages = range(rank, spec.depth, spec.num_ranks)
        order = [Action(Kind.F, stage, index) for stage in stages for index in range(count)]
        order += [Action(Kind.B, stage, index) for stage in reversed(stages) for index in range(count)]
        orders.append(tuple(order))
    return Schedule("breadth-first", placement, count, tuple(orders))
