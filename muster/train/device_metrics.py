"""Model FLOPs utilization of a training, and the memory that its devices hold."""

from dataclasses import dataclass
from math import isfinite

import torch

from muster.config.cluster_files import load_device
from muster.config.local_machine import catalog_device_name
from muster.config.optim_config import OptimConfig
from muster.config.optimizer_state import is_zeroth_order
from muster.cost.flops import plan_flops_per_token
from muster.parallel.allocation_meter import AllocationMeter
from muster.parallel.world import World
from muster.spec.model import ModelSpec
from muster.spec.plan import Plan
from muster.train.step_result import StepResult


@dataclass(frozen=True)
class DeviceMemory:
    """Most memory of one device since its training began, in bytes."""

    allocated_bytes: int
    """Tensors alone."""
    reserved_bytes: int | None
    """All that PyTorch's allocator has taken from the device; None on a CPU, whose allocator reserves nothing."""


class DeviceMetrics:
    """Measures of the devices that a plan trains on; all ranks make it together."""

    def __init__(
        self,
        model: ModelSpec,
        plan: Plan,
        seq_len: int,
        world: World,
        optim: OptimConfig | None = None,
        meter: AllocationMeter | None = None,
    ) -> None:
        """`meter` counts the tensors of a CPU rank, where anything does."""
        self._device, self._meter = world.device, meter
        freeze, has_backward = () if optim is None else optim.freeze, not is_zeroth_order(optim)
        self._flops_per_token = plan_flops_per_token(plan, model, seq_len, has_backward=has_backward, freeze=freeze)
        self.devices = world.all_gather_object(device_name(world.device))
        """Name of each rank's device."""
        peaks = {name: peak_flops_per_s(name, plan) for name in self.devices}
        self._unknown = sorted(name for name, peak in peaks.items() if peak is None)
        self._peak_flops_per_s = sum(peaks[name] or 0.0 for name in self.devices)

    def mfu(self, result: StepResult) -> float | None:
        """Return the model FLOPs utilization of a step: its model FLOPs over what all devices can do in its time.

        Attention scores count in full, as in predictions. None where the peak rate of a device isn't known.
        """
        if self._unknown or not isfinite(result.time_s):
            return None
        return result.num_tokens * self._flops_per_token / result.time_s / self._peak_flops_per_s

    @property
    def note(self) -> str:
        """A sentence on where MFU comes from, or why there is none."""
        if self._unknown:
            names = " and ".join(self._unknown)
            return f"MFU: n/a, because the peak arithmetic rate of {names} is not in the catalogue"
        return f"MFU: share of {self._peak_flops_per_s / 1e12:,.0f} TFLOP/s, the devices' peak, with full attention"

    def start_measuring(self) -> None:
        """Forget the most memory so far, such as that of the profile."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        elif self._meter is not None:
            self._meter.start_measuring()

    def memory(self) -> DeviceMemory | None:
        """Return the most memory of this rank's device; None on a CPU whose tensors nobody counts."""
        if self._device.type != "cuda":
            return None if self._meter is None else DeviceMemory(self._meter.peak_bytes, None)
        device = self._device
        return DeviceMemory(torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device))


def device_name(device: torch.device) -> str:
    """Return the driver's name of a device, or `this CPU`."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "this CPU"


def peak_flops_per_s(name: str, plan: Plan) -> float | None:
    """Return the catalogue's peak rate of a device in a plan's precision; None where it isn't known."""
    known = catalog_device_name(name)
    return None if known is None else load_device(known).flops_per_s(plan.precision)
