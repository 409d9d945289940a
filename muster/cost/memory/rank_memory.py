"""Exact bytes of one rank's tensors: its shards of parameters, gradients and optimizer state, and saved activations.

A run's report compares these with the bytes that its tensors take (`muster.train.finalize`). Temporary memory within a
pass (gathered parameters, buffers of collectives, recomputed tensors) is not counted; `muster.cost.memory.forecast`
has it.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from muster.config.freezing import is_frozen, is_frozen_up_to
from muster.config.optim_config import OptimConfig
from muster.config.optimizer_state import (
    has_owned_state,
    is_zeroth_order,
    optimizer_state_bytes,
    owned_state_bytes,
    whole_matrix_shapes,
)
from muster.config.outer_config import OuterConfig
from muster.cost.activations import (
    boundary_saved_bytes,
    conjunction_saved_bytes,
    further_activation_bytes,
    layer_activation_bytes,
    loss_saved_bytes,
    norm_saved_bytes,
    offloaded_activation_bytes,
    pass_sizes,
    vocab_parallel_bytes,
)
from muster.cost.memory.terms import MemoryTerms
from muster.cost.precision_bytes import master_bytes
from muster.cost.sequence_slices import kept_bytes, offloaded_bytes_of_slices, slice_workloads
from muster.layout.host_updates import layer_of
from muster.layout.matrix_owners import assign_owners, peer_ranks
from muster.layout.mesh import MeshCoordinates, coordinates_of
from muster.layout.tensor_layout import (
    TensorLayout,
    computed_layers,
    rank_layouts,
    stage_layouts,
    stage_shards,
    stages_on,
)
from muster.schedule.action import Kind
from muster.schedule.offload import order_with_copies
from muster.schedule.program import Program
from muster.spec.four_bit import part_bytes
from muster.spec.layer_strategy import Tier, ZeroLevel
from muster.spec.model import ModelSpec
from muster.spec.plan import Plan
from muster.spec.workload import Workload

_INDEX_BYTES = 8
"""Tokens and labels are int64."""


def rank_memory(
    spec: ModelSpec,
    plan: Plan,
    workload: Workload,
    rank: int,
    live_micro_batches: Mapping[int, int | tuple[int, ...]] | int,
    optim: OptimConfig | None = None,
    live_vocab_micro_batches: int = 0,
    offloaded_slices: Mapping[int, tuple[int, ...]] | None = None,
    outer: OuterConfig | None = None,
) -> MemoryTerms:
    """Return the bytes that world rank `rank` holds at its peak, over its stages.

    `live_micro_batches` are those between forward and backward at that time, by stage, or one number for each stage;
    of each slice where sequences are cut into slices;
    `live_vocab_micro_batches` those between S and T under vocabulary parallelism; `offloaded_slices` those of which a
    part is in host memory (`peak_slices` has both). The optimizer is AdamW unless `optim` is given, and outer
    steps are DiLoCo's unless `outer` is.
    """
    at, live = coordinates_of(plan, rank), live_micro_batches
    terms = (
        stage_terms(spec, plan, workload, stage, at, live if isinstance(live, int) else live[stage], optim)
        for stage in stages_on(plan, at.pp)
    )
    words = (
        MemoryTerms(activations=live_vocab_micro_batches * vocab_parallel_bytes(spec, plan, workload, at.pp))
        if live_vocab_micro_batches
        else MemoryTerms()
    )
    in_host_memory = sum(
        count * size
        for stage, counts in (offloaded_slices or {}).items()
        for count, size in zip(
            counts, offloaded_bytes_of_slices(spec, plan, workload, stage, tp_index=at.tp), strict=True
        )
    )
    errors = MemoryTerms(optimizer=outer_error_bytes(spec, plan, rank, optim, outer))
    return sum(terms, start=words + errors + MemoryTerms(activations=-in_host_memory))


def outer_error_bytes(
    spec: ModelSpec, plan: Plan, rank: int, optim: OptimConfig | None, outer: OuterConfig | None
) -> int:
    """Return the bytes that a rank keeps of what exchanges between islands lost (`outer.error_feedback`), or, as a peer
    of a coordinator, of the outer parameters and their momentum, which islands of a plan count as optimizer state."""
    copies = 0 if outer is None else outer.error_feedback if plan.islands > 1 else 2 * (outer.coordinator is not None)
    if not copies:
        return 0
    numels = {
        layout.name: layout.numel
        for layout in rank_layouts(spec, plan, rank)
        if not is_frozen(optim, layout.name)  # a tied weight counts once
    }
    return copies * master_bytes(plan.precision) * sum(numels.values())


def stage_terms(
    spec: ModelSpec,
    plan: Plan,
    workload: Workload,
    stage: int,
    at: MeshCoordinates,
    live_micro_batches: int | tuple[int, ...],
    optim: OptimConfig | None = None,
) -> MemoryTerms:
    """Return the bytes that the rank at `at` holds for one stage with `live_micro_batches` in flight, or so many of
    each slice.
    """
    return MemoryTerms(
        parameters=stage_parameter_bytes(spec, plan, stage, at),
        gradients=gradient_bytes(spec, plan, stage, at, optim),
        optimizer=optimizer_bytes(spec, plan, stage, at, optim),
        activations=_live_activation_bytes(spec, plan, workload, stage, at.tp, live_micro_batches, optim),
    )


def _live_activation_bytes(
    spec: ModelSpec,
    plan: Plan,
    workload: Workload,
    stage: int,
    tp_index: int,
    live: int | tuple[int, ...],
    optim: OptimConfig | None,
) -> int:
    """Return the bytes of some micro-batches, or of so many of each slice; the first slice of a sequence lives as long
    as the keys and values of all. What leaves layer by layer and is away between passes isn't counted."""
    parts = slice_workloads(spec, plan, workload)
    each = [activation_bytes(spec, plan, part, stage, tp_index, optim) for part in parts]
    if plan.sequence_slices > 1:
        sizes = pass_sizes(spec, plan, parts[0], stage, tp_index)
        each[0] += kept_bytes(sizes, len(plan.layers(stage, spec.num_layers)), workload.seq_len)
    tiers: tuple[Tier, ...] = ("host", "disk") if plan.offloads_by_layer else ("disk",)
    each[0] -= sum(offloaded_activation_bytes(spec, plan, workload, stage, tier, tp_index) for tier in tiers)
    counts = (live,) * len(each) if isinstance(live, int) else live
    return sum(count * size for count, size in zip(counts, each, strict=True))


