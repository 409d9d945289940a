"""Context parallelism by all-to-alls (Ulysses, arXiv:2309.14509; `cp4u`): positions are exchanged for heads.

Before attention each rank receives all positions of some heads, attends as one process does, and sends the results
back. Where there are fewer key/value heads than ranks, neighbours receive the same one, and its gradients are summed.

With more ranks than heads, groups of neighbours exchange them, and ranks of different groups that have the same heads
are a ring (USP, arXiv:2405.07719; `cp4u2`). The neighbours' positions together are what a rank of that ring keeps: an
early and a late chunk of the sequence.

Suffixes of tensors: C context-parallel ranks, B sequences, H heads of all kinds, s positions of this rank, S positions
of the whole sequence, d head width.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from muster.layout.context_parallel import chunk_places
from muster.model.attention import Attention, attend
from muster.model.documents import Documents
from muster.parallel.axis import ContextAxis
from muster.parallel.cp_ring import RingAttention

Attend = Callable[[Attention, tuple[Tensor, ...], Tensor | None, Documents | None, Tensor | None], Tensor]
"""Attention of queries, keys and values (B, H or K, S, d), with sinks (H) or None."""


class UlyssesAttention:
    """Attention of the positions of all ranks with this rank's share of the heads."""

    def __init__(self, axis: ContextAxis, attend: Attend = attend) -> None:
        self._axis, self._attend = axis, attend

    def __call__(
        self,
        attention: Attention,
        qkv: tuple[Tensor, ...],
        mask: Tensor | None,
        documents: Documents | None,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        """Return the output (B, H, s, d) of this rank's queries."""
        shares = [_heads_by_rank(x, self._axis.size) for x in qkv]
        sent_CBHsd = torch.cat(shares, dim=2)
        whole_BHSd = _in_order(_AllToAll.apply(self._axis, sent_CBHsd), dim=3)  # type: ignore[arg-type]
        qkv = whole_BHSd.split([x.shape[2] for x in shares], dim=1)
        own_H = None if sinks_H is None else sinks_H.unflatten(0, (self._axis.size, -1))[self._axis.index]
        out_BHSd = self._attend(attention, qkv, mask, documents, own_H)
        received_CBHsd = _AllToAll.apply(self._axis, _by_rank(out_BHSd, self._axis.size))
        return received_CBHsd.transpose(0, 1).flatten(1, 2)  # type: ignore[union-attr]


class UlyssesRingAttention(UlyssesAttention):
    """The same for the positions of a group of ranks, which meet those of other groups in a ring."""

    def __init__(self, axis: ContextAxis) -> None:
        assert axis.ulysses is not None
        super().__init__(axis.ulysses, RingAttention(axis.strided(axis.ulysses.size)))


def _heads_by_rank(x_BHsd: Tensor, ranks: int) -> Tensor:
    """Return the heads of each rank, (C, B, H / C, s, d); several ranks have the same one where there are fewer."""
    heads = x_BHsd.shape[1]
    if heads < ranks:
        x_BHsd = x_BHsd.repeat_interleave(ranks // heads, dim=1)
    return x_BHsd.unflatten(1, (ranks, -1)).transpose(0, 1)


def _in_order(x_CBHsd: Tensor, dim: int) -> Tensor:
    """Join the positions of all ranks in the order of the sequence: (B, H, S, d)."""
    halves = [rank.chunk(2, dim=dim - 1) for rank in x_CBHsd]
    return torch.cat([halves[rank][place] for rank, place in chunk_places(len(x_CBHsd))], dim=dim - 1)


def _by_rank(x_BHSd: Tensor, ranks: int) -> Tensor:
    """Return the positions that each rank keeps: (C, B, H, s, d)."""
    chunks = x_BHSd.chunk(2 * ranks, dim=2)
    return torch.stack([torch.cat((chunks[rank], chunks[-1 - rank]), dim=2) for rank in range(ranks)])


class _AllToAll(torch.autograd.Function):
    """Part n of the first dimension goes to rank n; in the backward the gradient goes the same way back."""

    @staticmethod
    def forward(ctx: Any, axis: ContextAxis, x_C: Tensor) -> Tensor:
        ctx.axis = axis
        return axis.all_to_all(x_C).wait()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        return None, ctx.axis.all_to_all(grads[0]).wait()
