"""Loss scaling for fp16: the loss is multiplied so that small gradients don't underflow, and the gradients are
divided."""

from collections.abc import Mapping
from typing import Any

INITIAL_SCALE, GROWTH_STEPS = 2.0**16, 2000
"""Values of PyTorch's GradScaler; see P. Micikevicius et al., Mixed Precision Training, arXiv:1710.03740 §3.2."""


class LossScale:
    """A power of 2: halved by a step whose gradients overflowed, doubled after `GROWTH_STEPS` that didn't."""

    def __init__(self, value: float = INITIAL_SCALE) -> None:
        self.value = value
        self._good_steps = 0

    def update(self, overflowed: bool) -> None:
        """Adjust the scale after a step; all ranks pass the same."""
        self._good_steps = 0 if overflowed else self._good_steps + 1
        if overflowed:
            self.value = max(1.0, self.value / 2)
        elif self._good_steps == GROWTH_STEPS:
            self.value, self._good_steps = self.value * 2, 0

    def state(self) -> dict[str, Any]:
        """Return the state that the next scale depends on."""
        return {"value": self.value, "good_steps": self._good_steps}

    def load(self, state: Mapping[str, Any]) -> None:
        """Resume from a `state`."""
        self.value, self._good_steps = state["value"], state["good_steps"]
