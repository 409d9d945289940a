"""Check of a run whose stages a swarm of peers serves: what isn't built for that is refused, with a reason."""

from muster.config.optimizer_state import is_zeroth_order
from muster.config.run_config import RunConfig
from muster.spec.errors import ConfigError, InfeasibleError
from muster.spec.plan import Plan
from muster.spec.plan_name import format_plan_name

PRECISIONS = ("fp64", "fp32", "tf32", "bf16")


def require_swarm(config: RunConfig, plan: Plan, on_several_launchers: bool) -> None:
    """Raise InfeasibleError where a plan or a model doesn't go with a swarm, ConfigError where another key doesn't."""
    if config.swarm is None:
        return
    if (reason := _why_no_plan(config, plan)) is not None:
        raise InfeasibleError(f"swarm doesn't go with plan {format_plan_name(plan)} here: {reason}")
    if (reason := _why_no_model(config)) is not None:
        raise InfeasibleError(f"swarm doesn't go with model {config.model.name}: {reason}")
    if on_several_launchers:
        raise ConfigError("swarm needs one trainer, and peers start with muster swarm: leave out --nodes and torchrun")
    train = config.train
    wanted = {
        "outer": config.outer is not None,
        "train.elastic": train.elastic,
        "train.in_memory_checkpoint_every": train.in_memory_checkpoint_every > 0,
        "train.training_step": train.training_step is not None,
        "train.loss": train.loss is not None,
        "train.delayed_update": train.delayed_update,
        "train.update_in_backward": train.update_in_backward,
        "optim.freeze": bool(config.optim.freeze),
        f"optim.name {config.optim.name}": is_zeroth_order(config.optim),
        "plugins": bool(config.plugins),
    }
    for key, is_set in wanted.items():
        if is_set:
            raise ConfigError(f"{key} isn't built for swarms: leave it out, or take a plan without section swarm")


def _why_no_plan(config: RunConfig, plan: Plan) -> str | None:
    """Return why a plan can't be that of a swarm's trainer, or None."""
    assert config.swarm is not None
    stages, layers = config.swarm.stages, config.model.num_layers
    if plan.world_size > 1:
        return (
            f"it has {plan.world_size} ranks, and peers, each a single rank, take their place: expected one, such as"
            f" mb{plan.micro_batch_size}, and swarm.stages in the place of pp"
        )
    if stages > layers:
        return f"swarm.stages {stages} are more than the model's {layers} layers: expected at most {layers}"
    if plan.precision not in PRECISIONS:
        return f"precision {plan.precision} isn't built for swarms: expected one of {', '.join(PRECISIONS)}"
    if plan.post_validation or plan.sequence_slices > 1 or plan.sequence_tiles > 1 or plan.offloads_params:
        return "post_validation, slices, tiles and oparam have no parity test with swarms: leave them out"
    if any(own.offload != "none" or own.offload_optimizer != "none" for own in plan.strategies):
        return "offload has no parity test with swarms: leave oact and oopt out"
    return None


def _why_no_model(config: RunConfig) -> str | None:
    """Return why the stages of a model can't be served by swarms, or None."""
    model = config.model
    if model.embeds_on_last_stage:
        return "its embedding is on two stages (tied, or for multi-token prediction), whose gradients aren't joined"
    if model.moe is not None:
        return "loads and losses of routers aren't gathered from peers"
    if model.adapter is not None:
        return "adapters have no parity test with swarms"
    if model.other_stream is not None:
        return f"{model.other_stream} has no parity test with swarms"
    return None
