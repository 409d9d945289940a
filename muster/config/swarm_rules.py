"""Runs whose stages a swarm of peers can serve; training and prediction refuse the others by the same rules."""

from muster.config.optim_config import OptimConfig
from muster.config.optimizer_state import is_zeroth_order
from muster.config.outer_config import OuterConfig
from muster.config.run_config import TrainConfig
from muster.config.swarm_config import SwarmConfig
from muster.spec.errors import ConfigError, InfeasibleError
from muster.spec.model import ModelSpec
from muster.spec.plan import DEFAULT_SCHEDULE, Plan
from muster.spec.plan_name import format_plan_name

PRECISIONS = ("fp64", "fp32", "bf16")


def require_swarm_goes_with(
    swarm: SwarmConfig,
    model: ModelSpec,
    plan: Plan,
    train: TrainConfig | None,
    optim: OptimConfig | None,
    outer: OuterConfig | None,
    has_plugins: bool,
) -> None:
    """Raise InfeasibleError where a plan or a model doesn't go with a swarm, ConfigError where another key doesn't;
    None stands for a section that a run file leaves out."""
    if reason := _why_no_trainer_plan(swarm, model, plan):
        raise InfeasibleError(f"swarm doesn't go with plan {format_plan_name(plan)}: {reason}")
    if reason := _why_no_model(model):
        raise InfeasibleError(f"swarm doesn't go with model {model.name}: {reason}")
    wanted = {"outer": outer is not None, "plugins": has_plugins}
    if train is not None:
        wanted |= {
            "train.elastic": train.elastic,
            "train.in_memory_checkpoint_every": train.in_memory_checkpoint_every > 0,
            "train.training_step": train.training_step is not None,
            "train.loss": train.loss is not None,
            "train.delayed_update": train.delayed_update,
            "train.update_in_backward": train.update_in_backward,
        }
    if optim is not None:
        wanted |= {"optim.freeze": bool(optim.freeze), f"optim.name {optim.name}": is_zeroth_order(optim)}
    for key, is_set in wanted.items():
        if is_set:
            raise ConfigError(f"{key} isn't built for swarms: leave it out, or take a plan without section swarm")


def cut_into_stages(plan: Plan, stages: int) -> Plan:
    """Return the plan whose Program a swarm executes: the trainer's, cut into the stages that swarms serve."""
    return Plan.model_validate(plan.model_dump() | {"pp": stages})


def _why_no_trainer_plan(swarm: SwarmConfig, model: ModelSpec, plan: Plan) -> str | None:
    """Return why a plan can't be that of a swarm's trainer, or None."""
    stages, layers = swarm.stages, model.num_layers
    if plan.world_size > 1:
        return (
            f"it has {plan.world_size} ranks, and peers, each a single rank, take their place: expected one, such as"
            f" mb{plan.micro_batch_size}, and swarm.stages in the place of pp"
        )
    if plan.vpp > 1 or plan.stages:
        return "swarm.stages cuts the model, evenly: leave out the stages of the plan (v after pp, and l)"
    if plan.schedule != DEFAULT_SCHEDULE:
        return (
            f"its trainer sends passes as they become ready, in the order of {DEFAULT_SCHEDULE}: leave out schedule"
            f" {plan.schedule}"
        )
    if plan.vocab_parallel:
        return "vocab needs collectives among the stages, which peers of a swarm don't have: leave it out"
    if stages > layers:
        return f"swarm.stages {stages} are more than the model's {layers} layers: expected at most {layers}"
    if plan.precision not in PRECISIONS:
        return f"precision {plan.precision} isn't built for swarms: expected one of {', '.join(PRECISIONS)}"
    if plan.post_validation or plan.sequence_slices > 1 or plan.sequence_tiles > 1 or plan.offloads_params:
        return "post_validation, slices, tiles and oparam aren't tested with swarms: leave them out"
    if any(own.offload != "none" or own.offload_optimizer != "none" for own in plan.strategies):
        return "offload isn't tested with swarms: leave oact and oopt out"
    return None


def _why_no_model(model: ModelSpec) -> str | None:
    """Return why the stages of a model can't be served by swarms, or None."""
    if model.embeds_on_last_stage:
        return "its embedding is on two stages (tied, or for multi-token prediction), whose gradients aren't joined"
    if model.moe is not None:
        return "loads and losses of routers aren't gathered from peers"
    if model.adapter is not None:
        return "adapters aren't tested with swarms"
    if model.other_stream is not None:
        return f"{model.other_stream} isn't tested with swarms"
    return None
