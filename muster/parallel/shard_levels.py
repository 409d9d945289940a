"""Sharding of parameters, gradients and optimizer state over groups of different sizes, under `fully_shard` (Frontier's
low-bandwidth partitioning, arXiv:2501.04266).

`fully_shard` shards everything over all ranks that share a stage's state, and lets its collectives be replaced. Here a
pass gathers parameters from copies that `param_shard_size` neighbours hold, made of all ranks' shards once a step; a
backward reduces gradients over `grad_shard_size` neighbours, whose sums are reduced to all ranks' shards once a step.
So layouts, optimizers and checkpoints are those of z3.

In a flat tensor of a group of parameters lie N chunks of c elements, the n-th of which is rank n's shard.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.functional import pad

from muster.layout.island_bytes import BLOCKS, Compression
from muster.parallel.axis import all_gather_into_tensor, reduce_scatter_tensor
from muster.parallel.island_exchange import decode, encode
from muster.spec.plan import Plan


@dataclass(frozen=True)
class ShardLevels:
    """This rank's groups among the ranks that share a stage's state."""

    params: dist.ProcessGroup | None
    """Neighbours that share a copy of the parameters; None: passes gather from all ranks."""
    grads: dist.ProcessGroup | None
    """Neighbours over which a backward reduces gradients; None: over all ranks."""
    between_grads: dist.ProcessGroup | None
    """Ranks of the same place in these groups, over which their sums are reduced once a step; None without them."""


class LeveledAllGather:
    """The all-gather of one group of parameters: from all ranks until `keep`, then from the copies of neighbours."""

    def __init__(self, levels: ShardLevels, compression: Compression) -> None:
        self._levels = levels
        self._compression: Compression = compression
        self._keeps = False
        self._copy: Tensor | None = None
        """This rank's part of the neighbours' copy of the parameters, [N c / P], in the dtype of the passes."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for what is gathered, as `fully_shard` asks for it."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        if self._copy is not None:
            return all_gather_into_tensor(output_tensor, self._copy, group=self._levels.params, async_op=async_op)
        if not self._keeps:
            return all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)
        assert self._levels.params is not None
        if self._compression == "none":
            all_gather_into_tensor(output_tensor, input_tensor, group=group)
        else:
            self._gather_rounded(output_tensor, input_tensor, group)
        parts = output_tensor.view(self._levels.params.size(), -1)
        self._copy = parts[self._levels.params.rank()].clone()
        return None

    def _gather_rounded(self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup) -> None:
        """Gather in few bits: every rank, the owner too, gets the same rounded parameters."""
        own = encode(_in_blocks(input_tensor, self._compression), self._compression)
        gathered = own.new_empty(group.size() * own.numel())
        all_gather_into_tensor(gathered, own, group=group)
        whole, count = output_tensor.view(group.size(), -1), input_tensor.numel()
        for chunk, encoded in zip(whole, gathered.view(group.size(), -1), strict=True):
            chunk.copy_(decode(encoded, self._compression, output_tensor.dtype)[:count])

    def keep(self) -> None:
        """Let the next gather keep this rank's part for those that follow."""
        self._keeps = self._levels.params is not None

    def drop(self) -> None:
        """Drop the copy: the parameters are about to change."""
        self._keeps, self._copy = False, None


class LeveledReduceScatter:
    """The reduce-scatter of one group's gradients: over neighbours, and, where it `is_due`, on to all ranks."""

    def __init__(self, levels: ShardLevels, compression: Compression) -> None:
        self._levels = levels
        self._compression: Compression = compression
        self.is_due = True
        self.sums: Tensor | None = None
        """Gradients that wait for the reduction to all ranks, [N c / G]: of the chunks of the ranks of this one's
        place in the groups of G neighbours."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for gradients, as `fully_shard` asks for it."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,  # of a private type: always the sum
        async_op: bool = False,
    ) -> None:
        near, far = self._levels.grads, self._levels.between_grads
        if near is None or far is None:
            reduce_scatter_tensor(output_tensor, input_tensor, op=op, group=group)
            return
        by_place = input_tensor.view(far.size(), near.size(), -1).transpose(0, 1).flatten()
        reduced = output_tensor.new_empty(far.size() * output_tensor.numel())
        reduce_scatter_tensor(reduced, by_place, op=op, group=near)
        del by_place
        if self.sums is not None:
            reduced += self.sums
        self.sums = None if self.is_due else reduced
        if not self.is_due:
            output_tensor.zero_()
        elif self._compression == "none":
            reduce_scatter_tensor(output_tensor, reduced, op=op, group=far)
        else:
            self._reduce_rounded(output_tensor, reduced, far)

    def _reduce_rounded(self, output_tensor: Tensor, reduced: Tensor, far: dist.ProcessGroup) -> None:
        """Send each rank its chunk in few bits, rounded once, and add up what arrives in full precision."""
        chunks = reduced.view(far.size(), -1)
        sent = torch.stack([encode(_in_blocks(chunk, self._compression), self._compression) for chunk in chunks])
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=far)
        output_tensor.zero_()
        for encoded in received:
            output_tensor += decode(encoded, self._compression, output_tensor.dtype)[: output_tensor.numel()]


def _in_blocks(values: Tensor, compression: Compression) -> Tensor:
    """Return values with zeros behind them that fill the last block with a scale."""
    return pad(values, (0, -values.numel() % BLOCKS[compression]))


class LeveledCollectives:
    """The collectives of all groups of a stage's parameters."""

    def __init__(self, levels: ShardLevels, plan: Plan) -> None:
        self._levels, self._plan = levels, plan
        self._gathers: list[tuple[FSDPModule, LeveledAllGather]] = []
        self._reductions: list[LeveledReduceScatter] = []

    def attach(self, part: FSDPModule) -> None:
        """Replace the collectives of a module's own parameters."""
        if self._levels.params is not None:
            gather = LeveledAllGather(self._levels, self._plan.quantized_weights)
            self._gathers.append((part, gather))
            part.set_custom_all_gather(gather)  # type: ignore[arg-type] -- has the methods of torch's base class
        if self._levels.grads is not None:
            reduction = LeveledReduceScatter(self._levels, self._plan.quantized_gradients)
            self._reductions.append(reduction)
            part.set_custom_reduce_scatter(reduction)  # type: ignore[arg-type]

    @property
    def keeps_copies(self) -> bool:
        """True if passes gather parameters from copies of neighbours."""
        return bool(self._gathers)

    def make_copies(self) -> None:
        """Gather one group of parameters after another from all ranks, and keep this rank's part of the neighbours'
        copy of each."""
        for part, gather in self._gathers:
            gather.keep()
            part.unshard()
            part.reshard()

    def drop_copies(self) -> None:
        """Drop the copies, which the parameters are about to differ from."""
        for _, gather in self._gathers:
            gather.drop()

    def set_due(self, is_due: bool) -> None:
        """Let the next backward reduce to all ranks' shards what it and those before it have summed."""
        for reduction in self._reductions:
            reduction.is_due = is_due

    def drop_sums(self) -> None:
        """Drop the gradients that wait for this."""
        for reduction in self._reductions:
            reduction.sums = None

    @property
    def sum_bytes(self) -> int:
        """Bytes of the gradients that wait for this."""
        return sum(one.sums.nbytes for one in self._reductions if one.sums is not None)


def leveled_collectives(module: nn.Module) -> LeveledCollectives | None:
    """Return the collectives of a stage that shards over groups of different sizes."""
    return getattr(module, "leveled_collectives", None)
