"""Sums of a stage's passes on a machine that `muster profile` has measured."""

from collections import defaultdict
from dataclasses import dataclass, field, replace


@dataclass
class ProfiledCost:
    """Seconds of a forward and of both halves of a backward, and of their exposed communication by axis."""

    forward_s: float = 0.0
    input_grad_s: float = 0.0
    weight_grad_s: float = 0.0
    forward_exposed_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    backward_exposed_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    ends_s: tuple[float, float] = (0.0, 0.0)
    """Seconds of the last tensor-parallel collectives of a run of layers, forward and backward, beside which nothing
    computes."""

    def with_backward(self, input_share: float, weight_share: float) -> "ProfiledCost":
        """Return the cost with shares of the gradients of inputs, and of their communication, and of weights."""
        waits_s = {axis: time_s * input_share for axis, time_s in self.backward_exposed_s.items()}
        return replace(
            self,
            input_grad_s=self.input_grad_s * input_share,
            weight_grad_s=self.weight_grad_s * weight_share,
            backward_exposed_s=defaultdict(float, waits_s),
        )

    def add_end_of_run(self, layer: "ProfiledCost", has_backward: bool) -> None:
        """Add what a run of layers like this one takes at its ends."""
        self.forward_exposed_s["tp"] += layer.ends_s[0]
        self.backward_exposed_s["tp"] += layer.ends_s[1] * has_backward

    def add(self, other: "ProfiledCost") -> None:
        self.forward_s += other.forward_s
        self.input_grad_s += other.input_grad_s
        self.weight_grad_s += other.weight_grad_s
        for own, others in (
            (self.forward_exposed_s, other.forward_exposed_s),
            (self.backward_exposed_s, other.backward_exposed_s),
        ):
            for axis, time_s in others.items():
                own[axis] += time_s
