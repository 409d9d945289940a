"""GPipe: every forward, then every backward (Huang et al. 2019, arXiv:1811.06965, §2.3)."""

from muster.schedule.action import Action, Kind
from muster.schedule.schedule import Schedule
from muster.schedule.schedule_spec import ScheduleSpec
from muster.schedule.slices import backward_units, forward_units


def gpipe(spec: ScheduleSpec) -> Schedule:
    """One stage per rank. Bubble (p − 1)(tF + tB), with n slices per sequence 1 / n of it; every rank keeps the
    activations of all micro-batches.

    Backwards run in ascending order of micro-batches, as in 1F1B, so that both sum gradients in the same order.
    """
    num_stages, units = spec.num_ranks, (spec.num_micro_batches, spec.num_slices)
    orders = ((Kind.F, forward_units), (Kind.B, backward_units))
    ranks = tuple(
        tuple(Action(kind, stage, *unit) for kind, of in orders for unit in of(*units)) for stage in range(num_stages)
    )
    return Schedule("gpipe", tuple(range(num_stages)), spec.num_micro_batches, ranks, num_slices=spec.num_slices)
