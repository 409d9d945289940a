"""Context-parallel attention in blocks of queries and keys: the part that is the same for all its kinds.

Suffixes of tensors: B sequences, H query heads, K key/value heads, s positions of one rank, d head width.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor

from muster.layout.context_parallel import AttentionBlock, attention_blocks, kept_positions, packed_blocks
from muster.model.attention import Attention
from muster.model.block_attention import score_rule
from muster.model.documents import Documents
from muster.parallel.axis import ContextAxis

BlocksByRank = tuple[tuple[AttentionBlock, ...], ...]
"""Blocks of this rank's queries and the keys of each rank, or of the queries of each rank and this rank's keys."""


class BlockAttention:
    """Attention of this rank's queries to the keys and values of all ranks, of one kind."""

    function: ClassVar[type[torch.autograd.Function]]
    """Function of the axis, queries (B, H, s, d), keys and values (B, K, s, d), what `blocks` returns, the rule of the
    scores, and the sinks (H) or None, which returns the output (B, H, s, d)."""

    def __init__(self, axis: ContextAxis) -> None:
        self._axis = axis

    def __call__(
        self,
        attention: Attention,
        qkv: tuple[Tensor, ...],
        mask: Tensor | None,
        documents: Documents | None,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        """Return the output (B, H, s, d) of this rank's queries."""
        blocks = self.blocks(self._axis, attention, qkv[0], documents)
        return self.function.apply(self._axis, *qkv, *blocks, score_rule(attention), sinks_H)  # type: ignore[return-value]

    def blocks(
        self, axis: ContextAxis, attention: Attention, q_BHsd: Tensor, documents: Documents | None
    ) -> tuple[Any, ...]:
        """Return the blocks that the function takes: those of this rank's queries and each rank's keys."""
        return (blocks_by_source(axis, attention, q_BHsd, documents),)


def blocks_by_source(
    axis: ContextAxis, attention: Attention, q_BHsd: Tensor, documents: Documents | None
) -> BlocksByRank:
    """Return the blocks of this rank's queries and each rank's keys."""
    if documents is not None and documents.num_shards is not None:
        own = documents.lengths, axis.size, axis.index
        return tuple(packed_blocks(*own, rank, attention.window) for rank in range(axis.size))
    length = q_BHsd.shape[2] * axis.size
    kept = [kept_positions(length, axis.size, rank) for rank in range(axis.size)]
    lengths = None if documents is None else documents.lengths
    return tuple(attention_blocks(length, kept[axis.index], keys, attention.window, lengths) for keys in kept)


def blocks_by_query_rank(
    axis: ContextAxis, attention: Attention, q_BHsd: Tensor, documents: Documents | None
) -> BlocksByRank:
    """Return the blocks of each rank's queries and this rank's keys."""
    length = q_BHsd.shape[2] * axis.size
    kept = [kept_positions(length, axis.size, rank) for rank in range(axis.size)]
    lengths = None if documents is None else documents.lengths
    return tuple(attention_blocks(length, queries, kept[axis.index], attention.window, lengths) for queries in kept)
