"""GPipe: every forward, then every backward (Huang et al. 2019, arXiv:1811.06965, §2.3)."""

from muster.schedule.action import Action, Kind
from muster.schedule.schedule import Schedule
from muster.schedule.schedule_spec import ScheduleSpec


def gpipe(spec: ScheduleSpec) -> Schedule:
    """One stage per rank. Bubble (p − 1)(tF + tB); every rank keeps the activations of all micro-batches.

    Backwards run in ascending order, as in 1F1B, so that both sum gradients in the same order.
    """
    num_stages, num_micro_batches = spec.num_ranks, spec.num_micro_batches
    ranks = tuple(
        tuple(Action(kind, stage, index) for kind in (Kind.F, Kind.B) for index in range(num_micro_batches))
        for stage in range(num_stages)
    )
    return Schedule("gpipe", tuple(range(num_stages)), num_micro_batches, ranks)
