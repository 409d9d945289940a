"""Rules for plans of a model whose layers read the residual stream otherwise (`residual: ladder`) or have several
streams (`parallel_sublayers`)."""

from collections.abc import Callable, Iterator

from muster.spec.layer_strategy import LayerStrategy
from muster.spec.model import ModelSpec
from muster.spec.plan import SCALED_PRECISIONS, Plan
from muster.spec.rules import Rule, in_every_layer, setting

_UNTESTED = "not tested yet"
_AGAINST_SP = {
    "ladder": "the all-gather before a sub-layer would queue behind the reduce-scatter that should travel beside it",
    "standard": "each rank has whole streams of all positions",
}
_AGAINST_TURNS = {
    "ladder": "whose collectives travel beside the next sub-layer anyhow",
    "standard": "whose collectives travel beside attention anyhow",
}


def stream_rules_of(model: ModelSpec) -> tuple[Rule, ...]:
    """Return the rules for a model: things that the runtime can't do with its streams."""
    return () if model.other_stream is None else tuple(_rules(model, model.other_stream))


def _rules(model: ModelSpec, stream: str) -> Iterator[Rule]:
    def strategy_rule(has: Callable[[LayerStrategy], bool], what: str, why: str, **values: object) -> Rule:
        return Rule(
            lambda plan: any(map(has, plan.strategies)),
            f"{what} of a model with {stream} ({why})",
            in_every_layer(lambda strategy: strategy.model_copy(update=values)),
        )

    def plan_rule(has: Callable[[Plan], bool], what: str, **values: object) -> Rule:
        return Rule(has, f"{what} of a model with {stream} ({_UNTESTED})", setting(**values))

    yield Rule(
        lambda plan: plan.uses_axis("tp") and any(strategy.sp for strategy in plan.strategies),
        f"sp of a model with {stream} ({_AGAINST_SP[model.residual]})",
        in_every_layer(lambda strategy: strategy.model_copy(update={"sp": False, "tp_overlap": "none"})),
    )
    why = _AGAINST_TURNS[model.residual]
    yield strategy_rule(lambda own: own.tp_overlap == "domino", "tp_overlap domino", why, tp_overlap="none")
    yield strategy_rule(lambda own: own.tp_overlap == "pairs", "tp_overlap pairs", why, tp_overlap="none")
    yield strategy_rule(lambda own: own.offload != "none", "offload of activations", _UNTESTED, offload="none")
    yield strategy_rule(
        lambda own: own.offload_param != "none", "offload of parameters", _UNTESTED, offload_param="none"
    )
    yield plan_rule(lambda plan: plan.vocab_parallel, "vocab_parallel", vocab_parallel=False)
    yield plan_rule(lambda plan: plan.sequence_tiles > 1, "sequence_tiles", sequence_tiles=1)
    yield plan_rule(lambda plan: plan.sequence_slices > 1, "sequence_slices", sequence_slices=1)
    yield plan_rule(lambda plan: plan.dynamic_context_parallel, "cpdyn", dynamic_context_parallel=False)
    yield plan_rule(lambda plan: plan.compile is True, "compile", compile=False)
    yield plan_rule(lambda plan: plan.cuda_graphs, "cuda_graphs", cuda_graphs=False)
    yield plan_rule(lambda plan: plan.precision in SCALED_PRECISIONS, "fp8 or nvfp4", precision="bf16")
