"""Plans that outer steps go with; training and prediction refuse the others by the same rules."""

from muster.config.outer_config import OuterConfig
from muster.spec.errors import ConfigError, InfeasibleError
from muster.spec.plan import Plan
from muster.spec.plan_name import format_plan_name


def require_plan_with_outer_steps(outer: OuterConfig | None, plan: Plan) -> None:
    """Raise ConfigError where outer steps are given for a plan without islands, InfeasibleError as
    `require_peer_plan`; None stands for a section that a run file leaves out."""
    if outer is None:
        return
    if outer.coordinator is not None:
        require_peer_plan(plan)
    elif plan.islands == 1:
        raise ConfigError(
            f"outer is for plans with islands, and {format_plan_name(plan)} has none: expected a plan such as"
            f" isl2-{format_plan_name(plan)}, an outer.coordinator, or no outer steps"
        )


def require_peer_plan(plan: Plan) -> None:
    """Raise InfeasibleError where a plan can't be that of a peer of a coordinator."""
    reason = None
    if plan.islands > 1:
        reason = "each peer is an island already: leave out isl"
    elif plan.world_size > 1:
        reason = f"it has {plan.world_size} ranks, and peers of several ranks aren't built: expected one"
    elif plan.post_validation or plan.offloads_params or any(s.offload_optimizer != "none" for s in plan.strategies):
        reason = "post_validation, oopt and oparam aren't tested with peers: leave them out"
    if reason is not None:
        raise InfeasibleError(f"outer.coordinator doesn't go with plan {format_plan_name(plan)}: {reason}")
