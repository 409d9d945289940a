"""What a pass spends: time of kernels, their number, and waiting for what travels."""

from dataclasses import dataclass, field

CONTENTION = 0.2
"""Share of a device's rate that is lost while a collective runs beside the compute: its kernels hold some compute units
and memory bandwidth (measured as 8-20 % for products beside all-reduces and all-gathers on A100 and H100)."""


@dataclass(slots=True)
class Spent:
    """Seconds and kernels of a part of a pass on one rank."""

    compute_s: float = 0.0
    """Kernels, one after another."""
    kernels: float = 0
    waits_s: dict[str, float] = field(default_factory=dict)
    """By axis: what travels while nothing is computed."""

    def add(self, seconds: float, kernels: float = 1) -> None:
        """One more kernel, or several."""
        self.compute_s += seconds
        self.kernels += kernels

    def wait(self, axis: str, seconds: float) -> None:
        """Something that nothing hides."""
        if seconds > 0:
            self.waits_s[axis] = self.waits_s.get(axis, 0.0) + seconds

    def beside(self, axis: str, seconds: float, compute_s: float) -> None:
        """Something that travels beside `compute_s` seconds of the compute here: what is longer than that is waited
        for, and the compute beside it is slower."""
        hidden_s = min(seconds, compute_s)
        self.wait(axis, seconds - hidden_s + CONTENTION * hidden_s)

    def __add__(self, other: "Spent") -> "Spent":
        total = Spent(self.compute_s + other.compute_s, self.kernels + other.kernels, dict(self.waits_s))
        for axis, seconds in other.waits_s.items():
            total.wait(axis, seconds)
        return total

    def __mul__(self, count: float) -> "Spent":
        waits_s = {axis: count * seconds for axis, seconds in self.waits_s.items()}
        return Spent(count * self.compute_s, count * self.kernels, waits_s)

    def seconds(self, launch_s: float) -> float:
        """On a device whose host needs `launch_s` for each kernel: the slower of the two, and what is waited for."""
        return max(self.compute_s, self.kernels * launch_s) + sum(self.waits_s.values())
