"""Copies of the embedding's and the head's stage in the memory of the ranks beside them, for CheckFree+.

These stages have no layers, and no other stage is like them, so that nothing could take their place. The copy is of
parameters and optimizer state, and renewed after every step: unlike a stage with layers, a lost one is as it was.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from muster.layout.mesh import coordinates_of, rank_at
from muster.parallel.allocation_meter import host_memory
from muster.parallel.world import World


class EndStageCopy:
    """The end stage that this rank sends to the rank beside it after every step, or has from there."""

    def __init__(self, world: World, state: Mapping[str, Tensor]) -> None:
        """`state`: this rank's parameters and optimizer state, by stored name. All ranks call it."""
        plan, at = world.plan, coordinates_of(world.plan, world.rank)
        last = plan.num_stages - 1
        self._keeper = {0: 1, last: last - 1}.get(at.pp)
        self.stage = {1: 0, last - 1: last}.get(at.pp)
        """Stage of which this rank keeps a copy, if any."""
        self.num_updates = 0
        """Steps whose update the copy has seen."""
        self.tensors: Mapping[str, Tensor] = {}
        """The last copy that is whole; empty before the first one."""
        self._spare: dict[str, Tensor] = {}
        shapes = {name: (tuple(state[name].shape), state[name].dtype) for name in sorted(state)}
        described = world.all_gather_object(shapes if self._keeper is not None else {})
        if self._keeper is not None:
            self._peer = rank_at(plan, replace(at, pp=self._keeper))
        elif self.stage is not None:
            self._peer = rank_at(plan, replace(at, pp=self.stage))
            with host_memory():
                self._spare = {
                    name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in described[self._peer].items()
                }

    def renew(self, num_updates: int, state: Mapping[str, Tensor]) -> None:
        """Send this rank's state after so many updates, or receive that of the rank beside it; where that is cut short,
        the former copy stays."""
        if self._keeper is not None:
            for name in sorted(state):
                dist.send(state[name].contiguous(), self._peer)
        elif self.stage is not None:
            for tensor in self._spare.values():
                dist.recv(tensor, self._peer)
            former, self.tensors, self.num_updates = dict(self.tensors), self._spare, num_updates
            with host_memory():
                self._spare = former or {name: torch.empty_like(one) for name, one in self.tensors.items()}
