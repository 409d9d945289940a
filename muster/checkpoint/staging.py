"""Staging buffer: host memory that a rank's tensors are copied to before they are written, reused for every save."""

import mmap
import os
import tempfile
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from muster.checkpoint.rank_file import WriteItem, sort_for_file
from muster.parallel.allocation_meter import host_memory


class StagingBuffer:
    """Buffer with a view for each item to write; other processes can map it through its file descriptor."""

    @host_memory()
    def __init__(self, tensors: Mapping[WriteItem, Tensor]) -> None:
        self.items = sort_for_file(tensors)
        self.nbytes = sum(item.nbytes for item in self.items)
        self.fd = _anonymous_file()
        os.truncate(self.fd, max(self.nbytes, 1))
        # Populate the pages now, so that no copy waits for them.
        flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
        self._memory = mmap.mmap(self.fd, max(self.nbytes, 1), flags=flags)
        whole, start = torch.frombuffer(self._memory, dtype=torch.uint8), 0
        self._views: dict[WriteItem, Tensor] = {}
        for item in self.items:
            view = whole[start : start + item.nbytes].view(getattr(torch, item.dtype))
            self._views[item] = view.view(item.box.size)
            start += item.nbytes
        if any(tensor.is_cuda for tensor in tensors.values()):  # only pinned memory is fast to copy to from a device
            torch.cuda.cudart().cudaHostRegister(whole.data_ptr(), self.nbytes, 0)  # type: ignore[union-attr]

    def fits(self, tensors: Mapping[WriteItem, Tensor]) -> bool:
        """Return True if the buffer was made for these items."""
        return tensors.keys() == self._views.keys()

    def copy_from(self, tensors: Mapping[WriteItem, Tensor], ready: "torch.cuda.Event | None" = None) -> None:
        """Copy all tensors; return once they may change again.

        On a GPU the copies run on a stream of their own and wait for `ready` only, not for work queued since.
        """
        device = next((tensor.device for tensor in tensors.values() if tensor.is_cuda), None)
        if ready is None or device is None:
            for item, tensor in tensors.items():
                self._views[item].copy_(tensor)
            return
        stream = torch.cuda.Stream(device)
        with torch.cuda.stream(stream):
            stream.wait_event(ready)
            for item, tensor in tensors.items():
                self._views[item].copy_(tensor, non_blocking=True)
        stream.synchronize()


def record_event(tensors: Iterable[Tensor]) -> "torch.cuda.Event | None":
    """Return an event that completes with all work queued so far on the tensors' GPU; None for CPU tensors."""
    device = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
    if device is None:
        return None
    mark = torch.cuda.Event()
    mark.record(torch.cuda.current_stream(device))
    return mark


def _anonymous_file() -> int:
    """Open an unnamed file, in memory on Linux, that vanishes with the last process that has it open."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("muster-checkpoint")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
