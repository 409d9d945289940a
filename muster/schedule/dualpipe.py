"""DualPipe and DualPipe-V: forwards of one direction beside backwards of the other (DeepSeek-V3, arXiv:2412.19437,
§3.2.1; the orders are those of github.com/deepseek-ai/DualPipe)."""

from collections import defaultdict
from collections.abc import Sequence

from muster.schedule.action import Action, Kind
from muster.schedule.replicas import require_even_ranks, split_micro_batches
from muster.schedule.schedule import Schedule
from muster.schedule.schedule_spec import ScheduleSpec
from muster.spec.stage_placement import bidirectional_placement, wave_placement


def dualpipe(spec: ScheduleSpec) -> Schedule:
    """Two replicas through an even number of ranks, in opposite directions.

    Bubble (p/2 − 1)(tF + tI − tW) where tI ≤ tF, from m = 2p on; p + 1 activations. With `spec.pair_share` a forward
    and the backward after it run as one in tFB, to hide the collectives of one behind the other: then the ranks in the
    middle, which have most of these pairs, idle for the published (p/2 − 1)(tFB + tB − 3 tW). A pair passes on the
    result of its forward later.
    """
    p = require_even_ranks("dualpipe", spec)
    count = spec.num_micro_batches
    ways = split_micro_batches(count)
    orders = []
    for rank in range(p):
        phases = [(rank, ways[0]), (2 * p - 1 - rank, ways[1])]
        near = phases if rank < p // 2 else phases[::-1]
        orders.append(_rank_order(min(rank, p - 1 - rank), p // 2, near))
    return _schedule("dualpipe", bidirectional_placement(tuple(range(p)), p), spec, orders, replicas=2)


def dualpipe_v(spec: ScheduleSpec) -> Schedule:
    """DualPipe cut in half: one replica with two stages per rank, placed as a V.

    Bubble (p − 1)(tF + tI − tW) / 2 where tI ≤ tF, from m = 2p on; p + ½ activations. In pairs, as in `dualpipe`, the
    last rank idles for (p − 1)(tFB + tB − 3 tW) / 2.
    """
    p = spec.num_ranks
    all_of_them = range(spec.num_micro_batches)
    orders = [_rank_order(rank, p, [(rank, all_of_them), (2 * p - 1 - rank, all_of_them)]) for rank in range(p)]
    return _schedule("dualpipe-v", wave_placement(p, 2), spec, orders)


RankOrder = tuple[tuple[Action, ...], set[Action]]
"""Passes of a rank, and the forwards among them that may run as one with the backward after them."""


def _schedule(
    name: str, placement: tuple[int, ...], spec: ScheduleSpec, orders: Sequence[RankOrder], replicas: int = 1
) -> Schedule:
    pairs = [pairs for _, pairs in orders] if spec.pair_share is not None else []
    ranks = tuple(order for order, _ in orders)
    return Schedule(name, placement, spec.num_micro_batches, ranks, replicas, pairs=frozenset[Action]().union(*pairs))


def _rank_order(rank: int, half: int, phases: list[tuple[int, range]]) -> RankOrder:
    """Return the order of the `rank`-th of `half` ranks, counted from where a pipeline begins.

    A phase is a stage and its micro-batches; phase 0 is the direction, or the arm of the V, that begins nearer. The
    order is made for at least twice as many micro-batches as `half`; missing ones are left out. The first forward and
    backward in the middle don't run as one: the rank next to it waits for the forward.
    """
    count = max(2 * half, *(len(micro_batches) for _, micro_batches in phases))
    rest = half - 1 - rank
    near = rank + 1
    both = ["F0&", "B1", "F1&", "B0"] * (count - 2 * half + near)
    if rest == 0:
        both[0] = "F0"
    passes = (
        ["F0"] * (2 * rest)
        + ["F0", "F1"] * near
        + ["I1", "W", "F1"] * rest
        + both
        + ["B1", "F1&", "B0"] * rest
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
    order: list[Action] = []
    pairs: set[Action] = set()
    before: Action | None = None
    """Forward of the pair whose backward is next."""
    for name in passes:
        if name == "W":
            phase, index = waiting.pop(0)
        else:
            phase = int(name[1])
            key = name[:2].replace("I", "B")
            index, done[key] = done[key], done[key] + 1
            if name[0] == "I":
                waiting.append((phase, index))
        stage, micro_batches = phases[phase]
        exists = index < len(micro_batches)
        if exists:
            order.append(Action(Kind(name[0]), stage, micro_batches[index]))
            if before is not None:
                pairs.add(before)
        before = order[-1] if exists and name.endswith("&") else None
    return tuple(order), pairs
