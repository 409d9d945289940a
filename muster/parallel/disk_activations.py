"""Saved activations of a stage's layers on disk from their forward to their backward, layer by layer (SSDTrain, Wu et
al. 2024, arXiv:2408.10013).

What a layer saves is written beside the next layer's forward, and read beside the backward of the layer after it: the
device holds the activations of two layers of a pass, and host memory those of two on their way. As under
`muster.parallel.offload` the storages of autograd's tensors are emptied, and filled again in place.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from muster.parallel.file_store import FileSlot, FileStore
from muster.parallel.offload import HostLink, bytes_of_storage, exclude_storages, run_and_see_storages


@dataclass(slots=True, eq=False)
class _LayerActivations:
    """Tensors that one layer has saved of one micro-batch, on their way to the disk and back."""

    storages: list[torch.UntypedStorage]
    sizes: list[int] = field(default_factory=list)
    buffers: list[Tensor] = field(default_factory=list)
    """In host memory, while they are written or read."""
    slot: FileSlot | None = None
    written: Callable[[], None] | None = None
    """Waits for the end of the write; None once it is known to be over."""
    filled: Callable[[], None] | None = None
    """Waits for the end of the read."""


class DiskActivations:
    """Activations of one stage's micro-batches on disk."""

    link_type = HostLink

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.link = self.link_type(device)
        self.store: FileStore | None = None
        """The rank's file, opened by the first write where none is given."""
        self._saved: dict[int, list[_LayerActivations]] = {}
        """Layers by micro-batch, in the order of the forward, without those whose backward has begun."""
        self._current = -1
        self.written_bytes = 0
        """Bytes of the last micro-batch."""
        self.has_layers = False

    def track_layer(self, layer: nn.Module) -> None:
        """Let what this layer's forwards save go to the disk."""
        self.has_layers = True
        layer.forward = partial(self._forward, layer, layer.forward)  # type: ignore[method-assign]

    # ------------------------------------------------------------------------------------------------------------------
    # Forward

    def begin_forward(self, micro_batch: int) -> None:
        """Take what layers save from now on as that of a micro-batch."""
        self._current, self.written_bytes = micro_batch, 0
        self._saved[micro_batch] = []

    def _forward(self, layer: nn.Module, forward: Callable[..., Tensor], x: Tensor, *shared: object) -> Tensor:
        if not torch.is_grad_enabled():
            return forward(x, *shared)
        y, seen = run_and_see_storages(layer, forward, x, *shared, device=self._device)
        exclude_storages(seen, (y,))  # the next layer's input, which that one writes
        if not y.requires_grad:
            return y
        layers = self._saved[self._current]
        own = _LayerActivations([storage for storage in seen.values() if storage.nbytes()])
        layers.append(own)
        if len(layers) > 1:
            self._finish_write(layers[-2])
        self._start_write(own)
        y.register_hook(partial(self._before_backward, self._current, own))
        return y

    def _start_write(self, own: _LayerActivations) -> None:
        own.sizes = [storage.nbytes() for storage in own.storages]
        self.written_bytes += sum(own.sizes)
        own.buffers = [self.link.pool.acquire(size) for size in own.sizes]
        own.written = self._write(own)

    def _write(self, own: _LayerActivations) -> Callable[[], None]:
        """Start to fill the buffers and to write them; the returned function waits for the end."""
        pairs = [(buffer, bytes_of_storage(storage)) for buffer, storage in zip(own.buffers, own.storages, strict=True)]
        copied = self.link.copy(pairs, host_waits=True)
        if self.store is None:
            self.store = activation_store(None)
        slot = own.slot = self.store.take(sum(own.sizes))

        buffers = own.buffers

        def write() -> None:
            copied()
            slot.write(buffers)

        return self.store.submit(write)

    def _finish_write(self, own: _LayerActivations) -> None:
        """Wait for a layer's write, and free its memory."""
        if own.written is None:
            return
        own.written()
        own.written = None
        self._release(own)
        for storage in own.storages:
            storage.resize_(0)

    def finish_writes(self, micro_batch: int) -> None:
        """Wait until all that a forward has saved is on disk, and free its memory."""
        for own in self._saved[micro_batch]:
            self._finish_write(own)

    # ------------------------------------------------------------------------------------------------------------------
    # Backward

    def begin_backward(self, micro_batch: int) -> None:
        """Start to read the activations of the last layer."""
        self.finish_writes(micro_batch)
        if layers := self._saved[micro_batch]:
            self._start_read(layers[-1])

    def _before_backward(self, micro_batch: int, own: _LayerActivations, gradient: Tensor) -> None:
        """Wait for a layer's activations, and start to read those of the layer before it."""
        layers = self._saved[micro_batch]
        self._start_read(own)
        assert own.filled is not None
        own.filled()
        own.filled = None
        self._release(own)
        own.storages = []  # autograd frees each after its last use
        assert layers.pop() is own
        if layers:
            self._start_read(layers[-1])

    def _start_read(self, own: _LayerActivations) -> None:
        self._finish_write(own)
        if own.filled is not None:
            return
        for storage, size in zip(own.storages, own.sizes, strict=True):
            storage.resize_(size)
        own.buffers = [self.link.pool.acquire(size) for size in own.sizes]
        own.filled = self._read(own)

    def _read(self, own: _LayerActivations) -> Callable[[], None]:
        """Start to read the buffers; the returned function waits until their content is on the device."""
        slot, store, buffers = own.slot, self.store, own.buffers
        assert slot is not None
        assert store is not None
        arrived = store.submit(lambda: slot.read(buffers))

        def wait() -> None:
            arrived()
            slot.free()
            pairs = [(bytes_of_storage(storage), buffer) for storage, buffer in zip(own.storages, buffers, strict=True)]
            self.link.copy(pairs, host_waits=True)()

        return wait

    def end_backward(self, micro_batch: int) -> None:
        """Drop what is left of a micro-batch: layers that no gradient has reached."""
        for own in self._saved.pop(micro_batch, ()):
            self._finish_write(own)
            if own.filled is not None:
                own.filled()
                self._release(own)
            elif own.slot is not None:
                own.slot.free()

    def _release(self, own: _LayerActivations) -> None:
        for buffer in own.buffers:
            self.link.pool.release(buffer)
        own.buffers = []

    @property
    def moved_bytes(self) -> int:
        """Bytes written to the disk and read from it so far."""
        return 0 if self.store is None else self.store.moved_bytes


def activation_store(folder: Path | None) -> FileStore:
    """Open a rank's file for activations; see `FileStore`."""
    return FileStore(folder, "the activations", "oactd")
