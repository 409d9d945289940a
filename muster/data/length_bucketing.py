"""How samples of unequal lengths lie in the micro-batches of a step, so that little is padded."""

import math
from dataclasses import dataclass

import numpy as np

from muster.spec.plan import Plan

LENGTH_MULTIPLE = 8
"""Micro-batches are padded to a multiple of it, which matrix units want."""


@dataclass(frozen=True, eq=False)
class BucketedStep:
    """The samples of one step by length, the longest first, so that those of a micro-batch are alike on all ranks."""

    samples_B: np.ndarray
    """Which of the step's samples is read at each place of the step."""
    lengths_B: np.ndarray
    """Tokens of each of the step's samples."""
    lengths_M: tuple[int, ...]
    """Positions of each micro-batch, on all ranks and stages: those of its longest sample, rounded up."""


def bucket_by_length(lengths_B: np.ndarray, plan: Plan, num_layers: int, seq_len: int) -> BucketedStep:
    """A pure function of the lengths and the plan, which every rank finds for itself.

    A micro-batch holds `plan.micro_batch_size` samples of each data-parallel rank of the first stage; micro-batch m of
    all of these is padded to one length. The step's samples stay the same: only their places in it follow the plan.
    """
    counts = [len(plan.sample_range(rank, len(lengths_B))) for rank in range(plan.mesh(0).dp_size)]
    micro_batch_B = np.concatenate([np.arange(count) // plan.micro_batch_size for count in counts])
    samples_B = np.empty(len(lengths_B), np.int64)
    samples_B[np.argsort(micro_batch_B, kind="stable")] = np.argsort(-lengths_B, kind="stable")
    longest = np.zeros(int(micro_batch_B.max()) + 1, np.int64)
    np.maximum.at(longest, micro_batch_B, lengths_B[samples_B])
    parts = _length_multiple(plan, num_layers)
    lengths_M = np.minimum(-(-longest // parts) * parts, seq_len)
    return BucketedStep(samples_B, lengths_B, tuple(lengths_M.tolist()))


def _length_multiple(plan: Plan, num_layers: int) -> int:
    """What a micro-batch's length must be divisible by: where sequences are cut over tensor-parallel ranks, by them."""
    stages = range(plan.num_stages)
    cut = [plan.mesh(stage).tp for stage in stages if plan.strategy(plan.layers(stage, num_layers).start).sp]
    return math.lcm(LENGTH_MULTIPLE, *cut)
