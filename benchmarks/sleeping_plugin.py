"""Plugin that lets each layer sleep in its passes: training steps that take time, but hardly any core."""

from typing import Any, cast

from torch import Tensor

from benchmarks.sleeping_layers import Slept
from muster.model.decoder import Layer

FORWARD_S = 0.005
"""Seconds of a layer's forward for one sequence; the backward takes twice as long."""

_compute = Layer.forward


def _sleep_and_compute(self: Layer, x_BSD: Tensor, *constants: Any) -> Tensor:
    return _compute(self, cast(Tensor, Slept.apply(x_BSD, FORWARD_S, 2 * FORWARD_S)), *constants)


Layer.forward = _sleep_and_compute  # type: ignore[method-assign]
