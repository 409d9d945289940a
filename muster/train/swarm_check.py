"""Check of a run whose stages a swarm of peers serves: what isn't built for that is refused, with a reason."""

from muster.config.optimizer_state import is_zeroth_order
from muster.config.run_config import RunConfig
from muster.config.swarm_rules import why_no_model, why_no_trainer_plan
from muster.spec.errors import ConfigError, InfeasibleError
from muster.spec.plan import Plan
from muster.spec.plan_name import format_plan_name


def require_swarm(config: RunConfig, plan: Plan, on_several_launchers: bool) -> None:
    """Raise InfeasibleError where a plan or a model doesn't go with a swarm, ConfigError where another key doesn't."""
    if config.swarm is None:
        return
    if (reason := why_no_trainer_plan(config.swarm, config.model, plan)) is not None:
        raise InfeasibleError(f"swarm doesn't go with plan {format_plan_name(plan)} here: {reason}")
    if (reason := why_no_model(config.model)) is not None:
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
