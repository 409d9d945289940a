"""Host memory that a rank's tensors are copied to before they are written, used again from save to save."""

import mmap
import os
import tempfile
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from muster.checkpoint.write import Part, file_order


class Staging:
    """One buffer, which other processes can map through its file handle, with a place for each part."""

    def __init__(self, parts: Mapping[Part, Tensor]) -> None:
        self.parts = file_order(parts)
        self.nbytes = sum(part.nbytes for part in self.parts)
        self.handle = _memory_file()
        os.truncate(self.handle, max(self.nbytes, 1))
        # Pages exist from the start, so that no copy waits for them.
        flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
        self._memory = mmap.mmap(self.handle, max(self.nbytes, 1), flags=flags)
        whole, start = torch.frombuffer(self._memory, dtype=torch.uint8), 0
        self._places: dict[Part, Tensor] = {}
        for part in self.parts:
            place = whole[start : start + part.nbytes].view(getattr(torch, part.dtype))
            self._places[part] = place.view(part.box.size)
            start += part.nbytes
        if any(tensor.is_cuda for tensor in parts.values()):  # copies from a device are fast into locked memory only
            torch.cuda.cudart().cudaHostRegister(whole.data_ptr(), self.nbytes, 0)  # type: ignore[union-attr]

    def fits(self, parts: Mapping[Part, Tensor]) -> bool:
        """Whether the buffer was made for such parts."""
        return parts.keys() == self._places.keys()

    def take(self, parts: Mapping[Part, Tensor], ready: "torch.cuda.Event | None" = None) -> None:
        """Copies all parts; returns when the tensors may change again. On a GPU the copies wait for `ready`, and for
        nothing that was asked of it since."""
        device = next((tensor.device for tensor in parts.values() if tensor.is_cuda), None)
        if ready is None or device is None:
            for part, tensor in parts.items():
                self._places[part].copy_(tensor)
            return
        stream = torch.cuda.Stream(device)
        with torch.cuda.stream(stream):
            stream.wait_event(ready)
            for part, tensor in parts.items():
                self._places[part].copy_(tensor, non_blocking=True)
        stream.synchronize()


def mark_of(tensors: Iterable[Tensor]) -> "torch.cuda.Event | None":
    """The moment at which all that has been asked of the tensors' GPU so far is done; None where they lie on none."""
    device = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
    if device is None:
        return None
    mark = torch.cuda.Event()
    mark.record(torch.cuda.current_stream(device))
    return mark


def _memory_file() -> int:
    """A file without a name that lies in memory (on Linux), which is gone with the last process that has it open."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("muster-checkpoint")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
