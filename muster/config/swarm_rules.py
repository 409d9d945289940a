"""Plans and models whose stages a swarm of peers can serve."""

from muster.config.swarm_config import SwarmConfig
from muster.spec.model import ModelSpec
from muster.spec.plan import Plan

PRECISIONS = ("fp64", "fp32", "tf32", "bf16")


def why_no_trainer_plan(swarm: SwarmConfig, model: ModelSpec, plan: Plan) -> str | None:
    """Return why a plan can't be that of a swarm's trainer, or None."""
    stages, layers = swarm.stages, model.num_layers
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


def why_no_model(model: ModelSpec) -> str | None:
    """Return why the stages of a model can't be served by swarms, or None."""
    if model.embeds_on_last_stage:
        return "its embedding is on two stages (tied, or for multi-token prediction), whose gradients aren't joined"
    if model.moe is not None:
        return "loads and losses of routers aren't gathered from peers"
    if model.adapter is not None:
        return "adapters have no parity test with swarms"
    if model.other_stream is not None:
        return f"{model.other_stream} has no parity test with swarms"
    return None
