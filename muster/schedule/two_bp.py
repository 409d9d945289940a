"""2BP: GPipe and 1F1B with backwards in two parts, the weights' put off (Rae et al. 2024, arXiv:2405.18047)."""

from muster.schedule.gpipe import gpipe
from muster.schedule.keep_busy import fill
from muster.schedule.one_f_one_b import one_f_one_b
from muster.schedule.schedule import Schedule
from muster.schedule.setting import Setting


def two_bp_gpipe(setting: Setting) -> Schedule:
    """Bubble (p − 1)(tF + tI); every rank keeps the activations of all micro-batches."""
    return _split("2bp-gpipe", gpipe(setting), setting)


def two_bp_1f1b(setting: Setting) -> Schedule:
    """Bubble (p − 1)(tF + tI) and the activations of all m micro-batches with W at the end; (p − 1)(tF + tI − tW)
    where W fills the slots in which a rank would wait."""
    return _split("2bp-1f1b", one_f_one_b(setting), setting)


def _split(name: str, whole: Schedule, setting: Setting) -> Schedule:
    """Each B cut into I and W, the W all at the end or, if the setting says `fill`, where the rank would wait."""
    orders = []
    for order in whole.ranks:
        inputs = [action._replace(kind="I") if action.kind == "B" else action for action in order]
        orders.append((*inputs, *(action._replace(kind="W") for action in order if action.kind == "B")))
    schedule = Schedule(name, whole.placement, whole.num_micro_batches, tuple(orders))
    return fill(schedule, setting) if setting.fill else schedule
