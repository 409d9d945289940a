"""DualPipe and DualPipe-V: forwards of one direction beside backwards of the other (DeepSeek-V3, arXiv:2412.19437,
§3.2.1; the orders are those of github.com/deepseek-ai/DualPipe)."""

from collections import defaultdict

from muster.schedule.action import Action, Kind
from muster.schedule.replicas import require_even_ranks, split_micro_batches
from muster.schedule.schedule import Schedule
from muster.schedule.schedule_spec import ScheduleSpec
from muster.spec.stage_placement import bidirectional_placement, wave_placement


def dualpipe(spec: ScheduleSpec) -> Schedule:
    """Two replicas through an even number of ranks, in opposite directions.

    Bubble (p/2 − 1)(tF + tI − tW) where tI ≤ tF, from m = 2p on; p + 1 activations. The published (p/2 − 1)(tFB + tB −
    3 tW) is for ranks that run each forward and the following backward as one pass, to hide the collectives of one
    behind the other; they pass on the result of the forward later.
    """
    p = require_even_ranks("dualpipe", spec)
    count = spec.num_micro_batches
    ways = split_micro_batches(count)
    orders = []
    for rank in range(p):
        phases = [(rank, ways[0]), (2 * p - 1 - rank, ways[1])]
        near = phases if rank < p // 2 else phases[::-1]
        orders.append(_rank_order(min(rank, p - 1 - rank), p // 2, near))
    return Schedule("dualpipe", bidirectional_placement(tuple(range(p)), p), count, tuple(orders), replicas=2)


def dualpipe_v(spec: ScheduleSpec) -> Schedule:
    """DualPipe cut in half: one replica with two stages per rank, placed as a V.

    Bubble (p − 1)(tF + tI − tW) / 2 where tI ≤ tF, from m = 2p on; p + ½ activations.
    """
    p = spec.num_ranks
    all_of_them = range(spec.num_micro_batches)
    orders = [_rank_order(rank, p, [(rank, all_of_them), (2 * p - 1 - rank, all_of_them)]) for rank in range(p)]
    return Schedule("dualpipe-v", wave_placement(p, 2), spec.num_micro_batches, tuple(orders))


def _rank_order(rank: int, half: int, phases: list[tuple[int, range]]) -> tuple[Action, ...]:
    """Return the order of the `rank`-th of `half` ranks, counted from where a pipeline begins.

    A phase is a stage and its micro-batches; phase 0 is the direction, or the arm of the V, that begins nearer. The
    order is made for at least twice as many micro-batches as `half`; missing ones are left out.
    """
    count = max(2 * half, *(len(micro_batches) for _, micro_batches in phases))
    rest = half - 1 - rank
    near = rank + 1
    passes = (
        ["F0"] * (2 * rest)
        + ["F0", "F1"] * near
        + ["I1", "W", "F1"] * rest
        + ["F0", "B1", "F1", "B0"] * (count - 2 * half + near)
        + ["B1", "F1", "B0"] * rest
        + ["B1", "B0"] * (near // 2)
        + ["B1", "I0"] * (near % 2)
        + ["I1", "I0"] * (near // 2)
        + ["W", "I0"] * rest
        + ["W"] * near
    )
    done: dict[str, int] = defaultdict(int)
    """Number of forwards and backwards of each phase so far."""
    waiting: list[tuple[int, int]] = []
    """(phase, index) of the input backwards whose W come later."""
    order = []
    for name in passes:
        if name == "W":
            phase, index = waiting.pop(0)
        else:
            phase = int(name[1])
            key = name.replace("I", "B")
            index, done[key] = done[key], done[key] + 1
            if name[0] == "I":
                waiting.append((phase, index))
        stage, micro_batches = phases[phase]
        if index < len(micro_batches):
            order.append(Action(Kind(name[0]), stage, micro_batches[index]))
    return tuple(order)
