"""Rules for plans of a model whose sub-layers read the stream without the output right before (`residual: ladder`)."""

from collections.abc import Callable

from muster.spec.layer_strategy import LayerStrategy
from muster.spec.model import ModelSpec
from muster.spec.plan import SCALED_PRECISIONS, Plan
from muster.spec.rules import Rule, in_every_layer, setting

_UNTESTED = "it has no parity test yet"


def _strategy_rule(has: Callable[[LayerStrategy], bool], what: str, **values: object) -> Rule:
    return Rule(
        lambda plan: any(map(has, plan.strategies)),
        f"{what} of a model with residual ladder",
        in_every_layer(lambda strategy: strategy.model_copy(update=values)),
    )


def _plan_rule(has: Callable[[Plan], bool], what: str, **values: object) -> Rule:
    return Rule(has, f"{what} of a model with residual ladder ({_UNTESTED})", setting(**values))


LADDER_RULES: tuple[Rule, ...] = (
    Rule(
        lambda plan: plan.uses_axis("tp") and any(strategy.sp for strategy in plan.strategies),
        "sp of a model with residual ladder (the all-gather before a sub-layer would queue behind the reduce-scatter"
        " that should travel beside it)",
        in_every_layer(lambda strategy: strategy.model_copy(update={"sp": False, "tp_overlap": "none"})),
    ),
    _strategy_rule(
        lambda strategy: strategy.tp_overlap == "domino",
        "tp_overlap domino (whose collectives travel beside the next sub-layer anyhow)",
        tp_overlap="none",
    ),
    _strategy_rule(
        lambda strategy: strategy.offload != "none", f"offload of activations ({_UNTESTED})", offload="none"
    ),
    _strategy_rule(
        lambda strategy: strategy.offload_param != "none",
        f"offload of parameters ({_UNTESTED})",
        offload_param="none",
    ),
    _plan_rule(lambda plan: plan.vocab_parallel, "vocab_parallel", vocab_parallel=False),
    _plan_rule(lambda plan: plan.sequence_tiles > 1, "sequence_tiles", sequence_tiles=1),
    _plan_rule(lambda plan: plan.sequence_slices > 1, "sequence_slices", sequence_slices=1),
    _plan_rule(lambda plan: plan.dynamic_context_parallel, "cpdyn", dynamic_context_parallel=False),
    _plan_rule(lambda plan: plan.compile is True, "compile", compile=False),
    _plan_rule(lambda plan: plan.cuda_graphs, "cuda_graphs", cuda_graphs=False),
    _plan_rule(lambda plan: plan.precision in SCALED_PRECISIONS, "fp8 or nvfp4", precision="bf16"),
)
"""Things that the runtime can't do for such a model."""


def ladder_rules_of(model: ModelSpec) -> tuple[Rule, ...]:
    """Return the rules for a model."""
    return LADDER_RULES if model.residual == "ladder" else ()
