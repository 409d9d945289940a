"""Lower bounds of a plan's step time, from the times of its instructions alone.

They hold for whatever order a schedule chooses, so a plan whose bound is above a simulated time can't be the best.
Three things are certain of a pipeline rank: it can't begin before the first micro-batch has come through the stages
before its first one; it then has all its passes to do, one after another; and after its last backward the gradient
still has to go back to the first stage, whose weights are reduced and updated last.
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
    """Seconds that one step takes at least; `micro_batches`: those that run through each replica; `added_s`: what each
    pipeline rank takes more for each before its last backward, at least."""
    best, worked, depth = 0.0, 0.0, plan.stages_per_replica
    for replica, count in enumerate(micro_batches):
        own = slice(replica * depth, (replica + 1) * depth)
        ranks, firsts, nexts = _ranks_of(plan.placement[own])
        forward, inputs, weights = times.forward_s[own], times.backward_s[own], times.weight_backward_s[own]
        head = times.unshard_s[replica] + np.cumsum(times.forward_transfer_s[own] + forward) - forward
        back = times.reduce_grad_s[replica] + np.cumsum(times.backward_transfer_s[own] + inputs) - inputs
        begin = head[firsts]
        if nexts is not None:
            # Until a micro-batch comes to its next stage, a rank has no passes but forwards of its first.
            begin = np.maximum(
                begin, head[nexts] - max_warmup_forwards(plan.schedule, plan.pp, count) * forward[firsts]
            )
        # The last pass is a weight backward, or a backward whose gradient goes back to the first stage, to be used.
        after = np.maximum(count * np.bincount(ranks, weights), back[firsts] + weights[0])
        ends = begin + count * (np.bincount(ranks, forward + inputs) + added_s) + after
        worked += count * float(np.sum(times.core_load[own] * (forward + inputs + weights)))
        best = max(best, float(np.max(ends)))
    return max(best + times.per_step_s, worked)


@lru_cache(maxsize=4096)
def max_warmup_forwards(schedule: str, pp: int, micro_batches: int) -> Column:
    """Return, for each rank, the most forwards of its first stage before any other pass; all where nothing is known."""
    warmup_forwards = SCHEDULES[schedule].planner.warmup_forwards
    if warmup_forwards is None:
        return np.full(pp, float(micro_batches))
    return np.array([float(warmup_forwards(rank, pp, micro_batches)) for rank in range(pp)])


@lru_cache(maxsize=1024)
def _ranks_of(placement: tuple[int, ...]) -> tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.intp] | None]:
    """The rank of each stage, counted among those there are; the first stage of each, and the second where all have
    one."""
    _, firsts, ranks = np.unique(np.array(placement), return_index=True, return_inverse=True)
    again = np.ones(len(placement), bool)
    again[firsts] = False
    others, index = np.unique(np.array(placement)[again], return_index=True)
    return ranks, firsts, np.flatnonzero(again)[index] if len(others) == len(firsts) else None


def choice_bound_s(
    times: LayerTimes, choice: ScheduleChoice, num_layers: int | None, micro_batches: int, transfer_s: float = 0.0
) -> float:
    """Seconds that the passes of any plan of an order take at least, where a transfer between ranks takes `hop_s`.

    `num_layers`: those of the model, None where they differ: then nothing is known of a layer.

    With x_r the time of rank r for one micro-batch, its last pass ends after the forwards before it, its own passes,
    and (where backwards are whole) the backwards of the same stages, and the transfers between: Σ_{s<r} (ρ·x_s + h) +
    m·x_r, with ρ the part of x that stands before and after, h that of transfers. Whatever the layers of each rank, the
    largest of these is least where all are equal to one T: x_r = T·a_r − h·c_r with a_0 = 1/m, c_0 = 0, a_{r+1} =
    a_r·(1 − ρ/m), c_{r+1} = c_r·(1 − ρ/m) + 1/m, so that Σ x_r = X gives T. Some rank has at least the mean number of
    layers, rounded up. Where they lie evenly, each rank has its layers to do after those before its first stage.
    """
    pp, m = choice.shape.pp, micro_batches
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
        # Embedding and head are less evenly forward and backward than layers are, so the smaller share counts.
        whole = times.whole_forward_s / total_s if splits else 1.0
        least_s = _balanced_bound_s(total_s, pp, m, (1 if splits else 2) * transfer_s / 2, min(share, whole))
        return max(least_s, m * -(-num_layers // pp) * layer_s)
    if entry.searched or entry.default_replicas > 1:
        return m * total_s / pp
    before, held = _layers_before_and_held(num_layers, stage_placement(entry, pp, choice.vpp))
    before_s = times.layer_forward_s + (0.0 if splits else times.layer_backward_s)
    return max(m * total_s / pp, float(np.max(before * before_s + m * layer_s * held)))


def _balanced_bound_s(total_s: float, pp: int, m: int, transfer_s: float, share: float = 1.0) -> float:
    """The T of `order_bound_s`; `share`: its ρ."""
    kept = 1 - share / m
    if kept >= 1:
        return 0.0
    each = (1 - kept**pp) / (1 - kept)
    return (m * total_s + 2 * transfer_s * (pp - each) / (1 - kept)) / each


@lru_cache(maxsize=4096)
def _layers_before_and_held(num_layers: int, placement: tuple[int, ...]) -> tuple[Column, Column]:
    """Layers that lie before each rank's first stage, and those that it holds, where stages have as many as can be."""
    ranks, firsts, _ = _ranks_of(placement)
    counts = np.array(split_evenly(num_layers, len(placement)), float)
    return (np.cumsum(counts) - counts)[firsts], np.bincount(ranks, counts).astype(float)