SliceCounts = dict[int, tuple[int, ...]]
"""Stage → number of micro-batches with each slice in some state."""


def peak_slices(
    program: Program, pp_rank: int, sizes: Mapping[int, Sequence[int]], offloaded: Mapping[int, Sequence[int]]
) -> tuple[SliceCounts, SliceCounts]:
    """Return by stage how many of each slice a pipeline rank has between forward and backward when they take most bytes
    of the device, and of how many a part is in host memory then; `sizes`: bytes of each slice, by stage; `offloaded`:
    the part of these that OFFLOAD moves."""
    lanes = program.ranks[pp_rank]
    copied = {item.action.stage for item in lanes.get("host_copy", ()) if item.action.kind == Kind.OFFLOAD}
    held = {stage: np.zeros(len(own), int) for stage, own in sizes.items()}
    away = {stage: np.zeros(len(own), int) for stage, own in sizes.items()}
    now = most = 0
    found = held, away
    for kind, stage, _, part, _ in order_with_copies([item.action for item in lanes.get("compute", ())], copied):
        if kind in (Kind.OFFLOAD, Kind.RELOAD):
            change = 1 if kind == Kind.OFFLOAD else -1
            away[stage][part] += change
            now -= change * offloaded[stage][part]
        elif change := {Kind.F: 1, Kind.B: -1, Kind.W: -1}.get(kind, 0):
            held[stage][part] += change
            now += change * sizes[stage][part]
        if now > most:
            most = now
            found = tuple({stage: counts.copy() for stage, counts in one.items()} for one in (held, away))
    of_device, of_host = ({stage: tuple(map(int, counts)) for stage, counts in one.items()} for one in found)
    return of_device, of_host


# ----------------------------------------------------------------------------------------------------------------------
# Parameters and gradients


def _zero_level(plan: Plan, name: str) -> ZeroLevel:
    """Return the sharding level of a parameter; parameters outside layers follow the default strategy."""
    parts = name.split(".")
    return (plan.strategy(int(parts[1])) if parts[0] == "layers" else plan.default_strategy).zero


def _param_numels(spec: ModelSpec, plan: Plan, stage: int, at: MeshCoordinates) -> dict[str, int]:
    """Return the elements of each parameter of a stage as its passes use it: cut by tensor parallelism only."""
    return {name: part.numel for name, _, part, *_ in stage_shards(spec, plan, stage, at)}


def stage_parameter_bytes(spec: ModelSpec, plan: Plan, stage: int, at: MeshCoordinates) -> int:
    """Return the bytes of the rank's shards of a stage's master weights: float32, or float64 for an fp64 model, or
    parts of weights in 4 bits."""
    size = master_bytes(plan.precision)
    held = _on_device(spec, plan, stage, at)
    return sum(layout.numel * (part_bytes(layout.name) or size) for layout in held)


def _on_device(spec: ModelSpec, plan: Plan, stage: int, at: MeshCoordinates) -> list[TensorLayout]:
    """Return a stage's parameters without those in host memory and on disk."""
    layouts = stage_layouts(spec, plan, stage, at)
    if not plan.offloads_params:
        return layouts
    return [layout for layout in layouts if plan.param_tier(layer_of(layout.name)) == "none"]


