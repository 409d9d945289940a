"""V-Min, V-Half and V-ZB: one micro-batch's building block, repeated (Qi et al. 2024, arXiv:2405.15362)."""

from muster.schedule.action import Action
from muster.schedule.keep_busy import fill, overtake
from muster.schedule.schedule import Schedule
from muster.schedule.setting import Setting
from muster.spec.placement import waves

PERIOD = 6
"""Slots from one block to the next: F, I and W of both of a rank's stages."""


def v_min(setting: Setting) -> Schedule:
    """About a third of 1F1B's activations, two thirds of its bubble; sensitive to delays and unequal times."""
    p = setting.num_ranks
    gap = 2 if p % 3 == 0 else 0
    return _repeated("v-min", setting, [(r, 2 * p - 1 - r, 2 * p + gap + r, 4 * p + gap - 1 - r) for r in range(p)])


def v_half(setting: Setting) -> Schedule:
    """About half of 1F1B's activations, p/2 + 1, and less than half of its bubble."""
    p = setting.num_ranks
    gap = 3 if p % 2 == 0 else 0
    rows = [(2 * r, 3 * p - 2 - r, 3 * p + gap - 1 + 2 * r, 6 * p + gap - 2 - r) for r in range(p)]
    return _repeated("v-half", setting, rows)


def v_zb(setting: Setting) -> Schedule:
    """1F1B's activations, p, and no bubble between a rank's first and last action."""
    p = setting.num_ranks
    rows = [(5 * r, 6 * p - 5 - r, 6 * p - 4 + 5 * r, 12 * p - 9 - r) for r in range(p)]
    return _repeated("v-zb", setting, rows)


def _repeated(name: str, setting: Setting, rows: list[tuple[int, int, int, int]]) -> Schedule:
    orders = [_order(rank, row, setting) for rank, row in enumerate(rows)]
    placement = waves(setting.num_ranks, 2)
    schedule = Schedule(name, placement, setting.num_micro_batches, tuple(orders))
    limit = max(map(_peak, orders))
    return fill(overtake(schedule, setting, limit), setting, limit)


def _order(rank: int, row: tuple[int, int, int, int], setting: Setting) -> tuple[Action, ...]:
    far = 2 * setting.num_ranks - 1 - rank
    passes = (("F", rank), ("F", far), ("I", far), ("I", rank))
    slots = {
        PERIOD * index + start: Action(kind, stage, index)
        for (kind, stage), start in zip(passes, row, strict=True)
        for index in range(setting.num_micro_batches)
    }
    order: list[Action] = []
    pending: list[Action] = []
    for slot in range(max(slots) + 1):
        if action := slots.get(slot):
            order.append(action)
            if action.kind == "I":
                pending.append(action._replace(kind="W"))
        elif pending:
            order.append(pending.pop(0))
    return (*order, *pending)


def _peak(order: tuple[Action, ...]) -> int:
    kept = peak = 0
    for action in order:
        kept += {"F": 1, "W": -1}.get(action.kind, 0)
        peak = max(peak, kept)
    return peak
