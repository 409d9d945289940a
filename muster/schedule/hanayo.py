"""Hanayo: waves through several stages per rank (Liu et al. 2023, arXiv:2308.15762)."""

from muster.schedule.action import Action
from muster.schedule.keep_busy import overtake
from muster.schedule.schedule import Schedule
from muster.schedule.setting import Setting
from muster.spec.errors import InfeasibleError
from muster.spec.placement import waves


def hanayo(setting: Setting) -> Schedule:
    """W waves are 2W stages per rank; between two of a wave's arms nothing has to be sent.

    A rank that is free does what is ready in this order: backwards before forwards, the older micro-batch first. With
    one micro-batch per rank the bubble is about 2(p − 1) tF / W; it grows where there are several.
    """
    if setting.chunks % 2:
        raise InfeasibleError(
            f"hanayo runs two stages per pipeline rank for each wave, got {setting.chunks};"
            f" the nearest that runs has {setting.chunks + 1}"
        )
    placement, count = waves(setting.num_ranks, setting.chunks), setting.num_micro_batches
    orders = tuple(
        tuple(
            Action(kind, stage, index)
            for kind in "BF"
            for index in range(count)
            for stage in reversed(range(setting.depth))
            if placement[stage] == rank
        )
        for rank in range(setting.num_ranks)
    )
    return overtake(Schedule("hanayo", placement, count, orders), setting)
