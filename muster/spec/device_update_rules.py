"""Rules for updates by the device with optimizer state that comes from host memory (`device_update_ratio`)."""

from collections.abc import Callable

from muster.spec.layer_strategy import LayerStrategy
from muster.spec.plan import Plan
from muster.spec.rules import Rule, in_every_layer


def updates_fetched_state(plan: Plan) -> bool:
    """Return True if the device updates some layers with optimizer state from host memory."""
    return any(strategy.device_update_ratio > 0 for strategy in plan.strategies)


def _without_device_updates(strategy: LayerStrategy) -> LayerStrategy:
    return strategy.model_copy(update={"device_update_ratio": 0.0})


def _rule(broken: Callable[[Plan], bool], what: str) -> Rule:
    return Rule(
        lambda plan: updates_fetched_state(plan) and broken(plan),
        f"updates by the device with state from host memory (devupdateR) beside {what}",
        in_every_layer(_without_device_updates),
    )


DEVICE_UPDATE_RULES: tuple[Rule, ...] = (
    _rule(
        lambda plan: all(strategy.offload_optimizer == "none" for strategy in plan.strategies),
        "optimizer state that is all on the device (they need oopt)",
    ),
    _rule(
        lambda plan: any(strategy.offload_optimizer == "disk" for strategy in plan.strategies),
        "state on disk (only the host reads ooptd)",
    ),
    _rule(
        lambda plan: plan.offloads_params,
        "parameters off the device (the host updates oparam where it lies)",
    ),
)
"""Things that can't be beside these updates in a plan."""
