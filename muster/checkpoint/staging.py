"""Host memory that a rank's tensors are copied to before they are written, used again from save to save."""

import mmap
import os
import tempfile
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from muster.checkpoint.rank_file import WriteItem, sort_for_file


class StagingBuffer:
    """One buffer, which other processes can map through its file handle, with a place for each part."""

    def __init__(self, tensors: Mapping[WriteItem, Tensor]) -> None:
        self.items = sort_for_file(tensors)
        self.nbytes = sum(part.nbytes for part in self.items)
        self.fd = _anonymous_file()
        os.truncate(self.fd, max(self.nbytes, 1))
        # Pages exist from the start, so that no copy waits for them.
        flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
        self._memory = mmap.mmap(self.fd, max(self.nbytes, 1), flags=flags)
        whole, start = torch.frombuffer(self._memory, dtype=torch.uint8), 0
        self._views: dict[WriteItem, Tensor] = {}
        for part in self.items:
            place = whole[start : start + part.nbytes].view(getattr(torch, part.dtype))
            self._views[part] = place.view(part.box.size)
            start += part.nbytes
        if any(tensor.is_cuda for tensor in tensors.values()):  # copies from a device are fast into locked memory only
            torch.cuda.cudart().cudaHostRegister(whole.data_ptr(), self.nbytes, 0)  # type: ignore[union-attr]

    def fits(self, tensors: Mapping[WriteItem, Tensor]) -> bool:
        """Whether the buffer was made for such parts."""
        return tensors.keys() == self._views.keys()

    def copy_from(self, tensors: Mapping[WriteItem, Tensor], ready: "torch.cuda.Event | None" = None) -> None:
        """Copies all parts; returns when the tensors may change again. On a GPU the copies wait for `ready`, and for
        nothing that was asked of it since."""
        device = next((tensor.device for tensor in tensors.values() if tensor.is_cuda), None)
        if ready is None or device is None:
            for part, tensor in tensors.items():
                self._views[part].copy_(tensor)
            return
        stream = torch.cuda.Stream(device)
        with torch.cuda.stream(stream):
            stream.wait_event(ready)
            for part, tensor in tensors.items():
                self._views[part].copy_(tensor, non_blocking=True)
        stream.synchronize()


def record_event(tensors: Iterable[Tensor]) -> "torch.cuda.Event | None":
    """The moment at which all that has been asked of the tensors' GPU so far is done; None where they lie on none."""
    device = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
    if device is None:
        return None
    mark = torch.cuda.Event()
    mark.record(torch.cuda.current_stream(device))
    return mark


def _anonymous_file() -> int:
    """A file without a name that lies in memory (on Linux), which is gone with the last process that has it open."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("muster-checkpoint")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
