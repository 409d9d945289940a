"""Tensor, context and pipeline axes of the mesh: groups of ranks, and the asynchronous collectives over them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from muster.parallel.turns import Turns

# PyTorch 2.13 warns of the older names on every run; 2.11 has no others.
all_gather_into_tensor = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_tensor = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

TpOverlap = Literal["none", "ring", "symmetric_memory"]
"""Overlap of tensor-parallel collectives with the matmuls beside them: none; chunks that travel in a ring; or chunks
that ranks copy out of each other's symmetric memory."""


@dataclass
class PendingTensor:
    """A tensor that communication under way will fill."""

    works: Sequence[dist.Work | None]
    result: Callable[[], Tensor]
    turns: Turns | None = None
    """Turns of this pass and another one, which computes before this one waits."""

    def wait(self) -> Tensor:
        """Wait until the communication has finished and return the tensor."""
        if self.turns is not None:
            self.turns.hand_over()
        for work in self.works:
            if work is not None:
                work.wait()
        return self.result()


@dataclass(frozen=True)
class PipelineAxis:
    """Ranks with one member on each pipeline rank, over which the vocabulary is sharded."""

    group: dist.ProcessGroup
    ranks: tuple[int, ...]
    """World ranks in the order of their pipeline ranks."""
    index: int


@dataclass(frozen=True)
class IslandAxis:
    """Ranks of the same place in all islands, which hold the same parts of the parameters."""

    group: dist.ProcessGroup
    everyone: dist.ProcessGroup
    """All ranks of all islands."""
    size: int
    """Number of islands."""
    index: int


def _ring_shift(
    group: dist.ProcessGroup, index: int, size: int, x: Tensor, first: int = 0, stride: int = 1, hops: int = 1
) -> PendingTensor:
    """Start to send `x` to the rank of a ring that is some hops on and to receive the tensor of the rank as far before.

    The result keeps `x` alive until it is waited for.
    """
    received = torch.empty_like(x)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, x, group=group, group_peer=first + (index + hops) % size * stride),
            dist.P2POp(dist.irecv, received, group=group, group_peer=first + (index - hops) % size * stride),
        ]
    )
    return PendingTensor(works, lambda _sent=x: received)


