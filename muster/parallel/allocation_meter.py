"""Count of the memory that a CPU rank's tensors would take of a device, and its limit.

A CPU rank has host memory alone, in which both lie: what a GPU would hold, and what waits in a tier of host memory. So
the rank says what is the host's (`host_memory`), and each other storage counts from the operation that makes it until
nothing refers to it. Memory that a kernel takes and frees within an operation isn't seen.
"""

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import RLock
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_thread = threading.local()


@contextmanager
def host_memory() -> Iterator[None]:
    """Let tensors that this thread makes within be those of host memory, whatever the device. Also a decorator."""
    before = getattr(_thread, "is_host", False)
    _thread.is_host = True
    try:
        yield
    finally:
        _thread.is_host = before


_running: list["AllocationMeter"] = []
"""Meters within which a rank's thread is."""


def as_host_memory(tensor: Tensor) -> Tensor:
    """Return a tensor that another thread than the rank's has made, whose meter then takes it as host memory."""
    for meter in _running:
        meter.note_host_memory(tensor.untyped_storage())
    return tensor


def as_device_memory(tensor: Tensor) -> Tensor:
    """Return a tensor that another thread than the rank's has made, whose meter then counts it."""
    for meter in _running:
        meter.note_device_memory(tensor.untyped_storage())
    return tensor


class AllocationMeter(TorchDispatchMode):
    """Counts the bytes of the storages that this thread makes within, except those of host memory."""

    def __init__(self, limit_bytes: int, excess: Callable[[int], Exception]) -> None:
        """`excess` makes the error that is raised when more than the limit is held, of the bytes that are."""
        super().__init__()
        self._limit_bytes, self._excess = limit_bytes, excess
        self._counted: dict[int, int] = {}
        """Bytes of each storage that is alive, by its identity; 0: of host memory."""
        self._references: dict[int, weakref.ref] = {}
        self._lock = RLock()  # against threads that bring tensors of their own, or free them
        self.held_bytes = 0
        self.peak_bytes = 0

    def start_measuring(self) -> None:
        """Forget the most bytes so far."""
        self.peak_bytes = self.held_bytes

    def note_host_memory(self, storage: torch.UntypedStorage) -> None:
        """Count a storage as host memory."""
        key = storage._cdata
        self._references[key] = weakref.ref(storage, lambda _: self._forget(key))
        self._counted[key] = -1

    def note_device_memory(self, storage: torch.UntypedStorage) -> None:
        """Count a storage."""
        if storage.device.type == "cpu" and storage._cdata not in self._counted:
            self._begin(storage._cdata, storage)
            self._count(storage)

    def __enter__(self) -> "AllocationMeter":
        _running.append(self)
        self._resize = torch.UntypedStorage.resize_
        resize = self._resize

        def counted(storage: torch.UntypedStorage, size: int) -> Any:
            found = resize(storage, size)
            if storage._cdata in self._counted:
                self._update(storage)
            return found

        torch.UntypedStorage.resize_ = counted  # type: ignore[method-assign]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        _running.remove(self)
        super().__exit__(*error)
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        self._see(made)
        return made

    def _see(self, made: Any) -> None:
        if isinstance(made, Tensor):
            if type(made) is Tensor or type(made) is torch.nn.Parameter:
                self._update(made.untyped_storage())
            else:  # a DTensor, whose part on this rank alone takes memory
                self._see(getattr(made, "_local_tensor", None))
        elif isinstance(made, list | tuple):
            for one in made:
                self._see(one)

    def _update(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        before = self._counted.get(key)
        if before is None:
            is_device = not getattr(_thread, "is_host", False) and storage.device.type == "cpu"
            if not is_device:
                self.note_host_memory(storage)
                return
            self._begin(key, storage)
        elif before < 0:
            return
        self._count(storage)

    def _begin(self, key: int, storage: torch.UntypedStorage) -> None:
        self._references[key] = weakref.ref(storage, lambda _: self._forget(key))
        self._counted[key] = 0

    def _count(self, storage: torch.UntypedStorage) -> None:
        size, key = storage.nbytes(), storage._cdata
        if size == self._counted[key]:
            return
        with self._lock:
            self.held_bytes += size - self._counted[key]
            self._counted[key] = size
            if self.held_bytes > self.peak_bytes:
                self.peak_bytes = self.held_bytes
                if self.held_bytes > self._limit_bytes:
                    raise self._excess(self.held_bytes)

    def _forget(self, key: int) -> None:
        with self._lock:
            self._references.pop(key, None)
            self.held_bytes -= max(self._counted.pop(key, 0), 0)
