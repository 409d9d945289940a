"""What one rank's own tensors take: its shards of parameters, gradients and optimizer state to the number, and what
autograd keeps for the backward.

A run's report holds these to what its tensors really take (`muster.train.ending`). Not counted: what lives within a
pass only (parameters that are gathered, buffers of collectives, what a block makes again), which
`muster.cost.forecast` has.
"""

from collections.abc import Mapping

from muster.cost.activations import layer_bytes, loss_saved_bytes, norm_saved_bytes, pass_sizes, word_bytes
from muster.cost.memory import MemoryTerms, wide_bytes
from muster.spec.errors import InfeasibleError
from muster.spec.layout import held_parts, stage_layouts, stages_of
from muster.spec.mesh import Coordinates, coordinates
from muster.spec.model import ModelSpec
from muster.spec.optim import OptimConfig
from muster.spec.optim_state import state_numel
from muster.spec.plan import Plan, Zero
from muster.spec.workload import Workload

_INDEX_BYTES = 8
"""Tokens and labels are int64."""


def rank_memory(
    spec: ModelSpec,
    plan: Plan,
    workload: Workload,
    rank: int,
    live_micro_batches: Mapping[int, int] | int,
    optim: OptimConfig | None = None,
    live_words: int = 0,
) -> MemoryTerms:
    """What world rank `rank` holds at its peak, over its stages.

    `live_micro_batches`: between their forward and their backward at that moment, by stage; one number is for each.
    The optimizer is AdamW unless `optim` says otherwise. `live_words`: micro-batches between S and T, where the
    vocabulary is spread.
    """
    at, live = coordinates(plan, rank), live_micro_batches
    terms = (
        stage_terms(spec, plan, workload, stage, at, live if isinstance(live, int) else live[stage], optim)
        for stage in stages_of(plan, at.pp)
    )
    words = (
        MemoryTerms(activations=live_words * word_bytes(spec, plan, workload, at.pp)) if live_words else MemoryTerms()
    )
    return sum(terms, start=words)


def stage_terms(
    spec: ModelSpec,
    plan: Plan,
    workload: Workload,
    stage: int,
    at: Coordinates,
    live_micro_batches: int,
    optim: OptimConfig | None = None,
) -> MemoryTerms:
    """What the rank at `at` holds for one stage with `live_micro_batches` between their forward and their backward.

    Raises InfeasibleError where the plan uses what there is no formula for yet.
    """
    _refuse_unknown(plan, stage, spec.num_layers)
    return MemoryTerms(
        parameters=stage_parameter_bytes(spec, plan, stage, at),
        gradients=gradient_bytes(spec, plan, stage, at),
        optimizer=optimizer_bytes(spec, plan, stage, at, optim),
        activations=live_micro_batches * activation_bytes(spec, plan, workload, stage, at.tp),
    )


def _refuse_unknown(plan: Plan, stage: int, num_layers: int) -> None:
    mesh = plan.mesh(stage)
    strategies = [plan.strategy(layer) for layer in plan.layers(stage, num_layers)]
    if mesh.cp * mesh.ep > 1 or any(s.offload in ("optimizer", "all") for s in strategies):
        raise InfeasibleError(
            f"the memory of stage {stage} can't be predicted: there are formulas for cp and ep of 1, and for the"
            " optimizer's state on the device"
        )


# ----------------------------------------------------------------------------------------------------------------------
# Parameters and gradients


def _level(plan: Plan, name: str) -> Zero:
    """How a parameter is sharded; what belongs to no layer follows the default strategy."""
    parts = name.split(".")
    return (plan.strategy(int(parts[1])) if parts[0] == "layers" else plan.default_strategy).zero


def _parameters_of(spec: ModelSpec, plan: Plan, stage: int, at: Coordinates) -> dict[str, int]:
    """Numbers in each parameter of a stage as its passes use it: whole, but for the cut of tensor parallelism."""
    return {name: part.numel for name, _, part, *_ in held_parts(spec, plan, stage, at.tp)}


def stage_parameter_bytes(spec: ModelSpec, plan: Plan, stage: int, at: Coordinates) -> int:
    """The rank's own shards of a stage's master weights: float32, or float64 for an fp64 model."""
    return sum(layout.numel for layout in stage_layouts(spec, plan, stage, at)) * wide_bytes(plan.precision)


def optimizer_bytes(spec: ModelSpec, plan: Plan, stage: int, at: Coordinates, optim: OptimConfig | None) -> int:
    """The optimizer's state, in the master weights' dtype; AdamW keeps two moments (arXiv:1711.05101).

    Of two copies of a tied weight on one rank it knows the first stage's.
    """
    layouts = stage_layouts(spec, plan, stage, at)
    if plan.is_last(stage) and any(plan.is_first(own) for own in stages_of(plan, at.pp) if own != stage):
        layouts = [layout for layout in layouts if layout.name != "embed.weight"]
    count = 2 * sum(layout.numel for layout in layouts) if optim is None else state_numel(optim, layouts)
    return count * wide_bytes(plan.precision)


def gradient_bytes(spec: ModelSpec, plan: Plan, stage: int, at: Coordinates) -> int:
    """Gradients summed over micro-batches, in the master weights' dtype: whole under z1, else the rank's shards."""
    whole = _parameters_of(spec, plan, stage, at)
    count = sum(
        whole[layout.name] if _level(plan, layout.name) == "z1" else layout.numel
        for layout in stage_layouts(spec, plan, stage, at)
    )
    return count * wide_bytes(plan.precision)


# ----------------------------------------------------------------------------------------------------------------------
# Activations of one micro-batch


def activation_bytes(spec: ModelSpec, plan: Plan, workload: Workload, stage: int, tp_index: int = 0) -> int:
    """What autograd keeps of one micro-batch of a stage on its `tp_index`-th tensor-parallel rank, parameters left out.

    Tensor parallelism cuts heads, inner width and words. Norms work on the hidden state, which is whole on each of its
    ranks, or with sequence parallelism cut along the sequence.
    """
    sizes, precision, total = pass_sizes(spec, plan, workload, stage, tp_index), plan.precision, 0
    for layer in plan.layers(stage, spec.num_layers):
        strategy = plan.strategy(layer)
        total += layer_bytes(sizes, layer, strategy.recompute, strategy.attention)
    norm = norm_saved_bytes(spec, sizes.hidden_tokens, precision) if plan.is_last(stage) else 0
    if plan.spread_vocab:
        return total + (norm - sizes.hidden_bytes if plan.is_last(stage) else 0)
    if plan.is_first(stage):
        # The embedding's backward adds up rows by token; with tp a mask says which words are the rank's.
        total += sizes.tokens * (_INDEX_BYTES + (sizes.mesh.tp > 1))
    if plan.is_last(stage):
        total += norm + loss_saved_bytes(sizes.own, sizes.tokens, precision)
    return total
