"""Layers of a model in host memory or on disk, of which a few at a time are on the device while tokens pass through
them (Superpipeline, arXiv:2410.08791).

A window slides over these layers: while one computes, those behind it arrive. The first follow the last, since the next
token passes through them next.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from muster.cost.memory.generation import WINDOW_ALIGNMENT
from muster.model.decoder import Decoder
from muster.parallel.allocation_meter import as_host_memory, host_memory
from muster.parallel.file_store import FileSlot, FileStore
from muster.parallel.offload import HostLink
from muster.spec.layer_strategy import Tier


def make_memory(module: Decoder, device: torch.device, away: Mapping[int, Tier] | None = None) -> None:
    """Give a decoder on the meta device memory: that of the host to layers that are `away` there, pinned for a GPU,
    none to those on disk, and that of the device to all else."""
    away = away or {}
    for part in module.children():
        if part is not module.layers:
            part.to_empty(device=device)
    module.to_empty(device=device, recurse=False)
    for index, layer in module.layers.items():
        if (tier := away.get(int(index), "none")) != "none":
            layer._apply(partial(_empty_on_host, pinned=device.type != "cpu", has_memory=tier == "host"))
        else:
            layer.to_empty(device=device)


@host_memory()
def _empty_on_host(like: Tensor, pinned: bool, has_memory: bool = True) -> Tensor:
    made = torch.empty_like(like, device=HostLink.host_device, pin_memory=pinned and has_memory)
    if not has_memory:
        made.untyped_storage().resize_(0)
    return as_host_memory(made)


def write_disk_layers(
    module: Decoder, away: Mapping[int, Tier], load: Callable[[Collection[str]], None]
) -> dict[int, FileSlot]:
    """Write the layers that belong on disk to a file in the system's folder for temporary files, and return the place
    of each. `load` fills parameters, given by name; each layer is in host memory while it does. Raises MusterError."""
    layers = [layer for layer, tier in sorted(away.items()) if tier == "disk"]
    if not layers:
        return {}
    store, slots = FileStore(None, "layers", "oparamd", resumes=False), {}
    for layer in layers:
        tensors = _tensors_of(part := module.layers[str(layer)])
        without = [tensor.data for tensor in tensors]
        for tensor in tensors:
            tensor.data = _empty_on_host(tensor, pinned=False)
        load([f"layers.{layer}.{name}" for name, _ in part.named_parameters()])
        slots[layer] = store.take(sum(tensor.nbytes for tensor in tensors))
        slots[layer].write(tensors)
        for tensor, value in zip(tensors, without, strict=True):
            tensor.data = value
    return slots


def _tensors_of(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


class LayerWindow:
    """Window over the layers of a decoder that are away from the device."""

    link_type = HostLink

    def __init__(
        self,
        module: Decoder,
        device: torch.device,
        away: Collection[int],
        size: int,
        slots: Mapping[int, FileSlot] | None = None,
    ) -> None:
        """Let layers compute on the device whose parameters have been filled in host memory (`make_memory`), or written
        to `slots` on disk.

        `size`: most of them on the device at once; with 1 nothing arrives while another computes.
        """
        self._layers = [_AwayLayer(module.layers[str(layer)], (slots or {}).get(layer)) for layer in sorted(away)]
        self._link, self._size = self.link_type(device), min(size, len(self._layers))
        num_bytes = max((layer.num_bytes for layer in self._layers), default=0)
        self._free = [torch.empty(num_bytes, dtype=torch.uint8, device=device) for _ in range(self._size)]
        self._present: dict[int, tuple[Tensor, Callable[[], None]]] = {}
        """Layers on the device or on their way, by their place among all that are away: buffer, and wait for the end
        of the copy."""
        for place, layer in enumerate(self._layers):
            layer.module.forward = partial(self._forward, place, layer.module.forward)  # type: ignore[method-assign]

    def _forward(self, place: int, forward: Callable[..., Tensor], *arguments: object) -> Tensor:
        for ahead in range(self._size):  # copies follow what the device has been given so far, not this layer's work
            self._start((place + ahead) % len(self._layers))
        buffer, wait = self._present.pop(place)
        wait()
        self._layers[place].enter(buffer)
        y = forward(*arguments)
        self._layers[place].leave()
        self._free.append(buffer)
        return y

    def _start(self, place: int) -> None:
        """Start to bring a layer to the device, unless it is there or on its way."""
        if place not in self._present:
            buffer = self._free.pop()
            self._present[place] = buffer, self._layers[place].bring(buffer, self._link)


class _AwayLayer:
    """One layer's tensors in host memory, or at a place on disk."""

    def __init__(self, module: nn.Module, slot: FileSlot | None = None) -> None:
        self.module = module
        self._tensors, self._slot = _tensors_of(module), slot
        self._values = [tensor.data for tensor in self._tensors]
        """In host memory; without memory where the layer is on disk."""
        self.num_bytes = sum(map(_aligned_bytes, self._values))

    def bring(self, buffer: Tensor, link: HostLink) -> Callable[[], None]:
        """Start to bring the tensors into a buffer on the device; the returned function waits for the end."""
        if self._slot is None:
            return link.copy(self.copies_into(buffer))
        if link.device.type == "cpu":
            return self._slot.start_read(list(self._parts(buffer)))
        staged = link.pool.acquire(self.num_bytes)
        read = self._slot.start_read(list(self._parts(staged)))

        def copy() -> None:
            read()
            link.copy([(buffer[: self.num_bytes], staged)], host_waits=True)()
            link.pool.release(staged)

        return copy

    def copies_into(self, buffer: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return (part of the buffer, tensor in host memory) of each tensor."""
        return list(zip(self._parts(buffer), self._values, strict=True))

    def enter(self, buffer: Tensor) -> None:
        """Let the layer compute with what is in a buffer on the device."""
        for tensor, part in zip(self._tensors, self._parts(buffer), strict=True):
            tensor.data = part

    def leave(self) -> None:
        """Let the layer's tensors be those in host memory."""
        for tensor, value in zip(self._tensors, self._values, strict=True):
            tensor.data = value

    def _parts(self, buffer: Tensor) -> Iterator[Tensor]:
        start = 0
        for value in self._values:
            yield buffer[start : start + value.nbytes].view(value.dtype).view(value.shape)
            start += _aligned_bytes(value)


def _aligned_bytes(value: Tensor) -> int:
    return -(-value.nbytes // WINDOW_ALIGNMENT) * WINDOW_ALIGNMENT
