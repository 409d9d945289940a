"""Pairs of passes: where a forward and a backward of two micro-batches run as one, so that the exchanges of experts of
each travel beside the other's compute (DeepSeek-V3, arXiv:2412.19437 §3.2.1).

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
"""Properties of a plan and a model whose passes run one after another, each with the reason."""


def pairs_passes(plan: Plan, model: ModelSpec) -> bool:
    """Return True if a plan's forwards run as one with the backward after them, where its schedule has such pairs."""
    return not any(applies(plan, model) for applies, _ in WITHOUT_PAIRS)
