"""Rules for plans with parameters in host memory or on disk (`oparam`)."""

from collections.abc import Callable, Iterator

from muster.spec.layer_strategy import LayerStrategy
from muster.spec.model import ModelSpec
from muster.spec.plan import Plan
from muster.spec.rules import Rule, in_every_layer, setting

_OPTIMIZER_TIERS = {"host": ("host", "disk"), "disk": ("disk",)}
"""Places of the optimizer's state by that of the parameters: the same, or further away."""


def _rule(has: Callable[[Plan], bool], what: str) -> Rule:
    return Rule(
        lambda plan: plan.offloads_params and has(plan),
        f"offload of parameters with {what}",
        in_every_layer(
            lambda strategy: strategy.model_copy(update={"offload_param": "none", "offload_param_ratio": 1})
        ),
    )


def _lacks_optimizer_tier(strategy: LayerStrategy) -> bool:
    """Return True for parameters off the device in layers whose optimizer state isn't, or not as far."""
    if strategy.offload_param == "none":
        return False
    ratios = strategy.offload_param_ratio, 1.0
    tiers = _OPTIMIZER_TIERS[strategy.offload_param]
    return strategy.offload_optimizer not in tiers or strategy.offload_optimizer_ratio not in ratios


def _with_optimizer_tier(strategy: LayerStrategy) -> LayerStrategy:
    if not _lacks_optimizer_tier(strategy):
        return strategy
    kept = strategy.offload_optimizer in _OPTIMIZER_TIERS[strategy.offload_param]
    tier = strategy.offload_optimizer if kept else strategy.offload_param
    changes = {"offload_optimizer": tier, "offload_optimizer_ratio": strategy.offload_param_ratio}
    return strategy.model_copy(update=changes)


PARAM_OFFLOAD_RULES: tuple[Rule, ...] = (
    Rule(
        lambda plan: any(map(_lacks_optimizer_tier, plan.strategies)),
        "offload of parameters (oparam) without that of the optimizer's state (oopt; ooptd for oparamd), of the same"
        " share of the layers or of all (the host updates parameters where they lie)",
        in_every_layer(_with_optimizer_tier),
    ),
    Rule(
        lambda plan: plan.offloads_params and any(s.zero != "z3" for s in plan.strategies),
        "offload of parameters under z1 or z2 (which gather a stage's parameters for the whole step)",
        in_every_layer(lambda strategy: strategy.model_copy(update={"zero": "z3"})),
    ),
    Rule(
        lambda plan: plan.offloads_params and plan.bucket_layers > 1,
        "offload of parameters with bucket_layers above 1 (layers are copied one by one)",
        setting(bucket_layers=1),
    ),
    _rule(lambda plan: plan.split_backward, "a schedule whose backward is split (not tested yet)"),
    _rule(
        lambda plan: any(mesh.dp_replicate > 1 for mesh in plan.distinct_meshes),
        "dp_replicate above 1 (sums over replicas would wait on the device)",
    ),
    _rule(
        lambda plan: not plan.offloads_by_layer and any(s.offload == "activations" for s in plan.strategies),
        "activations in host memory in a pipeline (whose copies would wait for those of parameters; oactd keeps them on"
        " disk)",
    ),
    _rule(lambda plan: plan.vocab_parallel, "vocab_parallel (not tested yet)"),
    _rule(lambda plan: plan.dynamic_context_parallel, "cpdyn (not tested yet)"),
    _rule(
        lambda plan: plan.precision == "fp16" and any(s.offload_param == "disk" for s in plan.strategies),
        "fp16 on disk (gradients are written before their loss scale is known to hold)",
    ),
)
"""Things that can't be beside offload of parameters in a plan for any model."""

_MODELS: tuple[tuple[Callable[[ModelSpec], bool], str], ...] = (
    (lambda model: model.moe is not None, "experts (not tested yet)"),
    (lambda model: model.mtp_layers > 0, "multi-token prediction (not tested yet)"),
    (lambda model: model.adapter is not None, "adapters (whose frozen weights have no update)"),
)


def param_offload_rules_of(model: ModelSpec) -> Iterator[Rule]:
    """Yield the rules for a model's own parts."""
    return (_rule(lambda plan: True, what) for has, what in _MODELS if has(model))
