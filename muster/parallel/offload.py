"""What a stage's forwards keep, in the host's memory until their backwards need it.

Autograd keeps its tensors; it is their storages that are emptied, once copied, and filled again in place. So whatever
else points at the same memory (a view, the stage's input, a gradient that waits) goes and comes back with it, and each
storage is copied once, however many tensors lie in it.
"""

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor, nn

from muster.model.saved_tensors import observe_saved_tensors

Storages = dict[int, torch.UntypedStorage]
"""By what tells storages apart."""
OffloadedStorages = list[tuple[torch.UntypedStorage, Tensor]]
"""Emptied storages, each with the host's copy."""


class HostBufferPool:
    """Buffers on the host that are used again and again; pinned where the device is a GPU, so that copies run beside
    its kernels."""

    def __init__(self, pinned: bool) -> None:
        self._pinned = pinned
        self._free: dict[int, list[Tensor]] = {}
        self.num_bytes = 0
        """Of all buffers there are."""

    def acquire(self, size: int) -> Tensor:
        """A buffer of `size` bytes."""
        if free := self._free.get(size):
            return free.pop()
        self.num_bytes += size
        return torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned)

    def release(self, buffer: Tensor) -> None:
        """For the next one who takes as much."""
        self._free.setdefault(buffer.numel(), []).append(buffer)


class ActivationOffload:
    """The storages that one stage's micro-batches keep between forward and backward, and where they are."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.pool = HostBufferPool(device.type == "cuda")
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._saved_in_forward: Storages = {}
        self._resident: dict[int, Storages] = {}
        """Of each micro-batch that has had its forward, what can leave."""
        self._offloaded: dict[int, OffloadedStorages] = {}
        """Of each micro-batch that is away."""
        self.copied_bytes = 0
        """Copied so far, both ways."""

    def track_layer(self, layer: nn.Module) -> None:
        """What this layer's forwards keep can leave."""
        layer.forward = partial(self._forward, layer, layer.forward)  # type: ignore[method-assign]

    def _forward(self, layer: nn.Module, forward: Callable[..., Tensor], x: Tensor, *shared: object) -> Tensor:
        if not torch.is_grad_enabled():
            return forward(x, *shared)
        seen: Storages = {}

        def see(tensor: Tensor) -> None:
            if tensor.is_floating_point() and tensor.device.type == self._device.type:
                storage = tensor.untyped_storage()
                seen[storage._cdata] = storage

        with observe_saved_tensors(see):
            y = forward(x, *shared)
        # Parameters are gathered still; constants belong to all micro-batches. Documents hold whole numbers only.
        _exclude(seen, (*layer.parameters(), *(one for one in shared if isinstance(one, Tensor))))
        self._saved_in_forward |= seen
        return y

    def end_forward(self, micro_batch: int, output: Tensor) -> None:
        """Names what was seen in the forward of a micro-batch. Its output is on its way to others."""
        self._resident[micro_batch], self._saved_in_forward = self._saved_in_forward, {}
        _exclude(self._resident[micro_batch], (output,))

    def discard(self, micro_batch: int) -> None:
        """Before a backward, which frees each tensor when it has used it."""
        self._resident.pop(micro_batch, None)

    def offload(self, micro_batch: int) -> Callable[[], None]:
        """Begins to copy to the host. What is returned frees the device's memory, for what the device does from then
        on."""
        storages = list(self._resident.pop(micro_batch).values())
        away = [(storage, self.pool.acquire(storage.nbytes())) for storage in storages]
        self._offloaded[micro_batch] = away
        wait = self._copy(away, to_host=True)

        def finish() -> None:
            wait()
            for storage, _ in away:
                storage.resize_(0)

        return finish

    def reload(self, micro_batch: int) -> Callable[[], None]:
        """Takes the device's memory again and begins to copy back; what is returned waits for that."""
        away = self._offloaded.pop(micro_batch)
        for storage, buffer in away:
            storage.resize_(buffer.numel())
        wait = self._copy(away, to_host=False)

        def finish() -> None:
            wait()
            for _, buffer in away:
                self.pool.release(buffer)
            away.clear()

        return finish

    def _copy(self, away: OffloadedStorages, to_host: bool) -> Callable[[], None]:
        """What is returned makes the device wait for the end before it goes on."""
        pairs = [(buffer, _bytes_of(storage)) for storage, buffer in away]
        if not to_host:
            pairs = [(target, source) for source, target in pairs]
        self.copied_bytes += sum(source.numel() for _, source in pairs)
        if self._stream is None:
            for target, source in pairs:
                target.copy_(source)
            return lambda: None
        compute = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(compute)
        with torch.cuda.stream(self._stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        copied = self._stream.record_event()
        return lambda: compute.wait_event(copied)


def _exclude(storages: Storages, tensors: Iterable[Tensor]) -> None:
    for tensor in tensors:
        storages.pop(tensor.untyped_storage()._cdata, None)


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """All of a storage as bytes, in a tensor with a version of its own: autograd doesn't take filling for a change."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[arg-type]
