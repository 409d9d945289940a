"""Temporary memory of a sliding window's bands of scores over a ring of ranks (`muster.model.block_attention`).

Under a window, a run of queries sees bands: of its own run's keys, and of the last keys of the run before, which come
from another rank. Where no fused kernel takes bands, their scores are in memory piece by piece.
"""

from typing import NamedTuple

from muster.cost.context_traffic import AttentionShape
from muster.cost.memory.kernel_workspace import KernelWorkspace
from muster.spec.context_kinds import ContextRanks

_INDEX_BYTES, _MASK_BYTES = 8, 3
"""Distances of queries and keys are int64; a mask of a window is made of two."""


class _Piece(NamedTuple):
    """Queries of one piece, in all sequences and heads, and the keys that they see together."""

    sequences: int
    heads: int
    head_dim: int
    queries: int
    keys: int

    def workspace(self, compute: int, master: int, backward: bool) -> int:
        """Return its bytes: scores and softmax, or scores and mask; in the backward also the softmax' gradient, in the
        compute dtype as well, and the terms of the gradients of queries, keys and values."""
        pairs, rows = self.queries * self.keys, self.sequences * self.heads
        masked = pairs * (rows * master + _INDEX_BYTES + _MASK_BYTES)
        copied = compute * (compute != master)
        if not backward:
            return max(masked, pairs * rows * (2 * master + copied))
        terms = 2 * (self.queries + self.keys) * rows * self.head_dim * compute
        return max(masked, pairs * rows * (3 * master + copied) + terms)


def has_bands(ranks: ContextRanks, shape: AttentionShape) -> bool:
    """Return True for a single ring whose ranks have runs of positions that are longer than the window."""
    is_ring = ranks.size > 1 and ranks.kind == "p2p" and ranks.ulysses == 1 and ranks.window == 1
    return is_ring and shape.window is not None and shape.window < _run_length(ranks, shape)


def band_workspace(
    ranks: ContextRanks, shape: AttentionShape, kernels: KernelWorkspace, compute: int, master: int, backward: bool
) -> int:
    """Return the temporary bytes of a ring's attention whose ranks see bands, with elements of `compute` and `master`
    bytes: the most of three moments, beside the output or the gradient of the queries.

    The rank's own bands come first, beside a block and the next one and, in the backward, its gradient. Between, most
    is under way: a block and the next one, its terms, its sum that arrives, the one that leaves and the own block's.
    Bands of keys of another rank come last, when no block arrives any more.
    """
    window, run = shape.window, _run_length(ranks, shape)
    assert window is not None
    own, other = 0, 0
    if not kernels.fused_bands:
        sequences = max(1, shape.tokens // (2 * run))
        each = sequences, shape.heads, shape.head_dim
        limit = kernels.attention_chunk_scores // (sequences * shape.heads)
        queries = max(1, min(window, limit // min(run, 2 * window)))
        own = _Piece(*each, queries, min(run, queries + window - 1)).workspace(compute, master, backward)
        keys = max(1, window - 1)
        other = _Piece(*each, max(1, min(window, limit // keys)), keys).workspace(compute, master, backward)
    block = shape.keys_and_values
    if not backward:
        summed = shape.queries * (master + compute * (compute != master))
        return summed + max(block * 2 * compute + own, block * compute + other)
    sums = 3 if ranks.ring == 2 else 4
    first = block * (2 * compute + master) + own
    between = block * ((1 if ranks.ring == 2 else 2) * compute + sums * master)
    last = block * (compute + (2 if ranks.ring == 2 else 4) * master) + other
    return shape.queries * master + max(first, between, last)


def _run_length(ranks: ContextRanks, shape: AttentionShape) -> int:
    """Return the positions of each of the two runs that a rank has of a sequence, in zigzag order."""
    return shape.seq_len // (2 * ranks.size)
