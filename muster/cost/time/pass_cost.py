"""Cost of a pass: time of its kernels, their number, and exposed communication."""

from collections.abc import Sequence
from dataclasses import dataclass, field

OVERLAP_SLOWDOWN = 0.2
"""Share of a device's rate that is lost while a collective overlaps with the compute: its kernels occupy some compute
units and memory bandwidth (measured as 8-20 % for matmuls beside all-reduces and all-gathers on A100 and H100)."""

BLOCKING_WAIT_S = 10e-6
"""Seconds from the end of a kernel until a host that waits for it goes on (an assumption: an interrupt or a poll over
PCI Express, and the return through the driver)."""


@dataclass(slots=True)
class PassCost:
    """Seconds and kernels of a part of a pass on one rank."""

    compute_s: float = 0.0
    """Seconds of kernels, one after another."""
    kernels: float = 0
    host_s: float = 0.0
    """Seconds of the host beside which kernels and communication run."""
    exposed_s: dict[str, float] = field(default_factory=dict)
    """Axis → seconds of communication during which nothing is computed."""

    def add(self, seconds: float, kernels: float = 1) -> None:
        """Add one kernel, or several."""
        self.compute_s += seconds
        self.kernels += kernels

    def add_exposed(self, axis: str, seconds: float) -> None:
        """Add communication that nothing hides."""
        if seconds > 0:
            self.exposed_s[axis] = self.exposed_s.get(axis, 0.0) + seconds

    def add_overlapped(self, axis: str, seconds: float, compute_s: float) -> None:
        """Add communication that overlaps with `compute_s` seconds of this compute.

        The part that is longer is exposed, and the overlapped compute is slower.
        """
        hidden_s = min(seconds, compute_s)
        self.add_exposed(axis, seconds - hidden_s + OVERLAP_SLOWDOWN * hidden_s)

    def add_by_buckets(
        self, axis: str, before_s: float, after_s: float, buckets: Sequence[int], compute_s: float
    ) -> None:
        """Add what buckets of so many layers, of `compute_s` seconds together, send one after another over one link:
        `before_s` seconds before they compute (gathers of parameters, each beside the bucket before), `after_s` behind
        (reductions of gradients, each beside the bucket that follows).

        Two gathers of 2 s, two buckets of 1 s and two reductions of 2 s: 2 + max(1, 2) + max(1, 2) + 2 = 8 s. What
        comes before the first bucket and behind the last one is exposed.
        """
        each_s = [seconds / sum(buckets) for seconds in (compute_s, before_s, after_s)]
        hidden_s = 0.0
        for before, own, behind in zip((0, *buckets), buckets, (*buckets[1:], 0), strict=False):
            hidden_s += min(own * each_s[0], behind * each_s[1] + before * each_s[2])
        self.add_exposed(axis, before_s + after_s - (1 - OVERLAP_SLOWDOWN) * hidden_s)

    def __add__(self, other: "PassCost") -> "PassCost":
        host_s = self.host_s + other.host_s
        total = PassCost(self.compute_s + other.compute_s, self.kernels + other.kernels, host_s, dict(self.exposed_s))
        for axis, seconds in other.exposed_s.items():
            total.add_exposed(axis, seconds)
        return total

    def __mul__(self, count: float) -> "PassCost":
        waits_s = {axis: count * seconds for axis, seconds in self.exposed_s.items()}
        return PassCost(count * self.compute_s, count * self.kernels, count * self.host_s, waits_s)

    def total_s(self, launch_s: float, blocking: bool = False) -> float:
        """Return the slower of the kernels and of their launches (`launch_s` each), plus the exposed communication, or
        the host's time if that is longer; with `blocking` launches, kernels and launches take turns."""
        launches_s = self.kernels * launch_s
        kernels_s = (
            self.compute_s + launches_s + self.kernels * BLOCKING_WAIT_S
            if blocking
            else max(self.compute_s, launches_s)
        )
        return max(kernels_s + sum(self.exposed_s.values()), self.host_s)
