"""ZB-H1 and ZB-H2: weight backwards put where a rank would wait (Qi et al. 2023, arXiv:2401.10241, §2)."""

from muster.schedule.action import Action, Kind
from muster.schedule.schedule import Schedule
from muster.schedule.schedule_spec import ScheduleSpec


def zb_h1(spec: ScheduleSpec) -> Schedule:
    """Bubble (p − 1)(tF + tI − tW) if tW ≤ tI, else (p − 1) tF; every rank keeps min(p, m) micro-batches."""
    p = spec.num_ranks
    return _handcrafted("zb-h1", spec, [(p - 1 - rank, rank, False) for rank in range(p)])


def zb_h2(spec: ScheduleSpec) -> Schedule:
    """Bubble (p − 1) tF if all times are equal, none of it between a rank's first and last action: the pipeline fills
    with 2p − 1 micro-batches, and the stairs at both ends vanish where steps overlap."""
    p = spec.num_ranks
    return _handcrafted("zb-h2", spec, [(2 * (p - rank) - 1, 2 * rank, True) for rank in range(p)])


def _handcrafted(name: str, spec: ScheduleSpec, rows: list[tuple[int, int, bool]]) -> Schedule:
    """Return the schedule of these rows: per rank, the number of warm-up forwards, the number of I before the first W,
    and True if a backward comes first in each round after the warm-up."""
    count = spec.num_micro_batches
    orders = []
    for rank, (warm_up, delay, backward_first) in enumerate(rows):
        order = [Action(Kind.F, rank, index) for index in range(min(warm_up, count))]
        for index in range(count):
            forward = [Action(Kind.F, rank, warm_up + index)] if warm_up + index < count else []
            backward = [Action(Kind.I, rank, index)] + ([Action(Kind.W, rank, index - delay)] if index >= delay else [])
            order += backward + forward if backward_first else forward + backward
        order += [Action(Kind.W, rank, index) for index in range(max(0, count - delay), count)]
        orders.append(tuple(order))
    return Schedule(name, tuple(range(spec.num_ranks)), count, tuple(orders))
