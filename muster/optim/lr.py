"""Learning-rate schedules as pure functions of the step."""

from collections.abc import Callable
from math import cos, pi, sqrt

from muster.config.optim_config import OptimConfig
from muster.spec.errors import ConfigError
from muster.spec.suggest import did_you_mean

DECAY_SHAPES: dict[str, Callable[[float], float]] = {
    "linear": lambda progress: 1 - progress,
    "cosine": lambda progress: 0.5 * (1 + cos(pi * progress)),
    "sqrt": lambda progress: 1 - sqrt(progress),
}
"""Decay of the learning rate: from 1 at progress 0 to 0 at progress 1."""

LR_SCHEDULES = ("cosine", "linear", "wsd")


def lr_at_step(optim: OptimConfig, step: int, total_steps: int) -> float:
    """Return the configured learning rate of step `step`, counted from 0, of `total_steps`."""
    return learning_rate(
        step,
        peak=optim.lr,
        warmup_steps=optim.warmup_steps,
        total_steps=total_steps,
        min_ratio=optim.min_lr_ratio,
        schedule=optim.schedule,
        decay_fraction=optim.decay_fraction,
        decay_shape=optim.decay_shape,
    )


def learning_rate(
    step: int,
    *,
    peak: float,
    warmup_steps: int,
    total_steps: int,
    min_ratio: float,
    schedule: str = "cosine",
    decay_fraction: float = 0.2,
    decay_shape: str = "linear",
) -> float:
    """Return the rate of step `step`, counted from 0: a linear warm-up to `peak`, then decay to min_ratio · peak.

    `cosine` and `linear` decay all the way. `wsd` (warm-up, stable, decay: S. Hu et al., arXiv:2404.06395; shape sqrt:
    A. Hägele et al., arXiv:2405.18392) stays at the peak until the last decay_fraction · total_steps steps, in which it
    decays in the shape `decay_shape`. Step 0 already has 1 / warmup_steps of the peak, step warmup_steps − 1 has the
    peak itself, and the last step, like every later one, has the minimum. Raises ConfigError on an unknown schedule.
    """
    if schedule not in LR_SCHEDULES:
        hint = did_you_mean(schedule, LR_SCHEDULES)
        raise ConfigError(f"unknown learning-rate schedule '{schedule}'{hint} (there are {', '.join(LR_SCHEDULES)})")
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    decay_start = warmup_steps
    shape = schedule
    if schedule == "wsd":
        decay_start = max(warmup_steps, total_steps - max(1, round(decay_fraction * total_steps)))
        shape = decay_shape
    progress = min(1.0, max(0, step + 1 - decay_start) / max(1, total_steps - decay_start))
    return peak * (min_ratio + (1 - min_ratio) * DECAY_SHAPES[shape](progress))
