"""BitPipe: two V-shaped pipelines in opposite directions (Wu et al. 2024, arXiv:2410.19367; the orders are those of
github.com/wuhouming/BitPipe)."""

from muster.schedule.action import Action, Kind
from muster.schedule.replicas import require_even_ranks, split_micro_batches
from muster.schedule.schedule import Schedule
from muster.schedule.schedule_spec import ScheduleSpec
from muster.spec.stage_placement import bidirectional_placement, wave_placement


def bitpipe(spec: ScheduleSpec) -> Schedule:
    """Two replicas with two stages per rank each, on an even number of ranks.

    Bubble (p − 2) tF (1 + (m/p − 1) / 2) if tB = 2 tF and m is a multiple of p; each further unit of p micro-batches
    adds to it. The order is made for whole units; passes of missing micro-batches are left out.
    """
    p = require_even_ranks("bitpipe", spec)
    count = spec.num_micro_batches
    ways = split_micro_batches(count)
    num_units = -(-len(ways[0]) // (p // 2))
    orders = []
    for rank in range(p):
        stages = ((rank, 2 * p - 1 - rank), (3 * p - 1 - rank, 3 * p + rank))
        own = int(rank >= p // 2)
        near = [(stages[way], ways[way]) for way in (own, 1 - own)]
        orders.append(_rank_order(min(rank, p - 1 - rank), p, num_units, near))
    return Schedule("bitpipe", bidirectional_placement(wave_placement(p, 2), p), count, tuple(orders), replicas=2)


def _rank_order(rank: int, p: int, num_units: int, ways: list[tuple[tuple[int, int], range]]) -> tuple[Action, ...]:
    """Return the order of the `rank`-th rank, counted from where its own direction begins.

    `ways` are its own direction and the other one, each as (first and second stage of the rank, micro-batches).
    """
    forwards = [step for unit in range(num_units) for step in _unit((0, 1), rank, p // 2, unit)]
    backwards = [step for unit in range(num_units) for step in _unit((1, 0), rank, p // 2, unit)]
    warm_up = 3 * p // 2 + rank
    pairs = 2 * p - warm_up
    alone = warm_up - pairs + 1
    both = (Kind.F, Kind.B)
    between = both * pairs + (Kind.B,) * alone + both * (pairs - 1) + (Kind.F,) * alone
    kinds = (Kind.F,) * warm_up + between * (num_units - 1) + both * pairs + (Kind.B,) * warm_up
    steps = {Kind.F: iter(forwards), Kind.B: iter(backwards)}
    order = []
    for kind in kinds:
        way, arm, index = next(steps[kind])
        stages, micro_batches = ways[way]
        if index < len(micro_batches):
            order.append(Action(kind, stages[arm], micro_batches[index]))
    return tuple(order)


def _unit(arms: tuple[int, int], rank: int, half: int, unit: int) -> list[tuple[int, int, int]]:
    """Return one unit's passes as (way, arm of the V, index); `arms` in the order in which they come."""
    early, late = arms
    lone = half - rank
    paired = rank
    own, other = 0, 1
    kinds = (
        [(own, early)] * lone
        + [(other, early), (own, early)] * paired
        + [(other, early), (other, late)] * lone
        + [(own, late), (other, late)] * paired
        + [(own, late)] * lone
    )
    done = dict.fromkeys(kinds, unit * half)
    steps = []
    for way, arm in kinds:
        steps.append((way, arm, done[way, arm]))
        done[way, arm] += 1
    return steps
