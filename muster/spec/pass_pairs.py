"""Pairs of passes: where a forward and a backward of two micro-batches run as one, so that what each communicates
travels beside the other's compute: exchanges of experts (DeepSeek-V3, arXiv:2412.19437 §3.2.1), or tensor-parallel
collectives, where a plan says so (`tp_overlap: pairs`).

The Program has pairs where `pairs_passes` says so; the simulator and the executor both read them there.
"""

from collections.abc import Callable

from muster.spec.model import ModelSpec
from muster.spec.plan import Plan

WITHOUT_PAIRS: tuple[tuple[Callable[[Plan, ModelSpec], bool], str], ...] = (
    (lambda plan, model: not plan.schedule_entry.has_pairs, "the schedule has none"),
    (lambda plan, model: model.moe is None, "the model has no experts"),
    (
        lambda plan, model: any(mesh.ep == 1 for mesh in plan.distinct_meshes),
        "a rank has all experts, so that nothing travels",
    ),
    (
        lambda plan, model: plan.ep_dispatcher not in ("all_to_all", "hierarchical"),
        "results are gathered or summed over ranks, not exchanged",
    ),
    (lambda plan, model: plan.ep_chunks > 1, "chunks travel beside the products of others"),
    (
        lambda plan, model: model.moe is not None and model.moe.shortcut,
        "rows travel beside the layer's dense part",
    ),
    (lambda plan, model: plan.ep_redundant_experts > 0, "copies of experts travel with the rows"),
    (
        lambda plan, model: any(strategy.recompute == "full" for strategy in plan.strategies),
        "the backward repeats the exchanges of the forward",
    ),
    (
        lambda plan, model: any(strategy.offload != "none" for strategy in plan.strategies) or plan.offloads_params,
        "copies to and from host memory wait for single passes",
    ),
    (lambda plan, model: plan.vocab_parallel, "passes over the vocabulary lie between"),
)
"""Properties of a plan and a model in which no exchange of experts hides in pairs, each with the reason."""


def has_tp_pairs(plan: Plan) -> bool:
    """Return True if the passes of a pair are to hide each other's tensor-parallel collectives."""
    return any(strategy.tp_overlap == "pairs" for strategy in plan.strategies)


def pairs_passes(plan: Plan, model: ModelSpec) -> bool:
    """Return True if a plan's forwards run as one with the backward after them, where its schedule has such pairs."""
    return pairs_collectives(plan) or not any(applies(plan, model) for applies, _ in WITHOUT_PAIRS)


def pairs_collectives(plan: Plan) -> bool:
    """Return True if it is tensor-parallel collectives that travel beside the other pass of a pair."""
    return has_tp_pairs(plan) and plan.schedule_entry.has_pairs
