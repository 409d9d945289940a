"""The memory limit of a run (`train.memory_limit_bytes`), kept on each rank while it trains.

On a GPU PyTorch's allocator keeps it; a CPU rank counts what its tensors would take of a device.
"""

from typing import Any

import torch

from muster.config.run_config import RunConfig
from muster.parallel.allocation_meter import AllocationMeter
from muster.parallel.world import World
from muster.spec.plan import Plan
from muster.train.memory_preflight import excess_of_limit


class MemoryLimit:
    """A rank's limit from entering this context until it is lifted or left; none where the run has no limit."""

    def __init__(self, config: RunConfig, plan: Plan, world: World) -> None:
        self._config, self._plan, self._device = config, plan, world.device
        self._limit_bytes = config.train.memory_limit_bytes
        self._is_kept = False
        self.meter: AllocationMeter | None = None
        """Counts a CPU rank's tensors where there is a limit."""
        if self._limit_bytes is not None and self._device.type == "cpu":
            self.meter = AllocationMeter(self._limit_bytes, lambda held: excess_of_limit(config, plan, held))

    def __enter__(self) -> "MemoryLimit":
        self._is_kept = self._limit_bytes is not None
        if self.meter is not None:
            self.meter.__enter__()
        elif self._limit_bytes is not None:
            total = torch.cuda.get_device_properties(self._device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, self._limit_bytes / total), self._device)
        return self

    def lift(self) -> None:
        """Let what follows the training take all memory."""
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
            raise excess_of_limit(self._config, self._plan, None) from error
