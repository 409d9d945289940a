"""Versions of one stage's weights: an asynchronous pipeline makes a new one while micro-batches are under way.

Autograd saves a weight as the leaf that it is, and reads its values in the backward. So that a backward uses the
version of its forward (weight stashing: PipeDream, Narayanan et al. 2019, §3.3), a version that micro-batches still
need keeps its memory, the next one is made in new memory, and the leaf is given the memory of the version that a pass
uses. What passes have saved of a weight otherwise, such as a view, stays in the memory of its version.

Without stashing (pipelined backpropagation; A. Kosson et al., arXiv:2003.11666 §2) the optimizer changes the weights in
the memory that passes under way have saved, views included.

With weight prediction (the same paper, whose weight form this is), passes use w(t) + D (w(t) −
w(t − 1)) as version t: the weights that their gradients, D steps late, will be applied to, if updates go on as the last
one. They have memory of their own; the optimizer changes the weights themselves.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from muster.parallel.master_weights import master_weights


class WeightVersions:
    """Versions of the weights of a module that one rank holds whole.

    `local` are the tensors that the optimizer changes: always the newest version. Where passes compute in less than
    these tensors' precision, versions are of the copies that passes use.
    """

    def __init__(
        self, module: nn.Module, local: Mapping[str, Tensor], predicted_steps: float = 0.0, stashes: bool = True
    ) -> None:
        """`predicted_steps`: the steps by which the weights of passes are ahead of those that the optimizer changes;
        `stashes`: False where no older version is kept, so that backwards read the newest weights."""
        assert stashes or not predicted_steps, "predicted weights have memory of their own in each version"
        self._stashes = stashes
        self._masters = master_weights(module)
        self._leaves = list(module.parameters())
        self._newest = [parameter.data for parameter in self._leaves]
        self._local = {name: local[name] for name, _ in module.named_parameters()}
        self._predicted_steps = predicted_steps
        self._before: dict[str, Tensor] = {}
        """Weights before the update that is under way."""
        self.newest = 0
        self._kept: dict[int, list[Tensor]] = {}
        """Versions before the newest that backwards will use, by number."""
        self._in_flight: dict[int, int] = {}
        """Micro-batches between forward and backward → version."""

    def restart(self) -> None:
        """Number the weights anew, from 0, after a flush: no micro-batch is in flight, and passes use the weights that
        the optimizer changes."""
        assert not self._in_flight, "micro-batches are between forward and backward"
        self.newest = 0
        if self._predicted_steps and self._masters is None:
            self._newest = [tensor.data for tensor in self._local.values()]
            self._use(0)
        elif self._masters is not None:
            self._masters.free()

    def enter(self, micro_batch: int, version: int) -> None:
        """Let the weights be those of a version, for a forward or a backward of a micro-batch."""
        if self._stashes:
            self._in_flight[micro_batch] = version
            self._use(version)

    def leave(self, micro_batch: int) -> None:
        """Note that the backward of a micro-batch is over; a version that no other one needs is freed."""
        if not self._stashes:
            return
        version = self._in_flight.pop(micro_batch)
        self._use(self.newest)
        if version not in self._in_flight.values():
            self._kept.pop(version, None)

    def begin_update(self) -> None:
        """Begin the next version, with the values of the newest, which the optimizer is about to change."""
        self._use(self.newest)
        is_shared = self._masters is None and (not self._predicted_steps or self.newest == 0)
        if self._predicted_steps:
            self._before = {name: tensor.clone() for name, tensor in self._local.items()}
        if self.newest in self._in_flight.values():
            self._kept[self.newest] = self._newest
            if is_shared or self._masters is not None:
                self._newest = [tensor.clone() for tensor in self._newest]
            for local, tensor in zip(self._local.values(), self._newest, strict=True) if is_shared else ():
                local.data = tensor
        self.newest += 1
        self._use(self.newest)
        if self._masters is not None:
            self._masters.free()  # the next forward fills the copies anew

    def end_update(self) -> None:
        """End the version that `begin_update` began, after the optimizer's step: predict what passes use as it."""
        for name, before in self._before.items():
            weight = self._local[name]
            torch.add(weight, before.sub_(weight), alpha=-self._predicted_steps, out=before)
        if self._before and self._masters is None:
            self._newest = list(self._before.values())
            self._use(self.newest)
        elif self._masters is not None and self._before:
            self._masters.fill(self._before)
        elif self._masters is not None and not self._stashes:
            self._masters.refresh()  # in the memory that passes under way have saved
        self._before = {}

    @property
    def stashed_bytes(self) -> int:
        """Bytes of the versions before the newest."""
        return sum(tensor.nbytes for tensors in self._kept.values() for tensor in tensors)

    def _use(self, version: int) -> None:
        tensors = self._newest if version == self.newest else self._kept[version]
        for parameter, tensor in zip(self._leaves, tensors, strict=True):
            parameter.data = tensor
