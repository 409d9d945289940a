"""Saved activations of a stage's layers off the device from their forward to their backward, layer by layer.

What a layer saves leaves beside the next layer's forward, and returns beside the backward of the layer after it: the
device holds the activations of two layers of a pass. As under `muster.parallel.offload` the storages of autograd's
tensors are emptied, and filled again in place. Where they go is a subclass's: to host memory here (ALST's offload of
checkpointed hidden states, Bekman et al. 2025, arXiv:2506.13996 §3.3), or to disk
(`muster.parallel.disk_activations`).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from muster.parallel.file_store import FileSlot
from muster.parallel.offload import HostLink, bytes_of_storage, exclude_storages, run_and_see_storages
from muster.schedule.action import Kind


@dataclass(slots=True, eq=False)
class SavedLayer:
    """Tensors that one layer has saved of one micro-batch."""

    storages: list[torch.UntypedStorage]
    sizes: list[int] = field(default_factory=list)
    buffers: list[Tensor] = field(default_factory=list)
    """In host memory: while the tensors are there, or on their way to and from the disk."""
    slot: FileSlot | None = None
    """Place in a file, for those on disk."""
    left: Callable[[], None] | None = None
    """Waits until they have left; None once that is known."""
    returned: Callable[[], None] | None = None
    """Waits until they are back."""

    def copies_to_host(self) -> list[tuple[Tensor, Tensor]]:
        """Return (target, source) of the copies to the buffers."""
        return [(buffer, bytes_of_storage(one)) for buffer, one in zip(self.buffers, self.storages, strict=True)]

    def copies_to_device(self) -> list[tuple[Tensor, Tensor]]:
        """Return (target, source) of the copies from the buffers."""
        return [(target, source) for source, target in self.copies_to_host()]


class LayerActivations(ABC):
    """Activations of one stage's micro-batches that leave the device layer by layer."""

    link_type = HostLink

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.link = self.link_type(device)
        self._saved: dict[int, list[SavedLayer]] = {}
        """Layers by micro-batch, in the order of the forward, without those whose backward has begun."""
        self._current = -1
        self.left_bytes = 0
        """Bytes that have left of the last micro-batch."""
        self.has_layers = False
        self.late_layers = 0
        """Layers that may be written to disk once the forward is over."""

    def track_layer(self, layer: nn.Module) -> None:
        """Let what this layer's forwards save leave the device."""
        self.has_layers = True
        layer.forward = partial(self._forward, layer, layer.forward)  # type: ignore[method-assign]

    def start_copy(self, kind: Kind, micro_batch: int) -> Callable[[], None]:
        """Start an instruction of the lane beside a pass of a micro-batch; the returned function waits for what
        leaves."""
        if kind == Kind.WRITE_ACT_LATE:
            return partial(self.finish_late_writes, micro_batch)
        if kind in (Kind.OFFLOAD_ACT, Kind.WRITE_ACT):
            return partial(self.end_forward, micro_batch)
        self.begin_backward(micro_batch)
        return lambda: None  # the backward has waited for all

    # ------------------------------------------------------------------------------------------------------------------
    # Where they go

    @abstractmethod
    def _make_room(self) -> None:
        """Wait until there is memory for what another layer sends."""

    @abstractmethod
    def _send(self, own: SavedLayer) -> Callable[[], None]:
        """Start to copy a layer's storages to its buffers and on; the returned function waits for the end."""

    @abstractmethod
    def _after_send(self, own: SavedLayer) -> None:
        """Free what is needed no more once they have left."""

    @abstractmethod
    def _fetch(self, own: SavedLayer) -> Callable[[], None]:
        """Start to copy them back to the storages; the returned function waits for the end."""

    def _drop(self, own: SavedLayer) -> None:
        """Free the place of a layer that doesn't return."""
        self._release(own)

    # ------------------------------------------------------------------------------------------------------------------
    # Forward

    def begin_forward(self, micro_batch: int) -> None:
        """Take what layers save from now on as that of a micro-batch."""
        self._current, self.left_bytes = micro_batch, 0
        self._saved[micro_batch] = []

    def _forward(self, layer: nn.Module, forward: Callable[..., Tensor], x: Tensor, *shared: object) -> Tensor:
        if not torch.is_grad_enabled():
            return forward(x, *shared)
        y, seen = run_and_see_storages(layer, forward, x, *shared, device=self._device)
        exclude_storages(seen, (y,))  # the next layer's input, which that one sends
        if not y.requires_grad:
            return y
        layers = self._saved[self._current]
        own = SavedLayer([storage for storage in seen.values() if storage.nbytes()])
        layers.append(own)
        if len(layers) > 1:
            self._finish_leaving(layers[-2])
        own.sizes = [storage.nbytes() for storage in own.storages]
        self.left_bytes += sum(own.sizes)
        self._make_room()
        self._take_buffers(own)
        own.left = self._send(own)
        y.register_hook(partial(self._before_backward, self._current, own))
        return y

    def _finish_leaving(self, own: SavedLayer) -> None:
        """Wait until a layer's activations have left, and free their memory."""
        if own.left is None:
            return
        own.left()
        own.left = None
        self._after_send(own)
        for storage in own.storages:
            storage.resize_(0)

    def end_forward(self, micro_batch: int) -> None:
        """Wait until all that a forward has saved has left, and free its memory."""
        for own in self._saved[micro_batch]:
            self._finish_leaving(own)

    def finish_late_writes(self, micro_batch: int) -> None:
        """Wait until all that a forward has saved is where it goes."""
        self.end_forward(micro_batch)

    # ------------------------------------------------------------------------------------------------------------------
    # Backward

    def begin_backward(self, micro_batch: int) -> None:
        """Start to bring the activations of the last layer back."""
        self.end_forward(micro_batch)
        if layers := self._saved[micro_batch]:
            self._start_return(layers[-1])

    def _before_backward(self, micro_batch: int, own: SavedLayer, gradient: Tensor) -> None:
        """Wait for a layer's activations, and start to bring back those of the layer before it."""
        layers = self._saved[micro_batch]
        self._start_return(own)
        assert own.returned is not None
        own.returned()
        own.returned = None
        self._release(own)
        own.storages = []  # autograd frees each after its last use
        assert layers.pop() is own
        if layers:
            self._start_return(layers[-1])

    def _start_return(self, own: SavedLayer) -> None:
        self._finish_leaving(own)
        if own.returned is not None:
            return
        for storage, size in zip(own.storages, own.sizes, strict=True):
            storage.resize_(size)
        own.returned = self._fetch(own)

    def end_backward(self, micro_batch: int) -> None:
        """Drop what is left of a micro-batch: layers that no gradient has reached."""
        for own in self._saved.pop(micro_batch, ()):
            self._finish_leaving(own)
            if own.returned is not None:
                own.returned()
                self._release(own)
            else:
                self._drop(own)

    # ------------------------------------------------------------------------------------------------------------------
    # Buffers

    def _take_buffers(self, own: SavedLayer) -> None:
        own.buffers = [self.link.pool.acquire(size) for size in own.sizes]

    def _release(self, own: SavedLayer) -> None:
        for buffer in own.buffers:
            self.link.pool.release(buffer)
        own.buffers = []


class HostActivations(LayerActivations):
    """The same in host memory: each layer's buffers hold its activations until they are back."""

    def _make_room(self) -> None:
        pass

    def _send(self, own: SavedLayer) -> Callable[[], None]:
        return self.link.copy(own.copies_to_host())

    def _after_send(self, own: SavedLayer) -> None:
        pass

    def _fetch(self, own: SavedLayer) -> Callable[[], None]:
        return self.link.copy(own.copies_to_device())
