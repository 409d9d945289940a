"""Exchange of tensors between the ranks that share matrices."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from muster.layout.matrix_owners import peer_ranks
from muster.parallel.world import World

T = TypeVar("T")


@dataclass(frozen=True)
class PeerGroup:
    """Ranks that hold the same stages and together one whole copy of them; all of them call `all_to_all` at once."""

    world: World | None
    ranks: tuple[int, ...]
    """World ranks in rising order; the n-th of them is member n."""
    member: int
    """Index of this rank among the members."""

    @classmethod
    def from_world(cls, world: World | None) -> "PeerGroup":
        """Return this rank's peers: those with the same stages in the same data-parallel replica. None: a single
        process."""
        if world is None:
            return cls(None, (0,), 0)
        ranks = peer_ranks(world.plan, world.at)
        return cls(world, ranks, ranks.index(world.rank))

    @property
    def device(self) -> torch.device:
        """Device of this rank's tensors."""
        return self.world.device if self.world else torch.device("cpu")

    def all_gather_object(self, value: T) -> list[T]:
        """Return every member's `value`, by member; all ranks of the world must call it. For small objects only."""
        values = self.world.all_gather_object(value) if self.world else [value]
        return [values[rank] for rank in self.ranks]

    def all_to_all(self, sends: Sequence[Tensor], receives: Sequence[Tensor]) -> None:
        """Send `sends[n]` to member n, and fill `receives[n]` with the tensor that member n sends here.

        All tensors are contiguous and of one dtype. Empty ones are left out, on both sides.
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
