"""The tensor-parallel ranks of a stage, and the collectives among them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

# PyTorch 2.13 warns of the older names on every run; 2.11 has no others.
all_gather_into_tensor = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_tensor = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass
class PendingTensor:
    """Communication under way."""

    works: Sequence[dist.Work | None]
    result: Callable[[], Tensor]

    def wait(self) -> Tensor:
        """Its result, when it is over."""
        for work in self.works:
            if work is not None:
                work.wait()
        return self.result()


@dataclass(frozen=True)
class PipelineAxis:
    """The ranks with which this one shares the words, one of each pipeline rank."""

    group: dist.ProcessGroup
    ranks: tuple[int, ...]
    """World ranks, by pipeline rank."""
    index: int


@dataclass
class TensorAxis:
    """The ranks that share each layer of this one, and how the hidden state lies on them."""

    group: dist.ProcessGroup
    size: int
    index: int
    sequence_parallel: bool
    """The hidden state between layers is cut along the sequence."""
    async_tp: bool = False
    """Where products follow a gathering or come before a scattering, the parts go round one by one meanwhile."""

    def all_reduce(self, x: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> PendingTensor:
        """All-reduce in place, begun."""
        return PendingTensor([dist.all_reduce(x, op, group=self.group, async_op=True)], lambda: x)

    def all_gather(self, x_BSD: Tensor) -> PendingTensor:
        """The sequence parts of all ranks, in order, begun: (B, S/t, D) → (B, S, D)."""
        parts = x_BSD.new_empty(self.size, *x_BSD.shape)
        work = all_gather_into_tensor(parts.flatten(0, 1), x_BSD.contiguous(), group=self.group, async_op=True)
        return PendingTensor([work], lambda: parts.transpose(0, 1).flatten(1, 2))

    def reduce_scatter(self, x_BSD: Tensor) -> PendingTensor:
        """This rank's sequence part of the sum over ranks, begun: (B, S, D) → (B, S/t, D)."""
        parts = x_BSD.unflatten(1, (self.size, -1)).transpose(0, 1).contiguous()
        own = torch.empty_like(parts[0])
        work = reduce_scatter_tensor(own, parts.flatten(0, 1), group=self.group, async_op=True)
        return PendingTensor([work], lambda: own)

    # ------------------------------------------------------------------------------------------------------------------
    # Part by part

    def ring_all_gather(self, x_BSD: Tensor) -> Iterator[tuple[int, Tensor]]:
        """The sequence parts of all ranks, this one's first, as (whose, part): a ring, in which the next part travels
        while the caller works on one."""
        part = x_BSD.contiguous()
        for step in range(self.size):
            next_part = self._ring_shift(part) if step + 1 < self.size else None
            yield (self.index - step) % self.size, part
            if next_part is not None:
                part = next_part.wait()

    def ring_reduce_scatter(self, partial_sum: Callable[[int], Tensor]) -> Tensor:
        """The sum over ranks of their `term(own index)`: a ring, in which a sum travels while the next term is made.

        `term(n)` is what this rank adds to the part of rank n, in memory of its own.
        """
        total = partial_sum((self.index - 1) % self.size)
        for step in range(2, self.size + 1):
            travelling = self._ring_shift(total)  # and `total` lives on until it is there
            total = partial_sum((self.index - step) % self.size).add_(travelling.wait())
        return total

    def _ring_shift(self, x: Tensor) -> PendingTensor:
        """Sends to the next rank what the one before sends here, begun."""
        received = torch.empty_like(x)
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, x, group=self.group, group_peer=(self.index + 1) % self.size),
                dist.P2POp(dist.irecv, received, group=self.group, group_peer=(self.index - 1) % self.size),
            ]
        )
        return PendingTensor(works, lambda: received)
