"""ZB-V: zero bubble with two stages per rank placed as a V (Qi et al. 2023, arXiv:2401.10241, §6)."""

from collections import defaultdict

from muster.schedule.action import Action, Kind
from muster.schedule.schedule import Schedule
from muster.schedule.schedule_spec import ScheduleSpec
from muster.spec.stage_placement import wave_placement


def zb_v(spec: ScheduleSpec) -> Schedule:
    """Bubble (p − 1) tF / 2 if all times are equal, none of it between a rank's first and last action; every rank
    keeps p micro-batches. First and last stage lie on rank 0."""
    count, p = spec.num_micro_batches, spec.num_ranks
    orders = tuple(
        tuple(action for action in _rank_order(rank, p, max(2 * p - 1, count)) if action.micro_batch < count)
        for rank in range(p)
    )
    return Schedule("zb-v", wave_placement(p, 2), count, orders)


def _rank_order(rank: int, p: int, count: int) -> list[Action]:
    """Return the order for at least 2p − 1 micro-batches; leaving out missing ones only leaves gaps."""
    stages = (rank, 2 * p - 1 - rank)
    order = []
    done: dict[str, int] = defaultdict(int)

    def add(*passes: str) -> None:
        for name in passes:
            order.append(Action(Kind(name[0]), stages[int(name[1])], done[name]))
            done[name] += 1

    add(*["F0"] * (2 * (p - rank) - 1))
    add(*["F1", "F0"] * rank)
    add(*["F1", "I1", "W1"] * (p - rank))
    while done["F1"] < done["F0"] or done["F0"] < count:
        add(*["F0"] * (done["F0"] < count), "I0", "W0", "F1", "I1", "W1")
    add(*["I0", "I1"] * rank)
    add(*["I0", "W0"] * (p - rank))
    add(*["W1"] * (count - done["W1"]), *["W0"] * (count - done["W0"]))
    return order
