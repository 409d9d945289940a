"""Result of a training step."""

from dataclasses import dataclass


@dataclass(frozen=True)
class StepResult:
    """Result of one optimizer step; the same on every rank."""

    step: int
    loss: float
    """Mean cross-entropy over the non-ignored labels of the step."""
    z_loss: float
    """Mean z-loss, which training adds to the loss."""
    grad_norm: float
    learning_rate: float
    num_tokens: int
    """Positions that are no padding."""
    time_s: float
    data_s: float
    skip_reason: str | None
    """Reason why the step changed nothing, as a continuation of `step 7 was skipped: `; None when it was applied."""
    total_skips: int
    """Steps skipped since the first, this one included."""
    consecutive_skips: int
    """Consecutive skipped steps, this one included."""
    stop_requested: bool
    """True when any rank was asked to stop."""
    is_saving: bool = False
    """True when any rank was still busy with a checkpoint."""
    save_failed: bool = False
    """True when a checkpoint has failed since the step before."""
    load_balancing_loss: float = 0.0
    """Sum of the layers' load-balancing losses with their coefficient, by the divisor of the loss."""
    router_z_loss: float = 0.0
    """Sum of the z-losses of the layers' routers, likewise."""
