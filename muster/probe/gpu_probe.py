"""Use of each GPU of this machine, in a process of its own, since a broken driver can hang or kill it.

`python -m muster.probe.gpu_probe` prints what it found as one line of JSON.
"""

import json
from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.cuda.nccl
from torch.utils._triton import has_triton

_SIZE, _REPEATS = 8192, 6
_COPY_BYTES = 1 << 28


def probe_gpus() -> dict[str, Any]:
    """Return the versions of CUDA and NCCL, if Triton is there, what each GPU is and does, and the rate of copies
    between pairs."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    found: dict[str, Any] = {"cuda": torch.version.cuda, "nccl": None, "gpus": [], "pairs": []}
    if not count:
        return found
    if torch.distributed.is_nccl_available():
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    found["triton"] = has_triton()
    found["gpus"] = [_probe_gpu(index) for index in range(count)]
    found["pairs"] = [_probe_pair(0, other) for other in range(1, count)]
    return found


def _probe_gpu(index: int) -> dict[str, Any]:
    device = torch.device("cuda", index)
    row: dict[str, Any] = {"name": torch.cuda.get_device_name(device)}
    try:
        row["free_bytes"], row["total_bytes"] = torch.cuda.mem_get_info(device)
        x = torch.ones(_SIZE, _SIZE, dtype=torch.bfloat16, device=device)
        row["is_right"] = bool((x @ x == _SIZE).all())
        row["flops_per_s"] = 2 * _SIZE**3 / _time(lambda: x @ x, device)
    except RuntimeError as error:
        row["error"] = str(error).splitlines()[0]
    return row


def _probe_pair(first: int, second: int) -> dict[str, Any]:
    """Time copies from one GPU to another."""
    source = torch.ones(_COPY_BYTES, dtype=torch.uint8, device=torch.device("cuda", first))
    target = torch.empty_like(source, device=torch.device("cuda", second))
    return {
        "pair": [first, second],
        "is_direct": torch.cuda.can_device_access_peer(second, first),
        "bytes_per_s": _COPY_BYTES / _time(lambda: target.copy_(source), target.device),
    }


def _time(call: Callable[[], object], device: torch.device) -> float:
    times = []
    for _ in range(_REPEATS + 1):
        torch.cuda.synchronize(device)
        begin_s = perf_counter()
        call()
        torch.cuda.synchronize(device)
        times.append(perf_counter() - begin_s)
    return median(times[1:])


if __name__ == "__main__":
    print(json.dumps(probe_gpus()), flush=True)
