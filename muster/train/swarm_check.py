"""Check of a run whose stages a swarm of peers serves: what isn't built for that is refused, with a reason."""

from muster.config.run_config import RunConfig
from muster.config.swarm_rules import require_swarm_goes_with
from muster.spec.errors import ConfigError
from muster.spec.plan import Plan


def require_swarm(config: RunConfig, plan: Plan, on_several_launchers: bool) -> None:
    """Raise InfeasibleError where a plan or a model doesn't go with a swarm, ConfigError where another key, or the way
    in which the run was started, doesn't."""
    if config.swarm is None:
        return
    own = config.train, config.optim, config.outer, bool(config.plugins)
    require_swarm_goes_with(config.swarm, config.model, plan, *own)
    if on_several_launchers:
        raise ConfigError("swarm needs one trainer, and peers start with muster swarm: leave out --nodes and torchrun")
