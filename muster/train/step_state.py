"""State of one optimizer step while it is under way, and the hooks that others have into each step."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor


@dataclass
class StepState:
    """One optimizer step under way: known when its batch is loaded, completed by the all-reduce over all ranks."""

    step: int
    """Number of the step, from 1."""
    learning_rate: float
    num_valid: int
    """Non-ignored labels of the global batch; at least 1."""
    num_tokens: int
    """Positions of the global batch that are no padding."""
    valid_by_stage: Mapping[int, int] = field(default_factory=dict)
    """Stage → those of the micro-batches that pass through it, where some skip it."""
    loss: float = math.nan
    """Mean cross-entropy over the non-ignored labels."""
    z_loss: float = math.nan
    """Mean z-loss, by the same divisor."""
    load_balancing_loss: float = math.nan
    """Sum of the layers' load-balancing losses with their coefficient, by the same divisor."""
    router_z_loss: float = math.nan
    """Sum of the z-losses of the layers' routers, likewise."""
    mtp_loss: float = math.nan
    """Mean of the losses of multi-token prediction with its factor, likewise."""
    grad_norm: float = math.nan
    """Global gradient norm before clipping; of a zeroth-order step the size of `slope`."""
    slope: float = math.nan
    """Slope of the loss along the direction of a zeroth-order step, before clipping."""
    router_load: Tensor | None = None
    """Choices of each expert in the step and the number of dropped ones, on the host: float64 [layers with experts,
    E + 1]; None in a model without experts."""
    skip_reason: str | None = None
    """Reason why the step changes nothing; None when it is applied."""
    stop_requested: bool = False
    """Set when any rank was asked to stop."""
    leave_requested: bool = False
    """Set when any rank has a place in a next generation of ranks, which begins at the end of a step."""
    is_saving: bool = False
    """Set when any rank is still busy with a checkpoint."""
    save_failed: bool = False
    """Set when a checkpoint has failed since the step before."""


def no_step() -> StepState:
    """Return the state outside of a step: nothing is learnt at a learning rate of 0."""
    return StepState(step=0, learning_rate=0.0, num_valid=1, num_tokens=0)


@dataclass(frozen=True)
class StepHooks:
    """Functions that a trainer calls in each step; the defaults suit a trainer without a run around it."""

    stop_requested: Callable[[], bool] = lambda: False
    """True once this rank was asked to stop."""
    leave_requested: Callable[[], bool] = lambda: False
    """True once this rank has a place in the next generation of ranks."""
    save_status: Callable[[], tuple[bool, bool]] = lambda: (False, False)
    """(this rank is still saving a checkpoint, a checkpoint has failed since the last call)."""
    before_update: Callable[[], None] = lambda: None
    """Called before parameters and optimizer state change."""
    state_folder: Path | None = None
    """Folder of the files of optimizer state on disk; None: the system's for temporary files."""
