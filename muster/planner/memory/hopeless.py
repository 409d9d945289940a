"""Plans so far beyond their memory that no recompute and no offload can make them fit, seen at their first rank.

In searches for long sequences they are most of all plans; to weigh every rank of each, and every policy of its layers,
would take most of the time.
"""

from collections.abc import Callable, Mapping

from muster.cost.activations import layer_activation_bytes, pass_sizes
from muster.planner.memory.fitter import LayerPolicy, with_policy
from muster.planner.request import PlanRequest
from muster.spec.plan import Plan
from muster.spec.plugin_model import plugin_model

FAR_BEYOND = 3.0
"""Activations of a plan's first rank over its limit from which on it is asked whether any policy can help."""

HOPELESS = 1.5
"""Memory of the first rank over its limit, with all layers recomputed and with all of that offloaded, from which on no
policy helps. Any other saves more, and recomputes less of the one layer whose backward runs: for some sizes that is
less memory, but not by half of the limit."""


def hopeless_bytes(
    request: PlanRequest,
    plan: Plan,
    limit: int | None,
    live: Mapping[int, int],
    first_rank_bytes: Callable[[Plan], float],
) -> float | None:
    """Return by how many bytes at least a plan without offload exceeds its limits if that is by so many that nothing
    can help; None if something may, or that isn't seen at a glance.

    `live`: the first rank's stages with their most in-flight micro-batches; `first_rank_bytes`: that rank's peak.
    """
    model, strategy = request.model, plan.default_strategy
    is_native = request.framework.storage != "megatron" and plugin_model(model) is None
    is_seen = is_native and request.cluster.is_uniform and not (request.optim and request.optim.freeze)
    if not is_seen or not limit:
        return None
    layers_are_alike = model.moe is None and model.linear_attention is None
    micro_batches = sum(live.values()) if layers_are_alike else live[0]
    sizes = pass_sizes(model, plan, request.workload, 0)
    of_layer = layer_activation_bytes(sizes, 0, strategy.recompute, strategy.attention)
    held = micro_batches * min(plan.layer_counts(model.num_layers)) * of_layer
    if held <= FAR_BEYOND * limit:
        return None
    policies = LayerPolicy("full"), LayerPolicy("full", "activations")
    if any(first_rank_bytes(with_policy(plan, policy)) <= HOPELESS * limit for policy in policies):
        return None
    return float(held - limit)
