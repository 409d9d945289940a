"""Skipping of steps that would spoil the model, because a batch or a device has gone wrong."""

import math
from collections import deque
from collections.abc import Mapping
from statistics import fmean, stdev
from typing import Any

from muster.config.run_config import TrainConfig


class StepSkipper:
    """Decides for each step, by its loss and its gradient norm, whether it is skipped, and counts skipped steps.

    All ranks pass the same sums, so all decide alike. A value is a spike when it lies more than `train.spike_sigmas`
    standard deviations above its mean over the last applied steps, at most `train.spike_window` and at least half as
    many (the rule of OLMo-core's SkipStepOptimizer). Skipped steps don't count in that mean, so one spike can't hide
    the next.
    """

    def __init__(self, train: TrainConfig) -> None:
        self.total = 0
        """Steps skipped so far."""
        self.consecutive = 0
        """Steps skipped since the last one that was applied."""
        self._sigmas, self._min_recent = train.spike_sigmas, max(2, train.spike_window // 2)
        self._recent: deque[tuple[float, float]] = deque(maxlen=train.spike_window)

    def check(self, loss: float, grad_norm: float) -> str | None:
        """Return the reason for skipping a step, as a continuation of `step 7 was skipped: `; None to apply it."""
        reason = self._reason("loss", 0, loss) or self._reason("gradient norm", 1, grad_norm)
        if reason is not None:
            self.total += 1
            self.consecutive += 1
            return reason
        self.consecutive = 0
        if self._sigmas:
            self._recent.append((loss, grad_norm))
        return None

    def _reason(self, what: str, index: int, value: float) -> str | None:
        if not math.isfinite(value):
            return f"its {what} is {value}"
        if not self._sigmas or len(self._recent) < self._min_recent:
            return None
        values = [pair[index] for pair in self._recent]
        mean, sigma = fmean(values), stdev(values)
        if value <= mean + self._sigmas * sigma:
            return None
        return (
            f"its {what} {value:.4g} is a spike, more than {self._sigmas:g} standard deviations ({sigma:.2g}) above the"
            f" mean {mean:.4g} of the last {len(values)} steps"
        )

    def state(self) -> dict[str, Any]:
        """Return the state that later decisions depend on; JSON holds it without loss."""
        return {"total": self.total, "in_row": self.consecutive, "recent": list(self._recent)}

    def load(self, state: Mapping[str, Any]) -> None:
        """Resume from a `state`."""
        self.total, self.consecutive = state["total"], state["in_row"]
        self._recent.clear()
        if self._sigmas:
            self._recent.extend((loss, norm) for loss, norm in state["recent"])
