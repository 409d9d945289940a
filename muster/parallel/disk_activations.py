"""Saved activations of a stage's layers on disk from their forward to their backward, layer by layer (SSDTrain, Wu et
al. 2024, arXiv:2408.10013): `muster.parallel.layer_activations`, with those of two layers on their way in host memory.

A forward saves as many bytes as the backward reads, in half of its time or less. So that a disk that is as fast as both
together delays neither, the writes of some layers may end beside the next pass (`Plan.late_written_layers`): their
buffers wait in host memory, while a backward begins with layers that aren't on disk.
"""

from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from muster.parallel.file_store import FileStore
from muster.parallel.layer_activations import HostActivations, LayerActivations, SavedLayer
from muster.schedule.action import Lane


class DiskActivations(LayerActivations):
    """Activations of one stage's micro-batches on disk."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.store: FileStore | None = None
        """The rank's file, opened by the first write where none is given."""
        self._writing: deque[tuple[int, list[Tensor], Callable[[], None]]] = deque()
        """Micro-batch and buffers of layers that are written, first things first; the functions wait for the end."""

    def _make_room(self) -> None:
        self._finish_writes(self.late_layers)

    def _send(self, own: SavedLayer) -> Callable[[], None]:
        copied = self.link.copy(own.copies_to_host(), host_waits=True)
        if self.store is None:
            self.store = activation_store(None)
        slot = own.slot = self.store.take(sum(own.sizes))
        buffers, own.buffers = own.buffers, []

        def write() -> None:
            copied()
            slot.write(buffers)

        self._writing.append((self._current, buffers, self.store.submit(write)))
        return copied

    def _after_send(self, own: SavedLayer) -> None:
        pass

    def _finish_writes(self, count: int) -> None:
        """Wait until at most so many layers are still written, and free the buffers of the others."""
        while len(self._writing) > count:
            _, buffers, written = self._writing.popleft()
            written()
            for buffer in buffers:
                self.link.pool.release(buffer)

    def end_forward(self, micro_batch: int) -> None:
        super().end_forward(micro_batch)
        self._finish_writes(self.late_layers)

    def finish_late_writes(self, micro_batch: int) -> None:
        own = [number for number, (written, _, _) in enumerate(self._writing) if written == micro_batch]
        self._finish_writes(len(self._writing) - own[-1] - 1 if own else len(self._writing))

    def _fetch(self, own: SavedLayer) -> Callable[[], None]:
        self._take_buffers(own)
        slot, store, buffers = own.slot, self.store, own.buffers
        assert slot is not None
        assert store is not None
        arrived = store.submit(lambda: slot.read(buffers))

        def wait() -> None:
            arrived()
            slot.free()
            self.link.copy(own.copies_to_device(), host_waits=True)()

        return wait

    def _drop(self, own: SavedLayer) -> None:
        if own.slot is not None:
            own.slot.free()

    @property
    def moved_bytes(self) -> int:
        """Bytes written to the disk and read from it so far."""
        return 0 if self.store is None else self.store.moved_bytes


LAYER_TYPES: dict[Lane, type[LayerActivations]] = {"host_copy": HostActivations, "disk": DiskActivations}
"""Lane of copies beside passes → class of the activations that leave over it, layer by layer."""


def activations_by_lane(
    types: Mapping[Lane, type[LayerActivations]], device: torch.device
) -> dict[Lane, LayerActivations]:
    """Return an object of each lane's class."""
    return {lane: kind(device) for lane, kind in types.items()}


def activation_store(folder: Path | None) -> FileStore:
    """Open a rank's file for activations; see `FileStore`."""
    return FileStore(folder, "the activations", "oactd")
