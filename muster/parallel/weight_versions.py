"""Versions of one stage's weights: an asynchronous pipeline makes a new one while micro-batches are under way.

Autograd saves a weight as the leaf that it is, and reads its values in the backward. So that a backward uses the
version of its forward (weight stashing: PipeDream, Narayanan et al. 2019, §3.3), a version that micro-batches still
need keeps its memory, the next one is made in new memory, and the leaf is given the memory of the version that a pass
uses. What passes have saved of a weight otherwise, such as a view, stays in the memory of its version.
"""

from collections.abc import Mapping

from torch import Tensor, nn

from muster.parallel.master_weights import master_weights


class WeightVersions:
    """Versions of the weights of a module that one rank holds whole.

    `local` are the tensors that the optimizer changes: always the newest version. Where passes compute in less than
    these tensors' precision, versions are of the copies that passes use.
    """

    def __init__(self, module: nn.Module, local: Mapping[str, Tensor]) -> None:
        self._masters = master_weights(module)
        self._leaves = list(module.parameters())
        self._newest = [parameter.data for parameter in self._leaves]
        self._local = [local[name] for name, _ in module.named_parameters()] if self._masters is None else []
        self.newest = 0
        self._kept: dict[int, list[Tensor]] = {}
        """Versions before the newest that backwards will use, by number."""
        self._in_flight: dict[int, int] = {}
        """Micro-batches between forward and backward → version."""

    def restart(self) -> None:
        """Number the weights anew, from 0; no micro-batch is in flight."""
        assert not self._in_flight, "micro-batches are between forward and backward"
        self.newest = 0

    def enter(self, micro_batch: int, version: int) -> None:
        """Let the weights be those of a version, for a forward or a backward of a micro-batch."""
        self._in_flight[micro_batch] = version
        self._use(version)

    def leave(self, micro_batch: int) -> None:
        """Note that the backward of a micro-batch is over; a version that no other one needs is freed."""
        version = self._in_flight.pop(micro_batch)
        self._use(self.newest)
        if version not in self._in_flight.values():
            self._kept.pop(version, None)

    def begin_update(self) -> None:
        """Begin the next version, with the values of the newest, which the optimizer is about to change."""
        self._use(self.newest)
        if self.newest in self._in_flight.values():
            self._kept[self.newest] = self._newest
            self._newest = [tensor.clone() for tensor in self._newest]
            for local, tensor in zip(self._local, self._newest, strict=bool(self._local)):
                local.data = tensor
        self.newest += 1
        self._use(self.newest)
        if self._masters is not None:
            self._masters.free()  # the next forward fills the copies anew

    @property
    def stashed_bytes(self) -> int:
        """Bytes of the versions before the newest."""
        return sum(tensor.nbytes for tensors in self._kept.values() for tensor in tensors)

    def _use(self, version: int) -> None:
        tensors = self._newest if version == self.newest else self._kept[version]
        for parameter, tensor in zip(self._leaves, tensors, strict=True):
            parameter.data = tensor