@dataclass(frozen=True)
class ContextAxis:
    """Context-parallel ranks, each of which keeps some positions of the same sequences."""

    group: dist.ProcessGroup
    size: int
    index: int
    first: int = 0
    """Rank in the group of this axis' first rank."""
    stride: int = 1
    """Distance of its neighbours in the group."""
    ulysses: "ContextAxis | None" = None
    """Part of it that exchanges positions for heads with this rank, where only a part does."""
    is_contiguous: bool = False
    """Each rank keeps consecutive positions."""
    window: int = 1
    """Ranks of each inner ring where its ring is a double one, else 1."""
    second_group: dist.ProcessGroup | None = None
    """The same ranks once more, for the outer one of two rings or for what travels against a ring: sends in it don't
    wait for those in the other group."""

    def strided(self, stride: int) -> "ContextAxis":
        """Return the ranks whose distance from this one is a multiple of `stride`. They share its group, in which
        they can send; for collectives they would need one of their own."""
        return replace(
            self,
            size=self.size // stride,
            index=self.index // stride,
            first=self.first + self.stride * (self.index % stride),
            stride=self.stride * stride,
            ulysses=None,
        )

    def rings(self) -> "tuple[ContextAxis, ContextAxis]":
        """Return the inner ring of this rank and its outer one, which has one rank of each inner ring; without a
        `window` this rank alone is an inner ring, and the outer one has all ranks."""
        inner_index, first = (
            self.index % self.window,
            self.first + self.stride * (self.index - self.index % self.window),
        )
        inner = replace(self, size=self.window, index=inner_index, first=first, window=1)
        group = self.group if self.window == 1 else self.second_group or self.group
        return inner, replace(self.strided(self.window), group=group, window=1)

    def all_reduce(self, x: Tensor) -> PendingTensor:
        """Start an in-place sum over the ranks."""
        return PendingTensor([dist.all_reduce(x, group=self.group, async_op=True)], lambda: x)

    def all_gather(self, x: Tensor) -> PendingTensor:
        """Start to all-gather a tensor of the same shape from every rank: (…) → (ranks, …)."""
        gathered = x.new_empty(self.size, *x.shape)
        work = all_gather_into_tensor(gathered.flatten(0, 1), x.contiguous(), group=self.group, async_op=True)
        return PendingTensor([work], lambda: gathered)

    def reduce_scatter(self, x: Tensor) -> PendingTensor:
        """Start to sum over the ranks a tensor with a part for each: (ranks, …) → this rank's part of the sum (…)."""
        local = torch.empty_like(x[0])
        work = reduce_scatter_tensor(local, x.contiguous().flatten(0, 1), group=self.group, async_op=True)
        return PendingTensor([work], lambda: local)

    def all_to_all(self, x: Tensor) -> PendingTensor:
        """Start to exchange a tensor with a part for each rank for one with a part of each, in order: (ranks, …)."""
        received = torch.empty_like(x, memory_format=torch.contiguous_format)
        work = dist.all_to_all_single(received, x.contiguous(), group=self.group, async_op=True)
        return PendingTensor([work], lambda: received)

    def ring_shift(self, x: Tensor, hops: int = 1) -> PendingTensor:
        """Start to send a contiguous tensor to the next rank of the ring, or to one some hops on, and to receive that
        of the rank as far before."""
        return _ring_shift(self.group, self.index, self.size, x, self.first, self.stride, hops)

    def send_on(self, x: Tensor, hops: int) -> PendingTensor:
        """Start to send a contiguous tensor to the rank some hops on (before this one where negative)."""
        peer = self.first + (self.index + hops) * self.stride
        return PendingTensor([dist.isend(x, group=self.group, group_dst=peer)], lambda: x)

    def receive(self, like: Tensor, hops: int) -> PendingTensor:
        """Start to receive a tensor of the same shape from the rank some hops before."""
        received, peer = torch.empty_like(like), self.first + (self.index - hops) * self.stride
        return PendingTensor([dist.irecv(received, group=self.group, group_src=peer)], lambda: received)

    def second_ring(self) -> "ContextAxis":
        """Return the same ranks with the other group, whose sends don't wait for those of this one."""
        return replace(self, group=self.second_group or self.group)


