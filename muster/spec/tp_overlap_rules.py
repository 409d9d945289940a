"""Rules for plans whose tensor-parallel collectives travel beside the compute of another part of a micro-batch
(`tp_overlap: domino`: two slices of its sequences) or of another micro-batch (`tp_overlap: pairs`)."""

from collections.abc import Callable

from muster.spec.layer_strategy import LayerStrategy
from muster.spec.model import ModelSpec
from muster.spec.pass_pairs import has_tp_pairs
from muster.spec.plan import Plan
from muster.spec.rules import Rule, in_every_layer

_UNTESTED = "not tested yet"


def has_domino(plan: Plan) -> bool:
    """Return True if slices of a micro-batch hide each other's tensor-parallel collectives."""
    return any(strategy.tp_overlap == "domino" for strategy in plan.strategies)


def _without(overlap: str) -> Callable[[Plan], Plan]:
    """Return the repair that leaves one way of overlap out."""

    def change(strategy: LayerStrategy) -> LayerStrategy:
        return strategy.model_copy(update={"tp_overlap": "none"}) if strategy.tp_overlap == overlap else strategy

    return in_every_layer(change)


without_domino = _without("domino")
"""Repair that leaves micro-batches whole."""
without_tp_pairs = _without("pairs")
"""Repair that lets passes wait for their own collectives."""


def _stages_of_one_sequence(plan: Plan) -> list[int]:
    """Return the tensor-parallel stages whose micro-batches have a single sequence."""
    stages = range(plan.num_stages)
    return [stage for stage in stages if plan.mesh(stage).tp > 1 and plan.local_micro_batch_size(stage) < 2]


def _has_no_tp(plan: Plan) -> bool:
    return all(mesh.tp == 1 for mesh in plan.distinct_meshes)


TP_OVERLAP_LEGAL_RULES: tuple[Rule, ...] = (
    Rule(
        lambda plan: has_domino(plan) and _has_no_tp(plan),
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
    Rule(
        lambda plan: has_tp_pairs(plan) and _has_no_tp(plan),
        "tp_overlap pairs hides collectives of the tp ranks, but tp is 1",
        without_tp_pairs,
    ),
    Rule(
        lambda plan: has_tp_pairs(plan) and not plan.schedule_entry.has_pairs,
        lambda plan: (
            f"tp_overlap pairs lets a forward and a backward run as one, which schedule {plan.schedule} has nowhere:"
            " take dualpipe or dualpipe-v, or leave pairs out"
        ),
        without_tp_pairs,
    ),
)


def _domino_rule(has: Callable[[Plan], bool], what: str) -> Rule:
    return Rule(lambda plan: has_domino(plan) and has(plan), f"tp_overlap domino with {what}", without_domino)


def _pairs_rule(has: Callable[[Plan], bool], what: str) -> Rule:
    return Rule(lambda plan: has_tp_pairs(plan) and has(plan), f"tp_overlap pairs with {what}", without_tp_pairs)


def _offloads(plan: Plan) -> bool:
    return any(strategy.offload != "none" for strategy in plan.strategies) or plan.offloads_params


_DOMINO_RULES: tuple[Rule, ...] = (
    _domino_rule(
        _offloads,
        "offload of activations or parameters (copies to and from host memory follow a layer's passes in order)",
    ),
    _domino_rule(lambda plan: plan.sequence_tiles > 1, f"sequence_tiles ({_UNTESTED})"),
    _domino_rule(
        lambda plan: plan.sequence_slices > 1,
        "sequence_slices (keys and values are kept for one micro-batch at a time)",
    ),
    _domino_rule(
        lambda plan: plan.dynamic_context_parallel, "cpdyn (whose pieces of documents are no whole sequences)"
    ),
    _domino_rule(lambda plan: plan.has_shard_levels, f"zpNgM ({_UNTESTED})"),
)
_PAIRS_RULES: tuple[Rule, ...] = (
    _pairs_rule(
        lambda plan: any(strategy.sp for strategy in plan.strategies),
        "sp (the norms before its all-gathers are too short to hide the other pass's collectives)",
    ),
    _pairs_rule(
        _offloads, "offload of activations or parameters (copies to and from host memory wait for single passes)"
    ),
    _pairs_rule(lambda plan: plan.vocab_parallel, "vocab_parallel (passes over the vocabulary lie between)"),
    _pairs_rule(lambda plan: plan.sequence_tiles > 1, f"sequence_tiles ({_UNTESTED})"),
    _pairs_rule(lambda plan: plan.sequence_slices > 1, f"sequence_slices ({_UNTESTED})"),
    _pairs_rule(lambda plan: plan.has_shard_levels, f"zpNgM ({_UNTESTED})"),
)
TP_OVERLAP_RULES = (*_DOMINO_RULES, *_PAIRS_RULES)
"""Plans that the runtime can't do in slices, or in pairs of passes."""


def tp_overlap_rules_of(model: ModelSpec) -> tuple[Rule, ...]:
    """Return the rules for a model."""
    made = ((_domino_rule, _DOMINO_AGAINST_MODELS), (_pairs_rule, _PAIRS_AGAINST_MODELS))
    return tuple(rule(lambda plan: True, what) for rule, against in made for has, what in against if has(model))


_Against = tuple[tuple[Callable[[ModelSpec], bool], str], ...]
_NARROW: _Against = (
    (lambda model: model.adapter is not None, f"adapters ({_UNTESTED})"),
    (lambda model: model.low_rank is not None, f"low-rank layers ({_UNTESTED})"),
)
_DOMINO_AGAINST_MODELS: _Against = (
    (
        lambda model: model.moe is not None,
        "experts (their load is balanced over whole micro-batches)",
    ),
    *_NARROW,
    (lambda model: model.architecture is not None, "a plugin's layers (whose arguments may be of whole micro-batches)"),
)
_PAIRS_AGAINST_MODELS: _Against = (
    (lambda model: model.moe is not None, "experts (in whose pairs rows travel beside the other pass)"),
    *_NARROW,
    (lambda model: model.mtp_layers > 0, f"multi-token prediction ({_UNTESTED})"),
    (lambda model: model.linear_attention is not None, f"linear attention ({_UNTESTED})"),
    (lambda model: model.architecture is not None, f"a plugin's layers ({_UNTESTED})"),
)
