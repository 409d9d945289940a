"""1F1B: after a warm-up one forward, one backward in turn (Narayanan et al. 2021, arXiv:2104.04473, §2.2.1)."""

from muster.schedule.action import Action, Kind
from muster.schedule.schedule import Schedule
from muster.schedule.schedule_spec import ScheduleSpec
from muster.schedule.slices import backward_units, forward_units


def one_f_one_b(spec: ScheduleSpec) -> Schedule:
    """One stage per rank. Bubble (p − 1)(tF + tB) as GPipe's; rank r keeps the activations of min(p − r, m)
    micro-batches. With one stage it is gradient accumulation.

    With n slices per sequence, slices take turns as micro-batches do otherwise: bubble (p − 1)(tF + tB) / n, and rank r
    keeps p − r + n − 1 slices, since a micro-batch's first backward needs all of its forwards (Seq1F1B,
    arXiv:2406.03488).
    """
    num_stages = spec.num_ranks
    ranks = tuple(_rank_order(stage, spec) for stage in range(num_stages))
    return Schedule("1f1b", tuple(range(num_stages)), spec.num_micro_batches, ranks, num_slices=spec.num_slices)


def _rank_order(stage: int, spec: ScheduleSpec) -> tuple[Action, ...]:
    forwards = [Action(Kind.F, stage, *unit) for unit in forward_units(spec.num_micro_batches, spec.num_slices)]
    backwards = [Action(Kind.B, stage, *unit) for unit in backward_units(spec.num_micro_batches, spec.num_slices)]
    warm_up = min(spec.num_ranks - stage - 1 + spec.num_slices - 1, len(forwards))
    order = forwards[:warm_up]
    for index, backward in enumerate(backwards):
        order += [*forwards[warm_up + index : warm_up + index + 1], backward]
    return tuple(order)
