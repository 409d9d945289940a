"""Breadth-first: all micro-batches through a rank's first stage, then through its next (Lamy-Poirier 2022,
arXiv:2211.05953)."""

from muster.schedule.action import Action
from muster.schedule.schedule import Schedule
from muster.schedule.setting import Setting
from muster.spec.placement import looped


def breadth_first(setting: Setting) -> Schedule:
    """Bubble (p − 1)(tF + tB) / v; every rank keeps the activations of all micro-batches.

    A stage's parameters are needed once for all forwards and once for all backwards, and its gradients are complete
    early: little to gather and to reduce where data-parallel ranks share them.
    """
    count = setting.num_micro_batches
    placement = looped(setting.num_ranks, setting.chunks)
    orders = []
    for rank in range(setting.num_ranks):
        stages = range(rank, setting.depth, setting.num_ranks)
        order = [Action("F", stage, index) for stage in stages for index in range(count)]
        order += [Action("B", stage, index) for stage in reversed(stages) for index in range(count)]
        orders.append(tuple(order))
    return Schedule("breadth-first", placement, count, tuple(orders))
