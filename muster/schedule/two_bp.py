"""2BP: GPipe and 1F1B with split backwards and deferred W (Rae et al. 2024, arXiv:2405.18047)."""

from muster.schedule.action import Kind
from muster.schedule.bubble_fill import fill_bubbles
from muster.schedule.gpipe import gpipe
from muster.schedule.one_f_one_b import one_f_one_b
from muster.schedule.schedule import Schedule
from muster.schedule.schedule_spec import ScheduleSpec


def two_bp_gpipe(spec: ScheduleSpec) -> Schedule:
    """Bubble (p − 1)(tF + tI); every rank keeps the activations of all micro-batches."""
    return _split_backwards("2bp-gpipe", gpipe(spec), spec)


def two_bp_1f1b(spec: ScheduleSpec) -> Schedule:
    """Bubble (p − 1)(tF + tI) and the activations of all m micro-batches with W at the end; (p − 1)(tF + tI − tW)
    where W fills the slots in which a rank would wait."""
    return _split_backwards("2bp-1f1b", one_f_one_b(spec), spec)


def _split_backwards(name: str, whole: Schedule, spec: ScheduleSpec) -> Schedule:
    """Return the schedule with each B split into I and W, with all W last or, with `fill`, where a rank would idle."""
    orders = []
    for order in whole.ranks:
        inputs = [action._replace(kind=Kind.I) if action.kind == Kind.B else action for action in order]
        orders.append((*inputs, *(action._replace(kind=Kind.W) for action in order if action.kind == Kind.B)))
    schedule = Schedule(name, whole.placement, whole.num_micro_batches, tuple(orders))
    return fill_bubbles(schedule, spec) if spec.fill else schedule
