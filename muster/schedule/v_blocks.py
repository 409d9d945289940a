"""V-Min, V-Half and V-ZB: one micro-batch's building block, repeated (Qi et al. 2024, arXiv:2405.15362)."""

from dataclasses import replace
from itertools import product

from muster.schedule.action import Kind, actions_of_stage
from muster.schedule.bubble_fill import run_ready_first
from muster.schedule.building_blocks import BlockRow, repeat_block
from muster.schedule.place_weight_grads import place_weight_grads
from muster.schedule.schedule import Schedule
from muster.schedule.schedule_spec import ScheduleSpec
from muster.schedule.search_problem import make_search_problem, pass_codes, rank_orders, schedule_from_passes
from muster.schedule.timing import time_schedule
from muster.spec.stage_placement import wave_placement

_KINDS = (Kind.F, Kind.F, Kind.I, Kind.I, Kind.W, Kind.W)
"""Kinds of a building block's passes, in the order of `building_blocks`."""
_PLACEMENT_OPTIONS = ((1, 0), (0.5, 3))
"""(patience, overtake) of `place_weight_grads` to try."""
_LARGE_PROBLEM = 1000
"""Passes of a problem beyond which F are not moved for the sake of delays: that takes longest."""


def v_min(spec: ScheduleSpec) -> Schedule:
    """About a third of 1F1B's activations, two thirds of its bubble; sensitive to delays and unequal times."""
    p = spec.num_ranks
    gap = 2 if p % 3 == 0 else 0
    return _repeat_and_fill("v-min", spec, [(r, 2 * p - 1 - r, 2 * p + gap + r, 4 * p + gap - 1 - r) for r in range(p)])


def v_half(spec: ScheduleSpec) -> Schedule:
    """About half of 1F1B's activations, p/2 + 1, and less than half of its bubble."""
    p = spec.num_ranks
    gap = 3 if p % 2 == 0 else 0
    rows = [(2 * r, 3 * p - 2 - r, 3 * p + gap - 1 + 2 * r, 6 * p + gap - 2 - r) for r in range(p)]
    return _repeat_and_fill("v-half", spec, rows)


def v_zb(spec: ScheduleSpec) -> Schedule:
    """1F1B's activations, p, and no bubble between a rank's first and last action."""
    p = spec.num_ranks
    rows = [(5 * r, 6 * p - 5 - r, 6 * p - 4 + 5 * r, 12 * p - 9 - r) for r in range(p)]
    return _repeat_and_fill("v-zb", spec, rows)


def _repeat_and_fill(name: str, spec: ScheduleSpec, rows: list[BlockRow]) -> Schedule:
    """Return the shortest order of a block that fits the memory, as it is or filled."""

    def rating(schedule: Schedule) -> tuple[bool, float, float]:
        timing = time_schedule(schedule, spec)
        peak = max(timing.peak_activation)
        return peak > spec.memory_limit, timing.makespan_s, peak

    orders = repeat_block(rows, spec.num_micro_batches)
    return min((_fill(_schedule_of(name, spec, kinds), spec) for kinds in orders), key=rating)


def _fill(plain: Schedule, spec: ScheduleSpec) -> Schedule:
    """Return an order as it is, or with W (and a few F and I) moved to where ranks idle under the spec's times.

    The shortest of these within the same memory is taken.
    """
    timing = time_schedule(plain, spec)
    if max(timing.peak_activation) > spec.memory_limit:
        return plain
    problem = make_search_problem(replace(spec, memory_limit=max(timing.peak_activation)), plain.placement)
    bases = [plain]
    if spec.p2p_s and problem.num_passes < _LARGE_PROBLEM:
        bases.append(run_ready_first(plain, spec, problem.capacity))
    lines = [rank_orders(problem, pass_codes(problem, base)) for base in bases]
    best, best_s = None, timing.makespan_s
    for line, way in product(lines, _PLACEMENT_OPTIONS):
        run = place_weight_grads(problem, line, *way, best_s)
        if run is not None and (best is None or run.makespan_s < best_s):
            best, best_s = run, run.makespan_s
    return plain if best is None else schedule_from_passes(problem, best.passes, plain.name)


def _schedule_of(name: str, spec: ScheduleSpec, kinds: list[list[int]]) -> Schedule:
    """Return the schedule with such orders of kinds, each kind for its next micro-batch."""
    p, count = spec.num_ranks, spec.num_micro_batches
    orders = []
    for rank, own in enumerate(kinds):
        far = 2 * p - 1 - rank
        stages = (rank, far, far, rank, far, rank)
        passes = [iter(actions_of_stage(kind, stage, count)) for kind, stage in zip(_KINDS, stages, strict=True)]
        orders.append(tuple(next(passes[kind]) for kind in own))
    return Schedule(name, wave_placement(p, 2), count, tuple(orders))
