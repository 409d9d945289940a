"""The ranks that share matrices, and how they hand parts of them to each other."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from muster.layout.mesh import coordinates_of
from muster.parallel.world import World

T = TypeVar("T")


@dataclass(frozen=True)
class PeerGroup:
    """The ranks that hold the same stages and together one whole copy of them. All of them call `swap` at once."""

    world: World | None
    ranks: tuple[int, ...]
    """World ranks, rising. The n-th of them is member n."""
    member: int
    """Which member this rank is."""

    @classmethod
    def from_world(cls, world: World | None) -> "PeerGroup":
        """This rank's peers: the same stages, the same replica. None stands for a process alone."""
        if world is None:
            return cls(None, (0,), 0)
        at = [coordinates_of(world.plan, rank) for rank in range(world.size)]
        own = (world.at.pp, world.at.dp_replicate)
        ranks = tuple(rank for rank in range(world.size) if (at[rank].pp, at[rank].dp_replicate) == own)
        return cls(world, ranks, ranks.index(world.rank))

    @property
    def device(self) -> torch.device:
        """Where this rank's tensors lie."""
        return self.world.device if self.world else torch.device("cpu")

    def all_gather_object(self, value: T) -> list[T]:
        """Every member's `value`, by member. All ranks of the world must call it; for small things only."""
        values = self.world.all_gather_object(value) if self.world else [value]
        return [values[rank] for rank in self.ranks]

    def all_to_all(self, sends: Sequence[Tensor], receives: Sequence[Tensor]) -> None:
        """Sends `sends[n]` to member n, and fills `receives[n]` with what member n sends here.

        All are contiguous and of one dtype. Empty ones are left out, on both sides.
        """
        receives[self.member].copy_(sends[self.member])
        operations = [
            dist.P2POp(operation, tensor, rank)
            for operation, tensors in ((dist.isend, sends), (dist.irecv, receives))
            for rank, tensor in zip(self.ranks, tensors, strict=True)
            if tensor.numel() and rank != self.ranks[self.member]
        ]
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()
