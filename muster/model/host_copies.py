"""Copies of batches from host memory to the device."""

import torch
from torch import Tensor


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Return a copy, on a device, of a tensor in host memory; the tensor itself where the device is a CPU.

    To a GPU it travels from pinned memory in the order of the stream's kernels, and the host goes on. From other memory
    the host would first wait for all that it has launched (PyTorch documentation, CUDA semantics, "Use pinned memory
    buffers").
    """
    return x if device.type == "cpu" else x.pin_memory().to(device, non_blocking=True)
