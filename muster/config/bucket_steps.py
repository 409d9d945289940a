"""Requirements of runs whose buckets of parameters are updated one after another (`stepgather`)."""

from muster.config.optimizers import OPTIMIZERS
from muster.config.run_config import RunConfig
from muster.spec.errors import InfeasibleError


def require_bucket_steps(config: RunConfig) -> None:
    """Raise InfeasibleError where a run's optimizer or model can't be updated bucket by bucket."""
    if not config.parallel.overlap_param_gather_with_optimizer_step:
        return
    optim, model, train = config.optim, config.model, config.train
    entry = OPTIMIZERS.get(optim.name)
    is_elementwise = entry is not None and entry.matrix_rule is None and not entry.rule.has_owned_state
    refused = (
        (not is_elementwise or entry is None or entry.is_zeroth_order, f"optim.name {optim.name}: take adamw"),
        (optim.ema_decay > 0, "optim.ema_decay, whose average follows all updates: set it to 0"),
        (model.moe is not None, "experts, whose biases move behind the update: leave stepgather out"),
        (model.adapter is not None, "model.adapter (it has no parity test yet): leave stepgather out"),
        (train.training_step is not None, "train.training_step, which updates by itself: leave stepgather out"),
        (train.elastic, "train.elastic (it has no parity test yet): leave stepgather out"),
        (train.recovery == "checkfree", "train.recovery checkfree (it has no parity test yet): leave stepgather out"),
    )
    for is_there, what in refused:
        if is_there:
            raise InfeasibleError(
                f"stepgather updates elements by themselves, in buckets, which doesn't go with {what}"
            )
