"""Bytes that a rank holds: parameters, gradients, optimizer state, and what autograd keeps for the backward.

The formulas follow `muster.model` tensor by tensor. Not counted: what lives within one kernel or one block only (the
gradient of a block before it is reduced, buffers of collectives, what a block makes again for its backward), and the
activations in flight between stages.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from operator import add, attrgetter

from muster.cost.own_layer import own_layer_bytes
from muster.spec.errors import InfeasibleError
from muster.spec.layout import held_parts, shard_rows, stage_layouts, stages_of, tensor_slice
from muster.spec.mesh import Coordinates, coordinates
from muster.spec.model import ModelSpec, layer_parameters
from muster.spec.optim import OptimConfig
from muster.spec.optim_state import state_numel
from muster.spec.plan import Plan, Precision, Recompute, Zero
from muster.spec.workload import Workload

_COMPUTE_BYTES: dict[Precision, int] = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2, "fp8": 2}
FIRST = Coordinates(0, 0, 0, 0, 0)
_INDEX_BYTES = 8
"""Tokens and labels are int64."""


@dataclass(frozen=True, slots=True)
class MemoryTerms:
    """Bytes on one rank, by what they are for."""

    parameters: int = 0
    """The rank's own, as the optimizer changes them."""
    gathered_parameters: int = 0
    """As the passes use them, with the buffers of their all-gathers."""
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    """What forwards keep for backwards."""
    logits: int = 0
    """Logits, and what is made of them for the loss and kept."""
    communication: int = 0
    """Buffers of sends, receives, reductions and communicators."""
    workspace: int = 0
    """What lives within a pass only: gradients that are not reduced yet, intermediate results, what is made again."""
    fragmentation: int = 0
    """What the allocator holds and can't use."""
    context: int = 0
    """The device's driver, the framework's kernels and libraries."""

    @property
    def total(self) -> int:
        return sum(_ALL(self))

    def by_name(self) -> dict[str, int]:
        """Term → bytes, in the order above."""
        return {name: getattr(self, name) for name in TERMS}

    def __add__(self, other: "MemoryTerms") -> "MemoryTerms":
        return MemoryTerms(*map(add, _ALL(self), _ALL(other)))

    def times(self, count: int) -> "MemoryTerms":
        """As much, `count` times."""
        return MemoryTerms(*(count * size for size in _ALL(self)))


TERMS = tuple(field.name for field in fields(MemoryTerms))
_ALL = attrgetter(*TERMS)


def compute_bytes(precision: Precision) -> int:
    """Bytes of one number in the forward and backward passes; fp8 is for matrix products alone, around them is bf16."""
    return _COMPUTE_BYTES[precision]


def wide_bytes(precision: Precision) -> int:
    """Bytes of one number where sums are kept: master weights, gradients, moments, statistics, the loss."""
    return max(4, compute_bytes(precision))


# ----------------------------------------------------------------------------------------------------------------------
# Ranks and stages


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
        stage_memory(spec, plan, workload, stage, at, live if isinstance(live, int) else live[stage], optim)
        for stage in stages_of(plan, at.pp)
    )
    words = (
        MemoryTerms(activations=live_words * word_bytes(spec, plan, workload, at.pp)) if live_words else MemoryTerms()
    )
    return sum(terms, start=words)


