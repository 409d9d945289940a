"""FlexSP's steps before its integer program: micro-batches by memory, and buckets of lengths (arXiv:2412.01523 §4).

Both are exact. The paper finds the cuts of sorted sequences into micro-batches by a dynamic program; a bisection over
the largest micro-batch finds the same optimum.
"""

from collections.abc import Sequence

import numpy as np


def cut_by_positions(sizes: Sequence[int], count: int) -> list[range]:
    """Return at most `count` runs of consecutive items, whose largest sum of sizes is as small as can be ("sequence
    blaster", §4.2)."""
    low, high = max(sizes, default=0), sum(sizes)
    while low < high:
        middle = (low + high) // 2
        if len(_runs(sizes, middle)) <= count:
            high = middle
        else:
            low = middle + 1
    return _runs(sizes, low)


def _runs(sizes: Sequence[int], limit: int) -> list[range]:
    """Return runs of items whose sums are at most `limit`, each as long as can be."""
    runs, start, held = [], 0, 0
    for index, size in enumerate(sizes):
        if held + size > limit and index > start:
            runs.append(range(start, index))
            start, held = index, 0
        held += size
    return [*runs, range(start, len(sizes))] if sizes else []


def bucket_lengths(lengths: Sequence[int], count: int) -> list[list[int]]:
    """Return the indices of sequences in at most `count` buckets of neighbouring lengths, so that the positions by
    which they are shorter than the longest of their bucket are as few as can be (§4.3).

    err[k][q] = min over j of err[j][q − 1] + Σ (length k − length i) for i in j + 1 … k, over distinct lengths.
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    values, first = np.unique(np.array([lengths[index] for index in order]), return_index=True)
    ends = np.array([*first, len(order)])
    sums = np.concatenate(([0], np.cumsum([lengths[index] for index in order])))[ends]
    kinds, count = len(values), min(count, len(values))
    # cost[j, k]: rows of the distinct lengths j … k − 1 in one bucket.
    errors = np.full((count + 1, kinds + 1), np.inf)
    errors[0, 0] = 0
    cuts = np.zeros((count + 1, kinds + 1), int)
    for bucket in range(1, count + 1):
        for k in range(1, kinds + 1):
            added = values[k - 1] * (ends[k] - ends[:k]) - (sums[k] - sums[:k])
            total = errors[bucket - 1, :k] + added
            cuts[bucket, k] = int(total.argmin())
            errors[bucket, k] = total.min()
    buckets, k = [], kinds
    for bucket in range(count, 0, -1):
        j = int(cuts[bucket, k])
        buckets.append(order[ends[j] : ends[k]])
        k = j
    return buckets[::-1]