def optimizer_bytes(spec: ModelSpec, plan: Plan, stage: int, at: MeshCoordinates, optim: OptimConfig | None) -> int:
    """Return the bytes of the optimizer's state on the device; AdamW has two moments (arXiv:1711.05101). With islands
    there are the outer parameters and their momentum, too (arXiv:2311.08105).

    If a rank holds both copies of a tied weight, only the first stage's has state.
    """
    layouts = stage_layouts(spec, plan, stage, at)
    if plan.is_last(stage) and any(plan.is_first(own) for own in stages_on(plan, at.pp) if own != stage):
        layouts = [layout for layout in layouts if layout.name != "embed.weight"]
    kept = [layout for layout in layouts if not plan.offloads_optimizer(layer_of(layout.name))]
    size = master_bytes(plan.precision)
    outer = 0
    if plan.islands > 1:
        outer = 2 * size * sum(layout.numel for layout in layouts if not is_frozen(optim, layout.name))
    return outer + optimizer_state_bytes(optim, kept, size) + _owned_state_bytes(spec, plan, stage, at, optim, size)


def _owned_state_bytes(
    spec: ModelSpec, plan: Plan, stage: int, at: MeshCoordinates, optim: OptimConfig | None, size: int
) -> int:
    """Return the bytes of state of the stage's matrices that the rank owns; owners are chosen among all matrices of
    its stages."""
    if not has_owned_state(optim):
        return 0
    ranks = peer_ranks(plan, at)
    member = next(index for index, rank in enumerate(ranks) if coordinates_of(plan, rank) == at)
    held = [(own, one) for own in stages_on(plan, at.pp) for one in stage_layouts(spec, plan, own, at)]
    shapes = whole_matrix_shapes(optim, {layout.name: layout.shape for _, layout in held})
    owned = {name for batch in assign_owners(shapes, len(ranks)) for name, owner in batch.items() if owner == member}
    mine = {layout.name for own, layout in held if own == stage} & owned
    return sum(owned_state_bytes(optim, name, shapes[name], size) for name in mine)


def gradient_bytes(
    spec: ModelSpec, plan: Plan, stage: int, at: MeshCoordinates, optim: OptimConfig | None = None
) -> int:
    """Return the bytes of gradients summed over micro-batches, in the master weights' dtype.

    They are whole under z1, else the rank's shards; frozen parameters have none, nor have steps without backward.
    """
    if is_zeroth_order(optim):
        return 0
    whole = _param_numels(spec, plan, stage, at)
    count = sum(
        whole[layout.name] if _zero_level(plan, layout.name) == "z1" else layout.numel
        for layout in _on_device(spec, plan, stage, at)
        if not is_frozen(optim, layout.name)
    )
    return count * master_bytes(plan.precision)


# ----------------------------------------------------------------------------------------------------------------------
# Activations of one micro-batch


def activation_bytes(
    spec: ModelSpec,
    plan: Plan,
    workload: Workload,
    stage: int,
    tp_index: int = 0,
    optim: OptimConfig | None = None,
) -> int:
    """Return the bytes that autograd saves of one micro-batch of a stage, without parameters.

    Layers save nothing if all up to them is frozen.

    `tp_index` is the tensor-parallel rank: tensor parallelism cuts heads, inner width and vocabulary. Norms work on the
    hidden state, which is whole on each rank, or cut along the sequence under sequence parallelism.
    """
    if is_zeroth_order(optim):
        return 0
    sizes = pass_sizes(spec, plan, workload, stage, tp_index)
    precision = plan.precision
    total = 0
    for layer in computed_layers(spec, plan, stage):
        if is_frozen_up_to(optim, spec, layer + 1):
            continue
        strategy = plan.strategy(layer)
        total += layer_activation_bytes(sizes, layer, strategy.recompute, strategy.attention)
    total += boundary_saved_bytes(spec, plan, stage, sizes)
    norm = norm_saved_bytes(spec, sizes.hidden_tokens, precision) if plan.is_last(stage) else 0
    if plan.vocab_parallel:
        return total + (norm - sizes.hidden_bytes if plan.is_last(stage) else 0)
    if plan.is_first(stage):
        # The embedding's backward sums rows by token; under tp a mask selects the rank's vocabulary entries.
        total += sizes.tokens * (_INDEX_BYTES + (sizes.mesh.tp > 1))
    if plan.is_last(stage):
        logits = loss_saved_bytes(sizes.local_model, sizes.tokens, precision)
        total += norm + conjunction_saved_bytes(sizes)
        total += (1 + spec.mtp_layers) * (logits if plan.sequence_tiles == 1 else 0)
        total += spec.mtp_layers * further_activation_bytes(sizes, plan.strategy(spec.num_layers - 1).recompute)
    return total
