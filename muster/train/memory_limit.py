"""A limit of device memory (`train.memory_limit_bytes`, or that of a request), kept on a rank while it works.

On a GPU PyTorch's allocator keeps it; a CPU rank counts what its tensors would take of a device.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from muster.config.run_config import RunConfig
from muster.parallel.allocation_meter import AllocationMeter
from muster.parallel.world import World
from muster.spec.plan import Plan
from muster.train.memory_preflight import excess_of_limit


class MemoryLimit:
    """A rank's limit from entering this context until it is lifted or left; None: there is none."""

    def __init__(
        self, limit_bytes: int | None, device: torch.device, excess: Callable[[int | None], Exception]
    ) -> None:
        """`excess` makes the error that is raised beyond the limit, of the bytes that are held, None where that is
        unknown."""
        self._limit_bytes, self._device, self._excess = limit_bytes, device, excess
        self._is_kept = False
        self.meter: AllocationMeter | None = None
        """Counts a CPU rank's tensors where there is a limit."""
        if limit_bytes is not None and device.type == "cpu":
            self.meter = AllocationMeter(limit_bytes, excess)

    def __enter__(self) -> "MemoryLimit":
        self._is_kept = self._limit_bytes is not None
        if self.meter is not None:
            self.meter.__enter__()
        elif self._limit_bytes is not None:
            total = torch.cuda.get_device_properties(self._device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, self._limit_bytes / total), self._device)
        return self

    def lift(self) -> None:
        """Let what follows take all memory."""
        if not self._is_kept:
            return
        self._is_kept = False
        if self.meter is not None:
            self.meter.__exit__(None, None, None)
        else:
            torch.cuda.set_per_process_memory_fraction(1.0, self._device)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        """Say in a sentence that a GPU's allocator has refused more than the limit."""
        is_kept = self._is_kept
        self.lift()
        if is_kept and isinstance(error, torch.OutOfMemoryError):
            raise self._excess(None) from error


def limit_of_run(config: RunConfig, plan: Plan, world: World) -> MemoryLimit:
    """Return the limit of a rank of a run."""
    return MemoryLimit(config.train.memory_limit_bytes, world.device, partial(excess_of_limit, config, plan))
