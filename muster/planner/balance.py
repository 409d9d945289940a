"""Numbers of layers for each stage, so that no pipeline rank has more to do than it must."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import heapify, heapreplace

import numpy as np

from muster.planner.bounds.pass_times import PassTimes
from muster.spec.plan import Plan, StageSpec


@dataclass(frozen=True, slots=True)
class RankLoad:
    """Seconds of one micro-batch on a pipeline rank: `fixed_s`, and `layer_s` for each of its layers."""

    fixed_s: float
    layer_s: float

    def seconds_with(self, layers: int) -> float:
        """Return the seconds with so many layers."""
        return self.fixed_s + layers * self.layer_s


def rank_loads(plan: Plan, num_layers: int, pass_times_of: Callable[[Plan], PassTimes]) -> list[RankLoad]:
    """Return the load of each pipeline rank, from the times of the plan and of one with a layer shifted on each rank.

    Exact where the layers of a model are alike.
    """
    counts = plan.layer_counts(num_layers)
    shifted = _one_layer_shifted(counts, plan.pp)
    seconds, shifted_seconds = (
        _rank_seconds(plan, pass_times_of(with_layers(plan, layers))) for layers in (counts, shifted)
    )
    found = []
    placement = plan.placement[: plan.stages_per_replica]
    held = [np.bincount(placement, layers, plan.pp).tolist() for layers in (counts, shifted)]
    for rank in range(plan.pp):
        before, after = (layers[rank] for layers in held)
        layer_s = (
            (shifted_seconds[rank] - seconds[rank]) / (after - before)
            if after != before
            else seconds[rank] / max(1, before)
        )
        found.append(RankLoad(seconds[rank] - before * layer_s, layer_s))
    return found


def min_busiest_rank_s(ranks: Sequence[RankLoad], num_layers: int) -> float:
    """Return the least time of the busiest rank over all numbers of layers, fractions included (bisection)."""
    low = 0.0
    high = max(load.seconds_with(num_layers) for load in ranks)
    for _ in range(60):
        middle = (low + high) / 2
        held = sum(
            max(0.0, (middle - load.fixed_s) / load.layer_s) if load.layer_s > 0 else num_layers for load in ranks
        )
        low, high = (low, middle) if held >= num_layers else (middle, high)
    return low


def balance_layers(
    plan: Plan, num_layers: int, pass_times_of: Callable[[Plan], PassTimes], visits: Sequence[int] = ()
) -> Plan | None:
    """Return the plan with layers assigned one by one to the rank that is done first with one more.

    No split has a lower busiest rank, since each layer takes the least time that is left. `visits`: the micro-batches
    of a step that each rank sees, where some skip it. None where the plan's own split is that one, or where layers
    can't be moved.
    """
    if plan.pp == 1 or num_layers < 2 * plan.stages_per_replica:
        return None
    loads = rank_loads(plan, num_layers, pass_times_of)
    if visits:
        loads = [
            RankLoad(load.fixed_s * count, load.layer_s * count) for load, count in zip(loads, visits, strict=True)
        ]
    placement = plan.placement[: plan.stages_per_replica]
    stages_of = [[stage for stage, holder in enumerate(placement) if holder == rank] for rank in range(plan.pp)]
    counts = [1] * plan.stages_per_replica
    held = [len(stages) for stages in stages_of]
    next_done = [(loads[rank].seconds_with(held[rank] + 1), -rank) for rank in range(plan.pp)]
    heapify(next_done)
    for _ in range(num_layers - plan.stages_per_replica):
        rank = -next_done[0][1]
        counts[min(stages_of[rank], key=lambda stage: (counts[stage], stage))] += 1
        held[rank] += 1
        heapreplace(next_done, (loads[rank].seconds_with(held[rank] + 1), -rank))
    if counts == plan.layer_counts(num_layers):
        return None
    return with_layers(plan, counts)


def with_layers(plan: Plan, counts: Sequence[int]) -> Plan:
    """Return the plan with so many layers on each stage."""
    return plan.model_copy(update={"stages": tuple(map(_stage, counts))})


@lru_cache(maxsize=1024)
def _stage(num_layers: int) -> StageSpec:
    return StageSpec(layers=num_layers)


def _one_layer_shifted(counts: Sequence[int], num_ranks: int) -> list[int]:
    """Return the numbers with one layer shifted between the first stages of each pair of ranks, where one has a layer
    to spare.

    The first stage of a rank has the rank's number, in looped as in V-shaped placements.
    """
    moved = list(counts)
    for giver in range(0, num_ranks, 2):
        taker = giver + 1 if giver + 1 < num_ranks else giver - 1
        if moved[giver] > 1 and taker >= 0:
            moved[giver] -= 1
            moved[taker] += 1
    return moved


def _rank_seconds(plan: Plan, seconds: PassTimes) -> list[float]:
    """Return the seconds of a micro-batch on each pipeline rank: its forwards and backwards."""
    return np.bincount(
        plan.placement[: plan.stages_per_replica], seconds.busy_s()[: plan.stages_per_replica], plan.pp
    ).tolist()
