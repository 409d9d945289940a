"""Offload of saved activations to host memory, from a stage's forward until its backward.

Autograd keeps its tensors; their storages are copied, emptied, and later filled again in place. Anything else that
shares the memory (a view, the stage's input, a deferred gradient) goes and comes back with it, and each storage is
copied once, however many tensors lie in it.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from muster.model.saved_tensors import observe_saved_tensors
from muster.parallel.allocation_meter import host_memory

Storages = dict[int, torch.UntypedStorage]
"""Storages by their identity."""
OffloadedStorages = list[tuple[torch.UntypedStorage, Tensor]]
"""Emptied storages, each with its copy in host memory."""


class HostBufferPool:
    """Reusable buffers in host memory, pinned for a GPU so that copies overlap with its kernels."""

    def __init__(self, pinned: bool) -> None:
        self._pinned = pinned
        self._free: dict[int, list[Tensor]] = {}
        self.num_bytes = 0
        """Size of all buffers."""

    @host_memory()
    def acquire(self, size: int) -> Tensor:
        """Return a buffer of `size` bytes."""
        if free := self._free.get(size):
            return free.pop()
        self.num_bytes += size
        return torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned)

    def release(self, buffer: Tensor) -> None:
        """Make a buffer available again."""
        self._free.setdefault(buffer.numel(), []).append(buffer)


class HostLink:
    """Copies between a device's memory and its host's, which on a GPU run beside its kernels."""

    host_device = torch.device("cpu")

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pool = HostBufferPool(device.type != "cpu")
        self._stream = None if device.type == "cpu" else torch.get_device_module(device).Stream(device)
        self.copied_bytes = 0
        """Bytes copied so far, in both directions."""

    def copy(
        self, pairs: Sequence[tuple[Tensor, Tensor]], host_waits: bool = False, after_device: bool = True
    ) -> Callable[[], None]:
        """Start to copy (target, source) tensors; the returned function makes the device wait for the end, or, with
        `host_waits`, the host, which is about to read them. `after_device`: False where the copy needn't wait for what
        the device has been given to do so far."""
        self.copied_bytes += sum(source.nbytes for _, source in pairs)
        if self._stream is None:
            for target, source in pairs:
                target.copy_(source)
            return lambda: None
        module = torch.get_device_module(self.device)
        compute = module.current_stream(self.device)
        if after_device:
            self._stream.wait_stream(compute)
        with module.stream(self._stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        copied = self._stream.record_event()
        return copied.synchronize if host_waits else lambda: compute.wait_event(copied)


class ActivationOffload:
    """Storages that one stage's micro-batches save from forward to backward, on the device or on the host."""

    link_type = HostLink

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.link = self.link_type(device)
        self._saved_in_forward: Storages = {}
        self._resident: dict[int, Storages] = {}
        """Storages that can be offloaded, by micro-batch that has run forward."""
        self._offloaded: dict[int, OffloadedStorages] = {}
        """Offloaded storages by micro-batch."""
        self.num_layers = 0
        """Layers that have been made available."""
        self.max_layers: int | None = None
        """The first layers of these that the next forward makes available; None: all."""

    def track_layer(self, layer: nn.Module) -> None:
        """Make the activations that this layer's forwards save available for offload."""
        layer.forward = partial(self._forward, layer, self.num_layers, layer.forward)  # type: ignore[method-assign]
        self.num_layers += 1

    def _forward(
        self, layer: nn.Module, place: int, forward: Callable[..., Tensor], x: Tensor, *shared: object
    ) -> Tensor:
        if not torch.is_grad_enabled() or (self.max_layers is not None and place >= self.max_layers):
            return forward(x, *shared)
        y, seen = run_and_see_storages(layer, forward, x, *shared, device=self._device)
        self._saved_in_forward |= seen
        return y

    def end_forward(self, micro_batch: int, output: Tensor) -> None:
        """Assign the storages seen since the last call to a micro-batch; its output, which others receive, is left
        out."""
        self._resident[micro_batch], self._saved_in_forward = self._saved_in_forward, {}
        exclude_storages(self._resident[micro_batch], (output,))

    def available_bytes(self, micro_batch: int) -> int:
        """Return the bytes of a micro-batch that `offload` would move."""
        return sum(storage.nbytes() for storage in self._resident.get(micro_batch, {}).values())

    def discard(self, micro_batch: int) -> None:
        """Drop a micro-batch's storages before its backward, which frees each tensor after its last use."""
        self._resident.pop(micro_batch, None)

    def offload(self, micro_batch: int) -> Callable[[], None]:
        """Start to copy a micro-batch's storages to the host; the returned function frees the device's memory, for
        instructions that follow."""
        storages = list(self._resident.pop(micro_batch).values())
        away = [(storage, self.link.pool.acquire(storage.nbytes())) for storage in storages]
        self._offloaded[micro_batch] = away
        wait = self._copy(away, to_host=True)

        def finish() -> None:
            wait()
            for storage, _ in away:
                storage.resize_(0)

        return finish

    def reload(self, micro_batch: int) -> Callable[[], None]:
        """Allocate the device's memory again and start to copy back; the returned function waits for the end."""
        away = self._offloaded.pop(micro_batch)
        for storage, buffer in away:
            storage.resize_(buffer.numel())
        wait = self._copy(away, to_host=False)

        def finish() -> None:
            wait()
            for _, buffer in away:
                self.link.pool.release(buffer)
            away.clear()

        return finish

    def _copy(self, away: OffloadedStorages, to_host: bool) -> Callable[[], None]:
        """Start the copies; the returned function makes the device wait for their end."""
        pairs = [(buffer, bytes_of_storage(storage)) for storage, buffer in away]
        if not to_host:
            pairs = [(target, source) for source, target in pairs]
        return self.link.copy(pairs)


def run_and_see_storages(
    layer: nn.Module, forward: Callable[..., Tensor], x: Tensor, *shared: object, device: torch.device
) -> tuple[Tensor, Storages]:
    """Run a layer's forward; return its output, and the storages on a device that it has saved for its backward.

    Gathered parameters and constants of all micro-batches aren't among them, nor what holds integers, as documents do.
    """
    seen: Storages = {}

    def see(tensor: Tensor) -> None:
        if tensor.is_floating_point() and tensor.device.type == device.type:
            storage = tensor.untyped_storage()
            seen[storage._cdata] = storage

    with observe_saved_tensors(see):
        y = forward(x, *shared)
    exclude_storages(seen, (*layer.parameters(), *(item for item in shared if isinstance(item, Tensor))))
    return y, seen


def exclude_storages(storages: Storages, tensors: Iterable[Tensor]) -> None:
    """Take the storages of some tensors out of others."""
    for tensor in tensors:
        storages.pop(tensor.untyped_storage()._cdata, None)


def bytes_of_storage(storage: torch.UntypedStorage) -> Tensor:
    """Return all of a storage as bytes, in a tensor with a version counter of its own, so that autograd doesn't notice
    when it is filled."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[arg-type]
