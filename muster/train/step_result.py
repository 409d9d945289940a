"""What a step of training gives."""

from dataclasses import dataclass


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did; the same on every rank."""

    step: int
    loss: float
    """Cross-entropy: mean over the step's counted target tokens."""
    z_loss: float
    """What the z-loss adds to it in training."""
    grad_norm: float
    learning_rate: float
    num_tokens: int
    """Positions that are no padding."""
    time_s: float
    data_s: float
    skip_reason: str | None
    """Why the step changed nothing, in words that go after `step 7 was skipped: `; None when it was applied."""
    total_skips: int
    """Steps skipped since the first, this one included."""
    consecutive_skips: int
    """Steps skipped since the last that was applied, this one included."""
    stop_requested: bool
    """Whether any rank was asked to stop."""
    is_saving: bool = False
    """Whether any rank was still busy with a checkpoint."""
    save_failed: bool = False
    """Whether a checkpoint that was begun has failed since the step before."""
