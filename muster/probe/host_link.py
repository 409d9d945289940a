"""Measurement of the link between a device and its host's memory, over which offload copies."""

from statistics import median
from time import perf_counter

import torch

from muster.parallel.device_clock import synchronize

_BYTES, _REPEATS = 1 << 28, 5


def time_host_copies(device: torch.device) -> float | None:
    """Return the bytes per second of copies to pinned host memory and back, the slower way; None for a CPU."""
    if device.type == "cpu":
        return None
    on_device = torch.empty(_BYTES, dtype=torch.uint8, device=device)
    on_host = torch.empty(_BYTES, dtype=torch.uint8, pin_memory=True)
    return _BYTES / max(_copy_s(on_host, on_device, device), _copy_s(on_device, on_host, device))


def _copy_s(target: torch.Tensor, source: torch.Tensor, device: torch.device) -> float:
    times = []
    for _ in range(_REPEATS + 1):
        synchronize(device)
        begin_s = perf_counter()
        target.copy_(source, non_blocking=True)
        synchronize(device)
        times.append(perf_counter() - begin_s)
    return median(times[1:])
