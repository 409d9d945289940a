"""Plugin that lets each layer sleep in its passes: training steps that take time, but hardly any core."""

from contextlib import ExitStack

from benchmarks.sleeping_layers import sleeping_layers

FORWARD_S = 0.005
"""Seconds of a layer's forward for one sequence."""

_to_the_end_of_the_process = ExitStack()
_to_the_end_of_the_process.enter_context(sleeping_layers(FORWARD_S))
