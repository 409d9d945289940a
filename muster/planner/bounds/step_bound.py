"""Lower bounds of a step from the work of each pipeline rank.

They hold for any order of passes, so that a plan with a bound above a simulated time can't be the best. Three things
are certain of a pipeline rank:

1. It begins when the first micro-batch has come through the stages before its first one.
2. It then runs all its passes, one after another.
3. After its last backward the gradient goes back to the first stage, whose weights are reduced and updated last.

Example: 2 ranks, 4 micro-batches, forwards of 1 s and backwards of 2 s without transfers. Rank 1 waits 1 s for the
first forward, runs 4 · 3 s, and rank 0 ends 2 s later with the last backward: no order takes less than 15 s.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from muster.planner.bounds.pass_times import Column, LayerTimes, PassTimes
from muster.planner.space import ScheduleChoice
from muster.spec.plan import Plan, split_evenly
from muster.spec.schedules import SCHEDULES, stage_placement


def step_bound_s(plan: Plan, times: PassTimes, micro_batches: Sequence[int], added_s: Column | float = 0.0) -> float:
    """Return the seconds that a step takes at least.

    `micro_batches`: their number for each replica. `added_s`: further seconds of each pipeline rank for each
    micro-batch before its last backward, at least.
    """
    depth = plan.stages_per_replica
    longest_s = 0.0
    all_cores_s = 0.0
    for replica, count in enumerate(micro_batches):
        stages = slice(replica * depth, (replica + 1) * depth)
        ranks, firsts, nexts = _ranks_of(plan.placement[stages])
        forward, inputs, weights = times.forward_s[stages], times.backward_s[stages], times.weight_backward_s[stages]
        head = times.unshard_s[replica] + np.cumsum(times.forward_transfer_s[stages] + forward) - forward
        back = times.reduce_grad_s[replica] + np.cumsum(times.backward_transfer_s[stages] + inputs) - inputs
        begin = head[firsts]
        if nexts is not None:
            # Until a micro-batch arrives at its second stage, a rank can only run forwards of its first.
            begin = np.maximum(
                begin, head[nexts] - max_warmup_forwards(plan.schedule, plan.pp, count) * forward[firsts]
            )
        # The last pass is a weight backward, or a backward whose gradient has to go back to the first stage.
        after = np.maximum(count * np.bincount(ranks, weights), back[firsts] + weights[0])
        ends = begin + count * (np.bincount(ranks, forward + inputs) + added_s) + after
        all_cores_s += count * float(np.sum(times.core_load[stages] * (forward + inputs + weights)))
        longest_s = max(longest_s, float(np.max(ends)))
    return max(longest_s + times.per_step_s, all_cores_s)


@lru_cache(maxsize=4096)
def max_warmup_forwards(schedule: str, pp: int, micro_batches: int) -> Column:
    """Return, for each rank, the most forwards of its first stage before any other pass; all where nothing is known."""
    warmup_forwards = SCHEDULES[schedule].planner.warmup_forwards
    if warmup_forwards is None:
        return np.full(pp, float(micro_batches))
    return np.array([float(warmup_forwards(rank, pp, micro_batches)) for rank in range(pp)])


@lru_cache(maxsize=1024)
def _ranks_of(placement: tuple[int, ...]) -> tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.intp] | None]:
    """Return the rank of each stage, numbered among those present; the first stage of each rank; and the second, where
    every rank has one."""
    _, firsts, ranks = np.unique(np.array(placement), return_index=True, return_inverse=True)
    again = np.ones(len(placement), bool)
    again[firsts] = False
    others, index = np.unique(np.array(placement)[again], return_index=True)
    return ranks, firsts, np.flatnonzero(again)[index] if len(others) == len(firsts) else None


def choice_bound_s(
    times: LayerTimes, choice: ScheduleChoice, num_layers: int | None, micro_batches: int, transfer_s: float = 0.0
) -> float:
    """Return the seconds that the passes of any plan of a choice take at least.

    `num_layers`: layers of the model; None where they differ, so that nothing is known of one layer. `transfer_s`: a
    transfer between ranks, there and back.

    With x_r the time of rank r for one micro-batch, its last pass ends after the forwards before it, its own passes,
    and (where backwards are whole) the backwards of the same stages, and the transfers between:

        Σ_{s<r} (ρ·x_s + h) + m·x_r

    ρ is the part of x that stands before and after, h that of transfers. Whatever the layers of each rank, the largest
    of these sums is least where all equal one T:

        x_r = T·a_r − h·c_r with a_0 = 1/m, c_0 = 0, a_{r+1} = a_r·(1 − ρ/m), c_{r+1} = c_r·(1 − ρ/m) + 1/m

    So Σ x_r = X gives T. Some rank has at least the mean number of layers, rounded up. Where layers lie evenly, each
    rank has its layers to do after those before its first stage.
    """
    pp = choice.shape.pp
    m = micro_batches
    total_s = times.whole_forward_s + times.whole_backward_s
    if pp == 1:
        return m * total_s
    entry = SCHEDULES[choice.schedule]
    splits = entry.split_backward
    if num_layers is None:
        known = choice.vpp == 1 and not splits and not entry.searched and entry.default_replicas == 1
        return _balanced_bound_s(total_s, pp, m, transfer_s) if known else m * total_s / pp
    layer_s = times.layer_forward_s + times.layer_backward_s
    if choice.vpp == 1 and choice.balances_layers:
        share = times.layer_forward_s / layer_s if splits else 1.0
        # Embedding and head divide into forward and backward otherwise than layers: the smaller share is safe.
        whole = times.whole_forward_s / total_s if splits else 1.0
        least_s = _balanced_bound_s(total_s, pp, m, (1 if splits else 2) * transfer_s / 2, min(share, whole))
        return max(least_s, m * -(-num_layers // pp) * layer_s)
    if entry.searched or entry.default_replicas > 1:
        return m * total_s / pp
    before, held = _layers_before_and_held(num_layers, stage_placement(entry, pp, choice.vpp))
    before_s = times.layer_forward_s + (0.0 if splits else times.layer_backward_s)
    return max(m * total_s / pp, float(np.max(before * before_s + m * layer_s * held)))


def _balanced_bound_s(total_s: float, pp: int, m: int, transfer_s: float, share: float = 1.0) -> float:
    """Return the T of `choice_bound_s`; `share`: its ρ."""
    kept = 1 - share / m
    if kept >= 1:
        return 0.0
    each = (1 - kept**pp) / (1 - kept)
    return (m * total_s + 2 * transfer_s * (pp - each) / (1 - kept)) / each


@lru_cache(maxsize=4096)
def _layers_before_and_held(num_layers: int, placement: tuple[int, ...]) -> tuple[Column, Column]:
    """Return the layers before each rank's first stage, and those that it holds, where layers lie evenly on stages."""
    ranks, firsts, _ = _ranks_of(placement)
    counts = np.array(split_evenly(num_layers, len(placement)), float)
    return (np.cumsum(counts) - counts)[firsts], np.bincount(ranks, counts).astype(float)
