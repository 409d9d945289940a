"""Rules for plans whose micro-batches are computed in two slices of their sequences (`tp_overlap: domino`)."""

from collections.abc import Callable

from muster.spec.layer_strategy import LayerStrategy
from muster.spec.model import ModelSpec
from muster.spec.plan import Plan
from muster.spec.rules import Rule, in_every_layer


def has_domino(plan: Plan) -> bool:
    """Return True if slices of a micro-batch hide each other's tensor-parallel collectives."""
    return any(strategy.tp_overlap == "domino" for strategy in plan.strategies)


def _whole_if_domino(strategy: LayerStrategy) -> LayerStrategy:
    return strategy.model_copy(update={"tp_overlap": "none"}) if strategy.tp_overlap == "domino" else strategy


without_domino = in_every_layer(_whole_if_domino)
"""Repair that leaves micro-batches whole."""


def _stages_of_one_sequence(plan: Plan) -> list[int]:
    """Return the tensor-parallel stages whose micro-batches have a single sequence."""
    stages = range(plan.num_stages)
    return [stage for stage in stages if plan.mesh(stage).tp > 1 and plan.local_micro_batch_size(stage) < 2]


DOMINO_LEGAL_RULES: tuple[Rule, ...] = (
    Rule(
        lambda plan: has_domino(plan) and all(mesh.tp == 1 for mesh in plan.distinct_meshes),
        "tp_overlap domino hides collectives of the tp ranks, but tp is 1",
        without_domino,
    ),
    Rule(
        lambda plan: has_domino(plan) and bool(_stages_of_one_sequence(plan)),
        lambda plan: (
            "tp_overlap domino cuts the sequences of a micro-batch into two slices, but a micro-batch of stage"
            f" {_stages_of_one_sequence(plan)[0]} has 1: raise micro_batch_size or leave domino out"
        ),
        without_domino,
    ),
)


def _rule(has: Callable[[Plan], bool], what: str) -> Rule:
    return Rule(lambda plan: has_domino(plan) and has(plan), f"tp_overlap domino with {what}", without_domino)


DOMINO_RULES: tuple[Rule, ...] = (
    _rule(
        lambda plan: any(strategy.offload != "none" for strategy in plan.strategies) or plan.offloads_params,
        "offload of activations or parameters (copies to and from host memory follow a layer's passes in order)",
    ),
    _rule(lambda plan: plan.sequence_tiles > 1, "sequence_tiles (it has no parity test yet)"),
    _rule(
        lambda plan: plan.sequence_slices > 1,
        "sequence_slices (keys and values are kept for one micro-batch at a time)",
    ),
    _rule(lambda plan: plan.dynamic_context_parallel, "cpdyn (whose pieces of documents are no whole sequences)"),
    _rule(lambda plan: plan.has_shard_levels, "zpNgM (it has no parity test yet)"),
)
"""Plans that the runtime can't do in slices."""


def domino_rules_of(model: ModelSpec) -> tuple[Rule, ...]:
    """Return the rules for a model."""
    found = [what for has, what in _AGAINST_IN_MODELS if has(model)]
    return tuple(_rule(lambda plan: True, what) for what in found)


_AGAINST_IN_MODELS: tuple[tuple[Callable[[ModelSpec], bool], str], ...] = (
    (
        lambda model: model.moe is not None,
        "experts (their load is balanced over whole micro-batches)",
    ),
    (lambda model: model.adapter is not None, "adapters (it has no parity test yet)"),
    (lambda model: model.low_rank is not None, "low-rank layers (it has no parity test yet)"),
    (lambda model: model.architecture is not None, "a plugin's layers (whose arguments may be of whole micro-batches)"),
)
