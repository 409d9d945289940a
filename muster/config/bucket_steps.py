"""Requirements of runs whose buckets of parameters are updated one after another (`stepgather`)."""

from muster.config.optim_config import OptimConfig
from muster.config.optimizers import OPTIMIZERS
from muster.config.run_config import TrainConfig
from muster.spec.errors import InfeasibleError
from muster.spec.plan import Plan


def require_bucket_steps(plan: Plan, optim: OptimConfig | None, train: TrainConfig | None) -> None:
    """Raise InfeasibleError where an optimizer or a training loop can't update a plan's parameters bucket by bucket;
    None: the default one. What a model has against it is among the plan's rules (`spec/gather_rules.py`)."""
    if not plan.overlap_param_gather_with_optimizer_step:
        return
    for is_there, what in (*_against_optimizer(optim), *_against_loop(train)):
        if is_there:
            raise InfeasibleError(
                f"stepgather updates elements by themselves, in buckets, which doesn't go with {what}"
            )


def _against_optimizer(optim: OptimConfig | None) -> tuple[tuple[bool, str], ...]:
    if optim is None:
        return ()
    entry = OPTIMIZERS.get(optim.name)
    is_elementwise = entry is not None and entry.matrix_rule is None and not entry.rule.has_owned_state
    return (
        (not is_elementwise or entry is None or entry.is_zeroth_order, f"optim.name {optim.name}: take adamw"),
        (optim.ema_decay > 0, "optim.ema_decay, whose average follows all updates: set it to 0"),
    )


def _against_loop(train: TrainConfig | None) -> tuple[tuple[bool, str], ...]:
    if train is None:
        return ()
    return (
        (train.training_step is not None, "train.training_step, which updates by itself: leave stepgather out"),
        (train.elastic, "train.elastic (not tested yet): leave stepgather out"),
    )
