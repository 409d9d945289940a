"""Store of optimizer state on disk, in a rank's scratch file (`muster.parallel.file_store`)."""

from collections.abc import Callable, Sequence
from pathlib import Path

from torch import Tensor

from muster.parallel.allocation_meter import as_host_memory
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
        """True if they have memory once all that was started is over."""
        self.is_changed = True
        """True if memory holds other values than the file."""

    def read(self) -> Callable[[], None]:
        """Start to bring the tensors into memory; the returned function waits for the end."""
        if self._is_in_memory:
            return lambda: None
        self._is_in_memory, self.is_changed = True, False
        return self._store.submit(self._fill)

    def write(self) -> Callable[[], None]:
        """Start to write the tensors where they have changed, and to free their memory; the returned function waits for
        the end."""
        leave = self._empty if not self.is_changed else self._write_and_empty
        self._is_in_memory = self.is_changed = False
        return self._store.submit(leave)

    # On the store's thread, so that memory is taken and freed in the order of reads and writes.

    def _fill(self) -> None:
        for tensor, shape in zip(self._tensors, self._shapes, strict=True):
            tensor.data = as_host_memory(tensor.new_empty(shape))
        self._slot.read(self._tensors)

    def _write_and_empty(self) -> None:
        self._slot.write(self._tensors)
        self._empty()

    def _empty(self) -> None:
        for tensor in self._tensors:
            tensor.data = as_host_memory(tensor.new_empty(0))
