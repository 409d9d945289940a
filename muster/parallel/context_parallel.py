"""Context parallelism: each rank keeps some positions of every sequence, and attention sees those of all ranks.

The model knows of it at one seam, `Attention.attend`, which gets the queries, keys and values of this rank's positions;
linear attention has the same seam, behind which ranks exchange states. Everything else works on a position alone. A
kind of context parallelism is one class of a `ContextAxis` and a row of `muster.spec.context_kinds`; what it sends
stands in `muster.cost.context_traffic`, from which costs and counts of bytes are made.
"""

from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from muster.layout.context_parallel import kept_positions
from muster.model.attention import Attention
from muster.model.attention import attend as attend_alone
from muster.model.decoder import Decoder
from muster.model.documents import Documents
from muster.model.linear_attention import LinearAttention, StateExchange, chunked_recurrence
from muster.parallel.axis import ContextAxis
from muster.spec.context_kinds import CONTEXT_KINDS, ContextRanks

Attend = Callable[[Attention, tuple[Tensor, ...], Tensor | None, Documents | None, Tensor | None], Tensor]
"""Attention of queries, keys and values (B, H or K, S, d) of this rank's positions to those of all ranks, with sinks
(H) or None."""


def apply_context_parallel(module: Decoder, axis: ContextAxis, context: ContextRanks) -> None:
    """Let the attention of a stage see the positions of all context-parallel ranks, and its routers balance the load of
    whole sequences."""
    module.router_state.sum_counts = lambda counts_BE: axis.all_reduce(counts_BE).wait()
    row = CONTEXT_KINDS[context.kind]
    attend: Attend = _load(row.attention)(axis)
    exchange: StateExchange | None = None if row.states is None else _load(row.states)(axis)
    # Without a ring the model's own attention sees whole sequences, with its mask.
    module.position_state.makes_masks = context.ring == 1
    for part in module.modules():
        if isinstance(part, Attention):
            part.attend = attend  # type: ignore[method-assign]
        if isinstance(part, LinearAttention):
            part.attend = partial(_attend_with_states, exchange)  # type: ignore[method-assign]


def _load(place: str) -> Any:
    """Return the class at a place such as `cp_ring:RingAttention`."""
    file, name = place.split(":")
    return getattr(import_module(f"muster.parallel.{file}"), name)


def _attend_with_states(
    exchange: StateExchange,
    attention: LinearAttention,
    qkv: tuple[Tensor, ...],
    logits: Tensor | None,
    documents: Documents | None,
) -> Tensor:
    return chunked_recurrence(exchange, qkv, logits, documents)


def apply_context_groups(module: Decoder, blocks: Mapping[int, ContextAxis]) -> None:
    """Let attention see the positions of the group of ranks that a micro-batch's documents are cut over (`cpdyn`);
    without `blocks` it stays as it is."""
    if not blocks:
        return
    kind = _load(CONTEXT_KINDS["p2p"].attention)
    by_size: dict[int, Attend] = {size: kind(axis) for size, axis in blocks.items()}

    def attend(
        attention: Attention,
        qkv: tuple[Tensor, ...],
        mask: Tensor | None,
        documents: Documents | None,
        sinks_H: Tensor | None,
    ) -> Tensor:
        size = None if documents is None else documents.num_shards
        of_group = attend_alone if size == 1 else by_size[size or max(by_size)]
        return of_group(attention, qkv, mask, documents, sinks_H)

    for part in module.modules():
        if isinstance(part, Attention):
            part.attend = attend  # type: ignore[method-assign]


def keep_group_positions(module: Decoder, documents: Documents, length: int) -> None:
    """Tell a stage that its next pass is of `length` positions of documents that a group of ranks shares."""
    state = module.position_state
    assert documents.num_shards is not None
    state.whole_length, state.positions_S = length * documents.num_shards, None
    state.makes_masks = documents.num_shards == 1


def keep_positions(module: Decoder, axis: ContextAxis, length: int, device: torch.device) -> None:
    """Tell a stage which positions its next pass is of, where this rank keeps `length` of each sequence."""
    state = module.position_state
    state.whole_length = length * axis.size
    state.positions_S = _position_index(state.whole_length, axis.size, axis.index, axis.is_contiguous, device)


@lru_cache(maxsize=64)
def _position_index(length: int, cp: int, index: int, is_contiguous: bool, device: torch.device) -> Tensor:
    runs = kept_positions(length, cp, index, is_contiguous)
    return torch.tensor([position for run in runs for position in run], device=device)