@dataclass(frozen=True)
class ExpertAxis:
    """Expert-parallel ranks, each of which has some of a layer's experts."""

    group: dist.ProcessGroup
    size: int
    index: int
    inner: "ExpertAxis | None" = None
    """Neighbours among which the first step of a hierarchical exchange goes."""
    outer: "ExpertAxis | None" = None
    """Ranks with the same place in other groups of neighbours."""
    turns: Turns | None = None
    """Turns that this rank's passes take; None where they never run as one with another."""

    def exchange(self, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Exchange rows as `all_to_all` does; while they travel, the other pass of a pair computes."""
        pending = self.start_all_to_all(x, sent, received)
        if self.turns is not None:
            self.turns.hand_over()
        return pending.wait()

    def all_to_all(self, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Exchange rows: `sent` of them go to each rank, `received` come from each, both in the ranks' order."""
        return self.start_all_to_all(x, sent, received).wait()

    def start_all_to_all(self, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> PendingTensor:
        """Start to exchange rows as `all_to_all` does; the result keeps `x` alive until it is waited for."""
        x, y = x.contiguous(), x.new_empty(sum(received), *x.shape[1:])
        work = dist.all_to_all_single(y, x, list(received), list(sent), group=self.group, async_op=True)
        return PendingTensor([work], lambda _sent=x: y)

    def all_gather(self, x: Tensor) -> Tensor:
        """Return the rows of all ranks in their order: (N, …) → (ranks · N, …)."""
        y = x.new_empty(self.size * len(x), *x.shape[1:])
        all_gather_into_tensor(y, x.contiguous(), group=self.group)
        return y

    def reduce_scatter(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Return this rank's part of the sum over the ranks, in `out` if it is given: (ranks · N, …) → (N, …)."""
        y = x.new_empty(len(x) // self.size, *x.shape[1:]) if out is None else out
        reduce_scatter_tensor(y, x.contiguous(), group=self.group)
        return y


@dataclass
class TensorAxis:
    """Tensor-parallel ranks of this one, and the layout of the hidden state over them."""

    group: dist.ProcessGroup
    size: int
    index: int
    sequence_parallel: bool
    """The hidden state between layers is sharded along the sequence (sequence parallelism)."""
    overlap: TpOverlap = "none"
    """Overlap of all-gathers before and reduce-scatters after a linear layer with its matmuls (async TP)."""
    turns: Turns | None = None
    """Turns of two slices of a micro-batch, or of the two passes of a pair, each of which computes while the other one
    waits; None where a pass waits for its own collectives."""
    has_slices: bool = False
    """Micro-batches are computed in two slices (`muster.parallel.domino`)."""

    def all_reduce(self, x: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> PendingTensor:
        """Start an in-place all-reduce."""
        return PendingTensor([dist.all_reduce(x, op, group=self.group, async_op=True)], lambda: x, self.turns)

    def all_gather(self, x_BSD: Tensor) -> PendingTensor:
        """Start to all-gather the ranks' shards of the sequence: (B, S/t, D) → (B, S, D)."""
        shards = x_BSD.new_empty(self.size, *x_BSD.shape)
        work = all_gather_into_tensor(shards.flatten(0, 1), x_BSD.contiguous(), group=self.group, async_op=True)
        return PendingTensor([work], lambda: shards.transpose(0, 1).flatten(1, 2), self.turns)

    def reduce_scatter(self, x_BSD: Tensor) -> PendingTensor:
        """Start to reduce-scatter along the sequence: (B, S, D) → this rank's shard of the sum, (B, S/t, D)."""
        shards = x_BSD.unflatten(1, (self.size, -1)).transpose(0, 1).contiguous()
        local = torch.empty_like(shards[0])
        work = reduce_scatter_tensor(local, shards.flatten(0, 1), group=self.group, async_op=True)
        return PendingTensor([work], lambda: local, self.turns)

    # ------------------------------------------------------------------------------------------------------------------
    # Shard by shard, in a ring

    def ring_all_gather(self, x_BSD: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield the sequence shards of all ranks as (rank index, shard), this rank's first.

        The shards travel in a ring: the next one is received while the caller works on the last. On rank 1 of 4 they
        come in the order 1, 0, 3, 2.
        """
        shard = x_BSD.contiguous()
        for step in range(self.size):
            next_shard = _ring_shift(self.group, self.index, self.size, shard) if step + 1 < self.size else None
            yield (self.index - step) % self.size, shard
            if next_shard is not None:
                shard = next_shard.wait()

    def ring_reduce_scatter(self, partial_sum: Callable[[int], Tensor]) -> Tensor:
        """Return this rank's shard of a sum over ranks, `Σ partial_sum(this rank's index)`, by a reduce-scatter in a
        ring.

        `partial_sum(n)` is this rank's term of rank n's shard, in fresh memory. A partial sum travels while the next
        term is computed: the sum for rank n starts on rank n + 1, and every rank on the way adds its term.
        """
        total = partial_sum((self.index - 1) % self.size)
        for step in range(2, self.size + 1):
            travelling = _ring_shift(
                self.group, self.index, self.size, total
            )  # `total` must stay alive until the transfer has finished
            total = partial_sum((self.index - step) % self.size).add_(travelling.wait())
        return total
