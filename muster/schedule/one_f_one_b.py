"""1F1B: after a warm-up one forward, one backward in turn (Narayanan et al. 2021, arXiv:2104.04473, §2.2.1)."""

from muster.schedule.action import Action, Kind
from muster.schedule.schedule import Schedule
from muster.schedule.schedule_spec import ScheduleSpec


def one_f_one_b(spec: ScheduleSpec) -> Schedule:
    """One stage per rank. Bubble (p − 1)(tF + tB) as GPipe's; rank r keeps the activations of min(p − r, m)
    micro-batches. With one stage it is gradient accumulation."""
    num_stages, num_micro_batches = spec.num_ranks, spec.num_micro_batches
    ranks = tuple(_rank_order(stage, num_stages, num_micro_batches) for stage in range(num_stages))
    return Schedule("1f1b", tuple(range(num_stages)), num_micro_batches, ranks)


def _rank_order(stage: int, num_stages: int, num_micro_batches: int) -> tuple[Action, ...]:
    warm_up = min(num_stages - stage - 1, num_micro_batches)
    order = [Action(Kind.F, stage, index) for index in range(warm_up)]
    for index in range(num_micro_batches):
        if warm_up + index < num_micro_batches:
            order.append(Action(Kind.F, stage, warm_up + index))
        order.append(Action(Kind.B, stage, index))
    return tuple(order)
