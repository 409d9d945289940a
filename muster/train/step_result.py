"""Result of a training step."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import log

from muster.spec.formatting import format_bytes
from muster.spec.units import pluralize


@dataclass(frozen=True)
class ExpertLoad:
    """Load of one layer's experts in a step."""

    layer: int
    max_over_mean: float
    """Tokens of the expert that was chosen most, relative to the mean; 1 where the load is even."""
    entropy: float
    """Entropy of the experts' shares, relative to that of an even load: 1 at most."""
    dropped: float
    """Share of the choices that exceeded an expert's capacity."""
    counts: tuple[float, ...] = ()
    """Choices of each expert."""


def expert_load(layer: int, counts: Iterable[float], dropped: float) -> ExpertLoad:
    """Return the load of a layer from the choices of each expert, and the number of those that were dropped."""
    chosen = list(counts)
    total = sum(chosen)
    if not total:
        return ExpertLoad(layer, 1.0, 1.0, 0.0, tuple(chosen))
    shares = [count / total for count in chosen]
    entropy = -sum(share * log(share) for share in shares if share) / log(len(shares)) if len(shares) > 1 else 1.0
    return ExpertLoad(layer, max(shares) * len(shares), entropy, dropped / total, tuple(chosen))


@dataclass(frozen=True)
class ExpertMoves:
    """Moves of experts between ranks after a step, by their load since the moves before."""

    num_experts: int
    """Experts of all layers that have moved."""
    num_bytes: int
    """Bytes that all ranks together have sent for them."""
    time_s: float
    """Time on this rank."""
    max_over_mean_before: float
    """Load of the fullest expert-parallel rank relative to the mean, on average over the layers, as it was."""
    max_over_mean_after: float
    """The same, as it would have been with the experts in the places of now."""
    predicted_s: float | None = None
    """Time that moves before the first step, timed there and back, predict; None without these."""

    def __str__(self) -> str:
        load = f"the fullest rank {{}} {self.max_over_mean_before:.2f} times the mean load"
        if not self.num_experts:
            return f"no expert moved: {load.format('has')}, and no move pays"
        predicted = "" if self.predicted_s is None else f", predicted {self.predicted_s:.2f} s"
        took = f"{format_bytes(self.num_bytes)} in {self.time_s:.2f} s{predicted}"
        moved = f"{pluralize(self.num_experts, 'expert')} moved ({took})"
        return f"{moved}: {load.format('had')}, and would have had {self.max_over_mean_after:.2f} with them moved"


@dataclass(frozen=True)
class StepResult:
    """Result of one optimizer step; all but the times is the same on every rank."""

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
    """Time for which this rank waited for its samples."""
    skip_reason: str | None
    """Reason why the step changed nothing, as a continuation of `step 7 was skipped: `; None when it was applied."""
    total_skips: int
    """Steps skipped since the first, this one included."""
    consecutive_skips: int
    """Consecutive skipped steps, this one included."""
    stop_requested: bool
    """True when any rank was asked to stop."""
    leave_requested: bool = False
    """True when any rank has a place in a next generation of ranks, which begins at the end of a step."""
    is_saving: bool = False
    """True when any rank was still busy with a checkpoint."""
    save_failed: bool = False
    """True when a checkpoint has failed since the step before."""
    load_balancing_loss: float = 0.0
    """Sum of the layers' load-balancing losses with their coefficient, by the divisor of the loss."""
    router_z_loss: float = 0.0
    """Sum of the z-losses of the layers' routers, likewise."""
    mtp_loss: float = 0.0
    """Mean of the losses of multi-token prediction with its factor, likewise."""
    expert_load: tuple[ExpertLoad, ...] = ()
    """Load of each layer with experts, in the layers' order."""
    expert_moves: ExpertMoves | None = None
    """Moves of experts after this step; None where none were considered."""
    core_wait_s: float = 0.0
    """Time for which this rank could run and had no core of a CPU; 0.0 on a GPU, whose passes need none."""
