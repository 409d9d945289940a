"""Ladder residual: attention and MLP read the residual stream without the output of the one right before them
(M. Zhang et al., arXiv:2501.06589).

With sub-layers f₁, f₂, … (attention and MLP in turns), r₀ the embeddings and h_i = f_i(r_{i−2}), the stream is
r_i = r_{i−1} + h_i; f₁ and f₂ both read r₀. So h_i may be on its way to this rank while f_{i+1} computes.

Suffixes: B sequences, S positions, D hidden width.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor


class LadderState(NamedTuple):
    """Hidden state between two sub-layers."""

    x_BSD: Tensor
    """Residual stream, without the output of the last sub-layer."""
    pending_BSD: Tensor | None
    """Output of the last sub-layer, which may still be on its way; None before the first one."""
    arrival: Any = None
    """Communication that `pending_BSD` waits for."""
    gradients: Any = None
    """Terms of the gradient of `x_BSD` that are on their way in a backward."""


class Ladder:
    """Steps of a ladder on one device; tensor parallelism replaces it by one whose sums travel beside sub-layers."""

    def begin(self, x_BSD: Tensor, pending_BSD: Tensor | None = None) -> LadderState:
        """Return the state that a stage's first sub-layer finds."""
        return LadderState(x_BSD, pending_BSD)

    def step(self, state: LadderState, sublayer: Callable[[Tensor], Tensor]) -> LadderState:
        """Apply a sub-layer, and add the output of the one before to the stream."""
        y_BSD = sublayer(state.x_BSD)
        return LadderState(self._sum(state), y_BSD)

    def end(self, state: LadderState) -> Tensor:
        """Return the whole stream (B, S, D)."""
        return self._sum(state)

    def repeating(self) -> AbstractContextManager[None]:
        """Return a context for a forward that the backward repeats."""
        return nullcontext()

    def settle(self) -> None:
        """Wait for the output of the sub-layer that has just run."""

    def at_boundary(self, state: LadderState) -> Tensor:
        """Return what a pipeline stage passes to the next one, (B, S, 2 D): stream and pending output."""
        assert state.pending_BSD is not None, "a stage has a layer at least"
        return torch.cat((state.x_BSD, state.pending_BSD), -1)

    def from_boundary(self, both_BSE: Tensor) -> LadderState:
        """Return the state that the stage before passed on, (B, S, 2 D)."""
        x_BSD, pending_BSD = both_BSE.chunk(2, -1)
        return self.begin(x_BSD, pending_BSD)

    @staticmethod
    def _sum(state: LadderState) -> Tensor:
        return state.x_BSD if state.pending_BSD is None else state.x_BSD + state.pending_BSD
