"""Hanayo: waves through several stages per rank (Liu et al. 2023, arXiv:2308.15762)."""

from muster.schedule.action import Action, Kind
from muster.schedule.bubble_fill import run_ready_first
from muster.schedule.schedule import Schedule
from muster.schedule.schedule_spec import ScheduleSpec
from muster.spec.errors import InfeasibleError
from muster.spec.stage_placement import wave_placement


def hanayo(spec: ScheduleSpec) -> Schedule:
    """W waves are 2W stages per rank; nothing has to be sent between two arms of a wave.

    A free rank runs what is ready: backwards before forwards, older micro-batches first. With one micro-batch per rank
    the bubble is about 2(p − 1) tF / W; it grows with their number.
    """
    if spec.chunks % 2:
        raise InfeasibleError(
            f"hanayo runs two stages per pipeline rank for each wave, got {spec.chunks};"
            f" the nearest that runs has {spec.chunks + 1}"
        )
    placement = wave_placement(spec.num_ranks, spec.chunks)
    count = spec.num_micro_batches
    orders = tuple(
        tuple(
            Action(kind, stage, index)
            for kind in (Kind.B, Kind.F)
            for index in range(count)
            for stage in reversed(range(spec.depth))
            if placement[stage] == rank
        )
        for rank in range(spec.num_ranks)
    )
    return run_ready_first(Schedule("hanayo", placement, count, orders), spec)
