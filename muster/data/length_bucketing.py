"""Length bucketing: samples of similar length share a micro-batch, so that little is padding."""

import math
from dataclasses import dataclass

import numpy as np

from muster.spec.plan import Plan

LENGTH_MULTIPLE = 8
"""Divisor of every micro-batch's length, as matrix units prefer."""


@dataclass(frozen=True, eq=False)
class BucketedStep:
    """Samples of one step, sorted into micro-batches by length, the longest first."""

    samples_B: np.ndarray
    """Sample of the step that is read at each place of the step."""
    lengths_B: np.ndarray
    """Tokens of each sample of the step."""
    lengths_M: tuple[int, ...]
    """Positions of each micro-batch on all ranks and stages: its longest sample's, rounded up."""


def bucket_by_length(lengths_B: np.ndarray, plan: Plan, num_layers: int, seq_len: int) -> BucketedStep:
    """Assign the samples of a step to micro-batches: a pure function of the lengths and the plan.

    A micro-batch holds `plan.micro_batch_size` samples of each data-parallel rank of the first stage; micro-batch m of
    all of these ranks is padded to one length. The step's samples stay the same, only their places follow the plan.

    Example: lengths 3, 9, 30, 28 on two data-parallel ranks with micro_batch_size 1 become micro-batch 0 with 30 and
    28 (32 positions) and micro-batch 1 with 9 and 3 (16 positions).
    """
    counts = [len(plan.sample_range(rank, len(lengths_B))) for rank in range(plan.mesh(0).dp_size)]
    micro_batch_B = np.concatenate([np.arange(count) // plan.micro_batch_size for count in counts])
    samples_B = np.empty(len(lengths_B), np.int64)
    samples_B[np.argsort(micro_batch_B, kind="stable")] = np.argsort(-lengths_B, kind="stable")
    longest = np.zeros(int(micro_batch_B.max()) + 1, np.int64)
    np.maximum.at(longest, micro_batch_B, lengths_B[samples_B])
    multiple = _length_multiple(plan, num_layers)
    lengths_M = np.minimum(-(-longest // multiple) * multiple, seq_len)
    return BucketedStep(samples_B, lengths_B, tuple(lengths_M.tolist()))


def _length_multiple(plan: Plan, num_layers: int) -> int:
    """Return the divisor of a micro-batch's length, which context and sequence parallelism cut over ranks."""
    cut = [2 * mesh.sequence_shards if mesh.sequence_shards > 1 else 1 for mesh in plan.distinct_meshes]
    for stage in range(plan.num_stages):
        own_tokens = plan.uses_axis("ep") and plan.routes_own_tokens(plan.mesh(stage))
        if own_tokens or plan.strategy(plan.layers(stage, num_layers).start).sp:
            cut.append(plan.mesh(stage).sequence_shards * plan.mesh(stage).tp)
    return math.lcm(LENGTH_MULTIPLE, *cut, plan.sequence_slices * plan.slice_unit)
