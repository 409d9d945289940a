"""A GPU in simulated time: the host launches kernels and runs ahead; the device works them off one after another."""

from dataclasses import dataclass


@dataclass
class SimulatedGpu:
    """One stream. `launch` returns at once; `synchronize` and reading a result wait, as CUDA does."""

    host_s: float = 100.0
    device_s: float = 100.0
    """Time at which all that was launched is over."""
    syncs: int = 0

    def now_s(self) -> float:
        return self.host_s

    def launch(self, kernel_s: float, launch_s: float = 1e-5) -> None:
        self.host_s += launch_s
        self.device_s = max(self.device_s, self.host_s) + kernel_s

    def synchronize(self, device: object = None) -> None:
        self.syncs += 1
        self.host_s = max(self.host_s, self.device_s)

    def Event(self, enable_timing: bool = False) -> "SimulatedEvent":
        assert enable_timing
        return SimulatedEvent(self)


class SimulatedEvent:
    """An event in the stream of a simulated GPU, with the methods of `torch.cuda.Event`."""

    def __init__(self, gpu: SimulatedGpu) -> None:
        self.gpu = gpu
        self.at_s = 0.0

    def record(self) -> None:
        self.at_s = max(self.gpu.device_s, self.gpu.host_s)

    def query(self) -> bool:
        return self.at_s <= self.gpu.host_s

    def synchronize(self) -> None:
        self.gpu.host_s = max(self.gpu.host_s, self.at_s)

    def elapsed_time(self, end: "SimulatedEvent") -> float:
        assert self.query(), "CUDA refuses to read an event that the device has not reached"
        assert end.query(), "CUDA refuses to read an event that the device has not reached"
        return 1e3 * (end.at_s - self.at_s)
