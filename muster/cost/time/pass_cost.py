"""What a pass spends: time of kernels, their number, and waiting for what travels."""

from dataclasses import dataclass, field

OVERLAP_SLOWDOWN = 0.2
"""Share of a device's rate that is lost while a collective runs beside the compute: its kernels hold some compute units
and memory bandwidth (measured as 8-20 % for products beside all-reduces and all-gathers on A100 and H100)."""


@dataclass(slots=True)
class PassCost:
    """Seconds and kernels of a part of a pass on one rank."""

    compute_s: float = 0.0
    """Kernels, one after another."""
    kernels: float = 0
    exposed_s: dict[str, float] = field(default_factory=dict)
    """By axis: what travels while nothing is computed."""

    def add(self, seconds: float, kernels: float = 1) -> None:
        """One more kernel, or several."""
        self.compute_s += seconds
        self.kernels += kernels

    def add_exposed(self, axis: str, seconds: float) -> None:
        """Something that nothing hides."""
        if seconds > 0:
            self.exposed_s[axis] = self.exposed_s.get(axis, 0.0) + seconds

    def add_overlapped(self, axis: str, seconds: float, compute_s: float) -> None:
        """Something that travels beside `compute_s` seconds of the compute here: what is longer than that is waited
        for, and the compute beside it is slower."""
        hidden_s = min(seconds, compute_s)
        self.add_exposed(axis, seconds - hidden_s + OVERLAP_SLOWDOWN * hidden_s)

    def __add__(self, other: "PassCost") -> "PassCost":
        total = PassCost(self.compute_s + other.compute_s, self.kernels + other.kernels, dict(self.exposed_s))
        for axis, seconds in other.exposed_s.items():
            total.add_exposed(axis, seconds)
        return total

    def __mul__(self, count: float) -> "PassCost":
        waits_s = {axis: count * seconds for axis, seconds in self.exposed_s.items()}
        return PassCost(count * self.compute_s, count * self.kernels, waits_s)

    def total_s(self, launch_s: float) -> float:
        """On a device whose host needs `launch_s` for each kernel: the slower of the two, and what is waited for."""
        return max(self.compute_s, self.kernels * launch_s) + sum(self.exposed_s.values())
