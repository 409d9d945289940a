"""Store of optimizer state on disk, in a rank's scratch file (`muster.parallel.file_store`)."""

from collections.abc import Callable, Sequence
from pathlib import Path

from torch import Tensor

from muster.parallel.allocation_meter import host_memory
from muster.parallel.file_store import FileSlot, FileStore


class StateStore(FileStore):
    """One rank's file of optimizer state."""

    def __init__(self, folder: Path | None) -> None:
        super().__init__(folder, "the optimizer's state", "ooptd")

    def allocate(self, tensors: Sequence[Tensor]) -> "StoredPart":
        """Make a place for a part. Raises MusterError where the disk has no room."""
        return StoredPart(self, self.take(sum(tensor.nbytes for tensor in tensors)), tensors)


class StoredPart:
    """Tensors that lie either in memory or in the store.

    Each keeps its identity and gets other memory: a storage that numpy has seen can't be resized.
    """

    def __init__(self, store: FileStore, slot: FileSlot, tensors: Sequence[Tensor]) -> None:
        self._store, self._slot, self._tensors = store, slot, tensors
        self._shapes = [tensor.shape for tensor in tensors]
        self._is_in_memory = True
        self.is_changed = True
        """True if memory holds other values than the file."""

    @host_memory()
    def read(self) -> Callable[[], None]:
        """Start to bring the tensors into memory; the returned function waits for the end."""
        if self._is_in_memory:
            return lambda: None
        for tensor, shape in zip(self._tensors, self._shapes, strict=True):
            tensor.data = tensor.new_empty(shape)
        self._is_in_memory, self.is_changed = True, False
        return self._store.submit(lambda: self._slot.read(self._tensors))

    def write(self) -> Callable[[], None]:
        """Start to write the tensors where they have changed; the returned function waits for the end and frees their
        memory."""
        wait = self._store.submit(lambda: self._slot.write(self._tensors)) if self.is_changed else lambda: None

        def finish() -> None:
            wait()
            for tensor in self._tensors:
                tensor.data = tensor.new_empty(0)
            self._is_in_memory = self.is_changed = False

        return finish
