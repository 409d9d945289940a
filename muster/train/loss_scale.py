"""Loss scaling: the loss is multiplied so that small gradients don't become 0 in fp16, and the gradients divided."""

from collections.abc import Mapping
from typing import Any

INITIAL_SCALE, GROWTH_STEPS = 2.0**16, 2000
"""As in PyTorch's GradScaler: P. Micikevicius et al., Mixed Precision Training, arXiv:1710.03740 §3.2."""


class LossScale:
    """A power of 2: halved by a step whose gradients overflowed, doubled after many that didn't."""

    def __init__(self, value: float = INITIAL_SCALE) -> None:
        self.value = value
        self._good_steps = 0

    def update(self, overflowed: bool) -> None:
        """Takes note of how a step ended. All ranks tell it the same."""
        self._good_steps = 0 if overflowed else self._good_steps + 1
        if overflowed:
            self.value = max(1.0, self.value / 2)
        elif self._good_steps == GROWTH_STEPS:
            self.value, self._good_steps = self.value * 2, 0

    def state(self) -> dict[str, Any]:
        """All that the next scale depends on."""
        return {"value": self.value, "good_steps": self._good_steps}

    def load(self, state: Mapping[str, Any]) -> None:
        """Goes on from a `state`."""
        self.value, self._good_steps = state["value"], state["good_steps"]