def stage_memory(
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
        gathered_parameters=gathered_bytes(spec, plan, stage, at),
        gradients=gradient_bytes(spec, plan, stage, at),
        optimizer=optimizer_bytes(spec, plan, stage, at, optim),
        activations=live_micro_batches * activation_bytes(spec, plan, workload, stage, at),
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


def gathered_bytes(spec: ModelSpec, plan: Plan, stage: int, at: Coordinates = FIRST) -> int:
    """Whole parameters in the compute dtype, at the peak, beside the rank's own.

    One data-parallel rank: a copy of all if it computes in another dtype. Several, z1 and z2: all, from the first pass
    to the step. z3: the bucket of layers in use and those that are fetched ahead, and what belongs to no layer, which
    stays from the forward to the end of the backward.
    """
    size, alone = compute_bytes(plan.precision), plan.mesh(stage).data_ranks == 1
    if alone and size == wide_bytes(plan.precision):
        return 0
    whole = _parameters_of(spec, plan, stage, at)
    if not alone:
        passing = [layer for layer in plan.layers(stage, spec.num_layers) if plan.strategy(layer).zero == "z3"]
        at_once = plan.bucket_layers * (1 + plan.prefetch_buckets)
        for layer in passing[at_once:]:  # layers are alike, so any stand for those that are there at once
            for name, _ in layer_parameters(spec, layer):
                del whole[name]
    return sum(whole.values()) * size


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


def activation_bytes(spec: ModelSpec, plan: Plan, workload: Workload, stage: int, at: Coordinates = FIRST) -> int:
    """What autograd keeps of one micro-batch of a stage, parameters left out.

    Tensor parallelism cuts heads, inner width and words. Norms work on the hidden state, which is whole on each of its
    ranks, or with sequence parallelism cut along the sequence.
    """
    layers, tp = plan.layers(stage, spec.num_layers), plan.mesh(stage).tp
    own, precision = own_widths(spec, tp, at.tp), plan.precision
    tokens = plan.rows(stage) * workload.seq_len
    hidden_tokens = tokens // tp if plan.strategy(layers.start).sp else tokens
    total, hidden = 0, hidden_tokens * spec.hidden_size * compute_bytes(precision)
    for layer in layers:
        recompute = plan.strategy(layer).recompute
        plugins = own_layer_bytes(spec, tp, tokens, hidden, workload.seq_len, precision, recompute)
        muster = layer_saved_bytes(own, tokens, hidden_tokens, precision, recompute)
        total += muster if plugins is None else plugins
    if plan.spread_vocab:
        return total + (norm_saved_bytes(spec, hidden_tokens, precision) - hidden if plan.is_last(stage) else 0)
    if plan.is_first(stage):
        # The embedding's backward adds up rows by token; with tp a mask says which words are the rank's.
        total += tokens * (_INDEX_BYTES + (tp > 1))
    if plan.is_last(stage):
        total += norm_saved_bytes(spec, hidden_tokens, precision) + loss_saved_bytes(own, tokens, precision)
    return total


def word_bytes(spec: ModelSpec, plan: Plan, workload: Workload, pp_rank: int) -> int:
    """What a rank keeps of one micro-batch from S to T where the vocabulary is spread: the softmax over its words,
    a factor for each rank and a weight by position, all as sums are kept, and the hidden state."""
    positions, wide = plan.rows(0) * workload.seq_len, wide_bytes(plan.precision)
    words = shard_rows(spec.vocab_size, plan.pp, pp_rank)[1]
    return positions * ((words + plan.pp + 1) * wide + spec.hidden_size * compute_bytes(plan.precision))


def layer_saved_bytes(
    own: ModelSpec, tokens: int, hidden_tokens: int, precision: Precision, recompute: Recompute
) -> int:
    """A decoder layer as wide as `own`, of whose `tokens` the hidden state holds `hidden_tokens`.

    full: its input alone. selective: neither what the two norms nor what the gated linear unit gives to the linear
    layers after it (`muster.model.recompute`).
    """
    hidden = hidden_tokens * own.hidden_size * compute_bytes(precision)
    if recompute == "full":
        return hidden
    made_again = 2 * hidden + tokens * own.intermediate_size * compute_bytes(precision)
    norms = 2 * norm_saved_bytes(own, hidden_tokens, precision)
    total = norms + attention_saved_bytes(own, tokens, precision) + mlp_saved_bytes(own, tokens, precision)
    return total - made_again if recompute == "selective" else total


def own_widths(spec: ModelSpec, tp: int, index: int) -> ModelSpec:
    """The model as wide as rank `index` of `tp` computes it."""

    def rows(name: str, count: int) -> int:
        return tensor_slice(spec, f"layers.0.{name}.weight", (count, spec.hidden_size), tp, index)[0].size[0]

    widths = {
        "num_heads": rows("attn.q", spec.num_heads * spec.head_dim) // spec.head_dim,
        "num_kv_heads": rows("attn.k", spec.num_kv_heads * spec.head_dim) // spec.head_dim,
        "intermediate_size": rows("mlp.gate", spec.intermediate_size),
        "vocab_size": rows("head", spec.vocab_size),
    }
    return spec.model_copy(update=widths)


def norm_saved_bytes(spec: ModelSpec, tokens: int, precision: Precision) -> int:
    """A norm's input and its statistics per token (LayerNorm has a mean besides), and its output as the input of the
    linear layers after it."""
    statistics = 2 if spec.norm == "layer" else 1
    return tokens * (2 * spec.hidden_size * compute_bytes(precision) + statistics * wide_bytes(precision))


def attention_saved_bytes(spec: ModelSpec, tokens: int, precision: Precision) -> int:
    """q and k after their rotation, v, the output, and flash attention's log-sum-exp per head (arXiv:2205.14135); with
    norms of q and k also what goes into these, and a statistic per head.

    The output is the input of the linear layer after it too, and counts once.
    """
    width = 2 * (spec.num_heads + spec.num_kv_heads) * spec.head_dim
    statistics = spec.num_heads
    if spec.qk_norm:
        width += (spec.num_heads + spec.num_kv_heads) * spec.head_dim
        statistics += spec.num_heads + spec.num_kv_heads
    return tokens * (width * compute_bytes(precision) + statistics * wide_bytes(precision))


def mlp_saved_bytes(spec: ModelSpec, tokens: int, precision: Precision) -> int:
    """gate if there is one, up, and what comes of them as the input of the last linear layer; the activation of gate is
    computed again."""
    return tokens * (3 if spec.gated else 2) * spec.intermediate_size * compute_bytes(precision)


def loss_saved_bytes(spec: ModelSpec, tokens: int, precision: Precision) -> int:
    """The gradient of the logits, which the loss makes in its forward, in the dtype of the logits."""
    return tokens * spec.vocab_size * compute_bytes(precision)
