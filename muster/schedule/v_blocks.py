"""V-Min, V-Half and V-ZB: one micro-batch's building block, repeated (Qi et al. 2024, arXiv:2405.15362)."""

from dataclasses import replace
from itertools import product

from muster.schedule.action import all_passes
from muster.schedule.blocks import Row, repeated
from muster.schedule.follow import follow
from muster.schedule.keep_busy import overtake
from muster.schedule.pipe import codes_of, orders_of, pipe_of, schedule_of
from muster.schedule.schedule import Schedule
from muster.schedule.setting import Setting
from muster.schedule.timing import time_schedule
from muster.spec.placement import waves

_WAYS = ((1, 0), (0.5, 3))
"""(patience, overtake) of `follow` that are tried."""
_LARGE = 1000
"""Passes from which on F are not moved for the sake of delays: that takes longest."""


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


def _repeated(name: str, setting: Setting, rows: list[Row]) -> Schedule:
    """The block's order as it is, or with W and a few I moved to where ranks wait under the setting's times: what ends
    first within the same memory."""
    p, count = setting.num_ranks, setting.num_micro_batches
    orders = []
    for rank, kinds in enumerate(repeated(rows, count)):
        far = 2 * p - 1 - rank
        stages = (rank, far, far, rank, far, rank)
        passes = [iter(all_passes(name, stage, count)) for name, stage in zip("FFIIWW", stages, strict=True)]
        orders.append(tuple(next(passes[kind]) for kind in kinds))
    plain = Schedule(name, waves(p, 2), count, tuple(orders))
    timing = time_schedule(plain, setting)
    if max(timing.peak_activation) > setting.memory_limit:
        return plain
    pipe = pipe_of(replace(setting, memory_limit=max(timing.peak_activation)), plain.placement)
    bases = [plain]
    if setting.hop_s and pipe.size < _LARGE:
        bases.append(overtake(plain, setting, pipe.capacity))
    lines = [orders_of(pipe, codes_of(pipe, base)) for base in bases]
    best, best_s = None, timing.makespan_s
    for line, way in product(lines, _WAYS):
        run = follow(pipe, line, *way, best_s)
        if run is not None and (best is None or run.makespan_s < best_s):
            best, best_s = run, run.makespan_s
    return plain if best is None else schedule_of(pipe, best.passes, name)
