"""Activation bytes that a layer saves for its backward, for every type of layer and every recompute strategy.

The rule: whatever a linear layer, a norm or a kernel with a backward of its own reads in its backward is saved, and
counts once even where two operations read it. Example: the output of attention is read by the attention kernel's
backward and is also the input of the output projection, and still is one tensor.

Layers follow `muster.model` tensor by tensor. The gated delta rule and unfused attention, which the runtime lacks,
follow the same rule.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil

from muster.cost.context_traffic import AttentionShape, StateShape, state_saved_numel
from muster.cost.expert_traffic import load_of_ranks
from muster.cost.precision_bytes import compute_bytes, master_bytes
from muster.layout.sequence_slices import num_offloaded_layers
from muster.layout.tensor_layout import chunk_bounds, tp_shard
from muster.spec.context_kinds import CONTEXT_KINDS, ContextRanks
from muster.spec.expert_kinds import ExpertDispatch
from muster.spec.layer_strategy import Recompute, Tier
from muster.spec.mesh import Mesh
from muster.spec.model import ModelSpec
from muster.spec.model_components import DECAY_RANK
from muster.spec.plan import Plan, Precision
from muster.spec.plugin_model import LayerTrace, plugin_model
from muster.spec.workload import Workload

_INDEX_BYTES = 8
"""Experts and places of rows are int64."""


@dataclass(frozen=True, slots=True)
class PassSizes:
    """Local sizes of a pass over one micro-batch on one rank of a stage."""

    local_model: ModelSpec
    """Model with the widths (heads, MLP, vocabulary) of the rank's tensor-parallel shard."""
    mesh: Mesh
    tokens: int
    """Tokens that attention and MLP process."""
    hidden_tokens: int
    """Tokens whose hidden state the rank holds: `tokens` / tp under sequence parallelism."""
    precision: Precision
    model: ModelSpec
    """Unsharded model."""
    seq_len: int
    context: ContextRanks = ContextRanks()
    sequence_tiles: int = 1
    routes_own_tokens: bool = False
    """Each tensor-parallel rank routes a part of the positions (`Plan.routes_own_tokens`)."""
    dispatch: ExpertDispatch = ExpertDispatch()
    is_sliced: bool = False
    """True for a slice of sequences, whose keys and values are kept beside what autograd saves."""
    earlier_positions: int = 0
    """Positions of a sequence before those of a slice."""
    expert_imbalance: float = 1.0
    """Load of the fullest of the ranks that share experts, relative to the mean."""

    @property
    def tile_tokens(self) -> int:
        """Tokens of the largest tile, of which MLP and loss process one at a time; all where nothing is tiled."""
        return -(-self.tokens // self.sequence_tiles)

    @property
    def sequences(self) -> int:
        """Sequences that the tokens are of."""
        return max(1, self.tokens * self.mesh.sequence_shards // self.seq_len)

    @property
    def streams(self) -> int:
        """Residual streams on the rank."""
        return self.model.local_sublayers(self.mesh.tp)

    @property
    def hidden_bytes(self) -> int:
        """Bytes of the hidden state between layers on the rank, sharded along the sequence under sequence parallelism;
        of sub-layers side by side all of the rank's streams."""
        return self.hidden_tokens * self.streams * self.local_model.hidden_size * compute_bytes(self.precision)

    @property
    def message_bytes(self) -> int:
        """Bytes of what a pipeline stage passes to the next."""
        return self.hidden_tokens * self.model.boundary_size(self.mesh.tp) * compute_bytes(self.precision)

    @property
    def full_hidden_bytes(self) -> int:
        """Bytes of the hidden state of all `tokens` that embedding and head have."""
        return self.tokens * self.local_model.hidden_size * compute_bytes(self.precision)

    @property
    def attention(self) -> AttentionShape:
        """Positions and heads of the rank's attention."""
        own = self.local_model
        return AttentionShape(self.tokens, own.num_heads, own.num_kv_heads, own.head_dim, self.seq_len)

    @property
    def states(self) -> StateShape | None:
        """States of the rank's linear attention; None without any."""
        if (linear := self.model.linear_attention) is None:
            return None
        heads = linear.num_value_heads // self.mesh.tp
        return StateShape(self.sequences, heads, linear.key_head_dim, linear.value_head_dim)

    @property
    def routed_tokens(self) -> int:
        """Tokens whose experts the rank chooses: all of `tokens` where its tensor-parallel ranks share each expert."""
        return self.tokens // self.mesh.tp if self.routes_own_tokens else self.tokens

    @property
    def expert_tokens(self) -> int:
        """Rows that the rank's experts process: `top_k` per token, divided over the ranks that share the experts; more
        by `expert_imbalance` on the fullest one."""
        assert self.local_model.moe is not None
        pairs = self.routed_tokens * self.local_model.moe.top_k
        even = self.dispatch.sent_rows(pairs, self.local_model.moe.num_experts)
        if not self.dispatch.lsh_rate:
            even = self.tokens * self.local_model.moe.top_k * self.mesh.etp // self.mesh.tp
        return even if self.expert_imbalance == 1 else ceil(even * self.expert_imbalance)

    @property
    def routed_row_bytes(self) -> int:
        """Bytes of the hidden states that the rank's experts read, or make."""
        return self.expert_tokens * self.local_model.hidden_size * compute_bytes(self.precision)


def pass_sizes(spec: ModelSpec, plan: Plan, workload: Workload, stage: int, tp_index: int = 0) -> PassSizes:
    """Return the sizes on tensor-parallel rank `tp_index` of a stage; rank 0 never holds less than another.

    Context parallelism splits every sequence (arXiv:2310.01889).
    """
    mesh = plan.mesh(stage)
    tokens = plan.local_micro_batch_size(stage) * workload.seq_len // mesh.sequence_shards
    sp = plan.strategy(min(plan.layers(stage, spec.num_layers).start, spec.num_layers - 1)).sp
    hidden_tokens = tokens // mesh.tp if sp else tokens
    local_model = _local_model(spec, mesh.tp, tp_index)
    own = local_model, mesh, tokens, hidden_tokens, plan.precision, spec, workload.seq_len
    return PassSizes(
        *own,
        plan.context_ranks(mesh),
        plan.sequence_tiles,
        plan.routes_own_tokens(mesh),
        plan.expert_dispatch(mesh),
        plan.sequence_slices > 1,
        workload.earlier_positions,
        load_of_ranks(workload, plan, mesh).imbalance,
    )


@lru_cache(maxsize=256)
def _local_model(spec: ModelSpec, tp: int, index: int) -> ModelSpec:
    """Return the model with the widths of the shard of rank `index` of `tp`."""

    def rows(name: str, count: int) -> int:
        return tp_shard(spec, f"{name}.weight", (count, spec.hidden_size), tp, index)[0].size[0]

    widths = {
        "num_heads": rows("attn.q", spec.num_heads * spec.head_dim) // spec.head_dim,
        "num_kv_heads": rows("attn.k", spec.num_kv_heads * spec.head_dim) // spec.head_dim,
        "intermediate_size": rows("mlp.gate", spec.intermediate_size),
        "vocab_size": rows("head", spec.vocab_size),
    }
    return spec.model_copy(update=widths)


def layer_activation_bytes(sizes: PassSizes, layer: int, recompute: Recompute, attention_kernel: str = "flash") -> int:
    """Return the bytes that a layer saves from its forward to its backward.

    `full`: its input alone. `elementwise`: all but the outputs of the norms before attention and MLP and of the gated
    activation (`muster.model.recompute`). Tiles save the input of the MLP's norm in place of all that the MLP computes.
    `core_attention` (arXiv:2205.05198 §5): all but the attention scores, or with flash attention its log-sum-exp.
    `every_second_matmul` (torchtitan's selective activation checkpointing by operation): the input, the output of every
    second matmul, the output of attention.
    """
    own, tokens, precision = sizes.local_model, sizes.tokens, sizes.precision
    ladder = ladder_saved_bytes(sizes, layer, recompute)
    if recompute == "full":
        return sizes.hidden_bytes + ladder
    if (trace := _plugin_layer_trace(sizes)) is not None:
        return trace.saved_activation_bytes * sizes.tokens // sizes.seq_len
    if recompute == "every_second_matmul":
        return sizes.hidden_bytes + _every_second_matmul_bytes(sizes, layer)
    scores = attention_score_bytes(sizes) if attention_kernel != "flash" else 0
    total = layer_norm_saved_bytes(sizes) + attention_activation_bytes(sizes, layer) + saved_mlp_bytes(sizes, layer)
    total += ladder
    shortcut = own.has_shortcut(layer) * (norm_saved_bytes(own, sizes.hidden_tokens, precision) - sizes.hidden_bytes)
    total += shortcut + adapter_saved_bytes(sizes) - _unread_input_bytes(sizes, layer, recompute)
    total += low_rank_saved_bytes(sizes)
    if recompute == "core_attention":
        return total - tokens * own.num_heads * master_bytes(precision)
    if recompute == "elementwise":
        is_tiled = sizes.sequence_tiles > 1
        total -= (2 - is_tiled) * own.has_pre_norms * sizes.hidden_bytes + own.has_shortcut(layer) * sizes.hidden_bytes
        total -= 0 if is_tiled else mlp_inner_bytes(sizes, layer)
    return total + scores


def ladder_saved_bytes(sizes: PassSizes, layer: int, recompute: Recompute) -> int:
    """Return the bytes that a layer of a ladder saves beside those of another model: recomputed in full, the pending
    output beside its input. Both norms of the first layer save the same tensor, and nothing is pending there."""
    if sizes.model.residual != "ladder":
        return 0
    if recompute == "full":
        return sizes.hidden_bytes * (layer > 0)
    return -sizes.hidden_bytes * (layer == 0)


def conjunction_saved_bytes(sizes: PassSizes) -> int:
    """Return the bytes of all streams on the rank that the linear layer behind the last layer saves; 0 where there is
    one stream."""
    return sizes.hidden_bytes * (sizes.model.parallel_sublayers > 1)


def boundary_saved_bytes(spec: ModelSpec, plan: Plan, stage: int, sizes: PassSizes) -> int:
    """Return the bytes of a stage's input that its first layer doesn't save, but the message holds: of a ladder the
    pending output."""
    is_held = plan.strategy(plan.layers(stage, spec.num_layers).start).recompute != "full"
    return (sizes.message_bytes - sizes.hidden_bytes) * (is_held and not plan.is_first(stage))


def adapter_saved_bytes(sizes: PassSizes) -> int:
    """Return the bytes that a layer's adapters save: A x of each, which the gradient of B reads, and in DoRA
    the output before its rows are scaled, their lengths and factors; those of an MLP in tiles save nothing, nor do
    HD-PiSSA's, which only the backward computes with."""
    if (adapter := sizes.model.adapter) is None or adapter.changes_weights:
        return 0
    targets = [name for name in adapter.target_modules if sizes.sequence_tiles == 1 or name in ("q", "k", "v", "o")]
    numbers, rows = len(targets) * adapter.r, 0
    if adapter.kind == "dora":
        own, hidden = sizes.local_model, sizes.model.hidden_size
        q, kv = own.num_heads * own.head_dim, own.num_kv_heads * own.head_dim
        widths = {"q": q, "k": kv, "v": kv, "gate": own.intermediate_size, "up": own.intermediate_size}
        rows = sum(widths.get(name, hidden) for name in targets)
    return ((numbers + rows) * sizes.tokens + 2 * rows) * compute_bytes(sizes.precision)


def low_rank_saved_bytes(sizes: PassSizes) -> int:
    """Return the bytes that a layer's low-rank linear layers save beside their inputs: A x of each, which the gradient
    of B reads; those of an MLP in tiles save nothing."""
    ranks = sizes.model.low_rank_ranks
    saved = sum(rank for name, rank in ranks.items() if sizes.sequence_tiles == 1 or name in ("q", "k", "v", "o"))
    return saved * sizes.tokens * compute_bytes(sizes.precision)


def mlp_matrix_numels(sizes: PassSizes) -> dict[str, int]:
    """Return the elements of the matrices of each linear layer of an MLP, by its name, on a tensor-parallel rank."""
    own, ranks = sizes.local_model, sizes.model.low_rank_ranks
    inner, hidden = own.intermediate_size, own.hidden_size
    names = ("gate", "up", "down") if own.gated else ("up", "down")
    return {name: ranks[name] * (inner + hidden) if name in ranks else inner * hidden for name in names}


def _unread_input_bytes(sizes: PassSizes, layer: int, recompute: Recompute) -> int:
    """Return the bytes of inputs of linear layers that nothing saves where adapters alone are trained: a frozen matrix
    needs no input in its backward, and only an adapter's A does.

    They are the outputs of both norms and the gated activation; attention saves its output anyhow. Under tensor
    parallelism they are saved all the same, with the gathered input, as linear layers are there; of elementwise
    recompute none are.
    """
    adapter, own = sizes.model.adapter, sizes.local_model
    is_plain = own.mla is None and not own.has_linear_attention(layer) and not own.has_experts(layer)
    if adapter is None or recompute == "elementwise" or sizes.mesh.tp > 1 or not is_plain:
        return 0
    has_mlp_input = sizes.sequence_tiles > 1 or bool({"gate", "up"} & {*adapter.target_modules})
    normed = (not {"q", "k", "v"} & {*adapter.target_modules}) + (not has_mlp_input)
    inner = 0 if sizes.sequence_tiles > 1 or "down" in adapter.target_modules else mlp_inner_bytes(sizes, layer)
    return normed * own.has_pre_norms * sizes.hidden_bytes + inner


def _plugin_layer_trace(sizes: PassSizes) -> LayerTrace | None:
    """Return the trace of one sequence through a plugin's layer; None for native models."""
    plugin = plugin_model(sizes.model)
    return None if plugin is None else plugin.layer_trace(sizes.model, sizes.seq_len, sizes.mesh.tp, sizes.precision)


def offloaded_activation_bytes(
    spec: ModelSpec, plan: Plan, workload: Workload, stage: int, tier: Tier = "host", tp_index: int = 0
) -> int:
    """Return the activation bytes of one micro-batch that a stage's first rank, or that of a tensor-parallel index,
    offloads to host memory or keeps on disk; of a slice of sequences what `num_offloaded_layers` says."""
    layers = plan.offloaded_layers(stage, spec.num_layers, tier)
    if workload.next_positions is not None:
        layers = layers[: num_offloaded_layers(len(layers), workload.seq_len, workload.next_positions)]
    return _bytes_of_layers(spec, plan, workload, stage, layers, tp_index)


def late_written_bytes(spec: ModelSpec, plan: Plan, workload: Workload, stage: int, tp_index: int = 0) -> int:
    """Return the part of those on disk that may be written while the next pass runs."""
    layers = plan.late_written_layers(stage, spec.num_layers)
    return _bytes_of_layers(spec, plan, workload, stage, layers, tp_index)


def _bytes_of_layers(
    spec: ModelSpec, plan: Plan, workload: Workload, stage: int, layers: Sequence[int], tp_index: int
) -> int:
    if not layers:
        return 0
    sizes = pass_sizes(spec, plan, workload, stage, tp_index)
    return sum(
        layer_activation_bytes(sizes, layer, own.recompute, own.attention)
        for layer in layers
        for own in (plan.strategy(layer),)
    )


def attention_score_bytes(sizes: PassSizes) -> int:
    """Return the bytes of unfused attention's softmax, which the matmul with the values and softmax's backward read."""
    return sizes.tokens * sizes.local_model.num_heads * sizes.seq_len * compute_bytes(sizes.precision)


def attention_activation_bytes(sizes: PassSizes, layer: int) -> int:
    """Return the bytes that a layer's attention saves, without its norm."""
    own, tokens, precision = sizes.local_model, sizes.tokens, sizes.precision
    size = compute_bytes(precision)
    if own.has_linear_attention(layer):
        return _linear_attention_bytes(sizes)
    if own.mla is not None:
        return _latent_attention_bytes(sizes)
    if sizes.is_sliced:
        kept = tokens * 2 * own.num_kv_heads * own.head_dim * size
        return softmax_attention_saved_bytes(own, tokens, precision) - kept
    if sizes.context.ulysses == 1:
        saves_scores = sizes.context.size > 1 and CONTEXT_KINDS[sizes.context.kind].saves_scores
        return softmax_attention_saved_bytes(own, tokens, precision) + attention_score_bytes(sizes) * saves_scores
    # Where ranks exchange heads, neighbours have the same key/value head if there are fewer than ranks. The output is
    # saved as attention makes it, more positions of some heads, and once more as the output projection gets it.
    copied = max(0, sizes.context.ulysses - own.num_kv_heads)
    output = tokens * own.num_heads * own.head_dim * size
    return softmax_attention_saved_bytes(own, tokens, precision, copied) + output


def _linear_attention_bytes(sizes: PassSizes) -> int:
    """Return the bytes that linear attention saves: queries, keys and values (under the gated delta rule before and
    after a convolution), the gate, the output before its norm, after it, and gated, a statistic for each head; logits
    of decays with their input; over several ranks what an exchange of states
    leaves."""
    linear, tokens, tp = sizes.model.linear_attention, sizes.tokens, sizes.mesh.tp
    assert linear is not None
    keys, values, size = linear.k_width // tp, linear.v_width // tp, compute_bytes(sizes.precision)
    if linear.kind == "gated_deltanet":
        return tokens * size * (2 * (2 * keys + values) + 3 * values)
    master, heads = master_bytes(sizes.precision), linear.num_value_heads // tp
    width = 2 * keys + 5 * values + linear.decay_width // tp + DECAY_RANK * (linear.kind == "gla")
    assert sizes.states is not None
    states = state_saved_numel(sizes.context, sizes.states)
    return tokens * (width * size + heads * master) + states * master


def _latent_attention_bytes(sizes: PassSizes) -> int:
    """Return the bytes that latent attention saves (`muster.model.latent_attention`).

    Of latent vectors those before their norms, with the keys' rotary elements, and a statistic for each norm; the
    normed ones, as the projections to all heads read them. Queries, keys, padded values and outputs of all heads, and a
    statistic for each; where values are narrower than keys, the outputs once more, without the padding.
    """
    own, tokens, mla = sizes.local_model, sizes.tokens, sizes.local_model.mla
    assert mla is not None
    size, master = compute_bytes(sizes.precision), master_bytes(sizes.precision)
    statistics = 1 + (mla.q_lora_rank is not None)
    before = sizes.hidden_tokens * (mla.latent_width * size + statistics * master)
    # Tensor parallelism joins them, together with the rotary elements, in one tensor.
    read = tokens * (mla.latent_width - (0 if sizes.mesh.tp > 1 else mla.rope_head_dim)) * size
    saves_scores = sizes.context.size > 1 and CONTEXT_KINDS[sizes.context.kind].saves_scores
    kept = (2 if sizes.is_sliced else 4) - saves_scores  # with scores, the output isn't read again
    heads = kept * own.num_heads * mla.qk_head_dim * size + own.num_heads * master
    is_cut = mla.v_head_dim < mla.qk_head_dim and own.num_heads > 1  # of a single head, the rest is a view
    output = own.num_heads * (mla.v_head_dim if is_cut else mla.qk_head_dim) * size
    output *= is_cut or sizes.context.ulysses > 1 or saves_scores
    scores = attention_score_bytes(sizes) * saves_scores
    return before + read + tokens * (heads + output) + scores


def latent_elements_per_token(own: ModelSpec) -> int:
    """Return the elements per token that latent attention saves where kernels take values narrower than keys: the
    low-rank vectors before and after their norms; queries, keys, values and outputs of all heads (arXiv:2405.04434
    §2.1)."""
    mla = own.mla
    assert mla is not None
    narrow = mla.latent_width + (mla.q_lora_rank or 0) + mla.kv_lora_rank
    return narrow + 2 * own.num_heads * (mla.qk_head_dim + mla.v_head_dim)


def saved_mlp_bytes(sizes: PassSizes, layer: int) -> int:
    """Return the bytes that a layer's MLP saves from its forward to its backward: none where it is tiled."""
    if sizes.sequence_tiles > 1:
        return 0
    return mlp_activation_bytes(sizes, layer) + _own_token_bytes(sizes, layer)


def _own_token_bytes(sizes: PassSizes, layer: int) -> int:
    """Return the bytes that experts save where each tensor-parallel rank routes a part of the positions, beside the
    norm's output.

    Under sequence parallelism, the whole hidden state that enters shared experts; otherwise the part that is routed,
    and without shared experts nothing reads the whole.
    """
    if not (sizes.routes_own_tokens and sizes.local_model.has_experts(layer)):
        return 0
    moe, whole = sizes.local_model.moe, sizes.full_hidden_bytes
    assert moe is not None
    if sizes.hidden_tokens < sizes.tokens:
        return whole if moe.shared_size else 0
    return whole // sizes.mesh.tp - (0 if moe.shared_size else whole)


def mlp_activation_bytes(sizes: PassSizes, layer: int) -> int:
    """Return the bytes that a layer's MLP saves, without its norm.

    Experts save the router's probabilities, the dispatched rows, each expert's inner activations, and the rows that are
    combined; of each token the choices with their weights, before and after these are scaled; and orders of rows;
    and as many copies of other ranks' experts as there may be.
    """
    own, size = sizes.local_model, compute_bytes(sizes.precision)
    if (trace := _plugin_layer_trace(sizes)) is not None:
        return trace.saved_activation_bytes * sizes.tokens // sizes.seq_len
    if not own.has_experts(layer):
        return dense_mlp_saved_bytes(own, sizes.tokens, sizes.precision)
    moe, inner = own.moe, 2 + own.gated
    assert moe is not None
    tokens, master = sizes.routed_tokens, master_bytes(sizes.precision)
    router = tokens * moe.num_experts * master * (1 + bool(moe.router_z_loss_coef))
    choices = tokens * moe.top_k * (_INDEX_BYTES + (1 + moe.norm_top_k) * master) + tokens * moe.norm_top_k * master
    orders = _row_order_bytes(sizes)
    rows = sizes.expert_tokens * (own.hidden_size + inner * moe.expert_size // sizes.mesh.etp) * size
    combined = combined_row_bytes(sizes)
    shared = sizes.tokens * inner * moe.shared_size // sizes.mesh.tp * size
    copies = sizes.dispatch.redundant * sum(expert_parameter_bytes(own, sizes.mesh.etp, size))
    if moe.shared_gate:
        shared += sizes.tokens * (own.hidden_size + 1) * size
    # Under sequence parallelism the norm's output is saved whole, as it enters the experts.
    entered = max(0, tokens - sizes.hidden_tokens) * own.hidden_size * size
    return router + choices + orders + rows + combined + shared + entered + copies


def expert_parameter_bytes(model: ModelSpec, etp: int, element_bytes: int) -> list[int]:
    """Return the bytes of each matrix and bias of one expert, of which a rank has one of `etp` slices."""
    assert model.moe is not None
    inner, hidden = model.moe.expert_size // etp, model.hidden_size
    matrices = [inner * hidden * element_bytes] * (2 + model.gated)
    biases = [*[inner * element_bytes] * (1 + model.gated), hidden * element_bytes] if model.mlp_bias else []
    return matrices + biases


def combined_row_bytes(sizes: PassSizes) -> int:
    """Return the bytes of the rows that are weighted and summed by token."""
    return _combined_rows(sizes) * sizes.local_model.hidden_size * compute_bytes(sizes.precision)


def _combined_rows(sizes: PassSizes) -> int:
    """Return the rows that are summed by token: those that experts process, or for which centroids travel."""
    moe = sizes.local_model.moe
    assert moe is not None
    return sizes.routed_tokens * moe.top_k if sizes.dispatch.lsh_rate else sizes.expert_tokens


def _row_order_bytes(sizes: PassSizes) -> int:
    """Return the bytes that say where rows of experts come from and go to.

    A row has its place in the order by token and in that by expert; in a list of any pairs all pairs have the one, and
    the rank's rows a token and a weight. After each step of an exchange two more orders follow.
    """
    moe, rows, dispatch = sizes.local_model.moe, sizes.expert_tokens, sizes.dispatch
    assert moe is not None
    reorders = {"all_to_all": dispatch.size > 1, "hierarchical": 3}.get(dispatch.kind, 0)
    total = rows * 2 * _INDEX_BYTES * reorders + _combined_rows(sizes) * 2 * _INDEX_BYTES
    if dispatch.lsh_rate:  # the centroid of each row, and the rows of each centroid
        total += _combined_rows(sizes) * _INDEX_BYTES + rows * compute_bytes(sizes.precision)
    if dispatch.kind in ("slicing", "all_gather") or moe.needs_whole_sequences:
        pairs = sizes.routed_tokens * moe.top_k * (dispatch.size if dispatch.kind == "all_gather" else 1)
        total += (pairs - rows) * _INDEX_BYTES + rows * master_bytes(sizes.precision)
    return total


def dispatched_bytes(sizes: PassSizes) -> int:
    """Return the bytes of hidden states that come from other ranks, or go to them, with the tokens of one layer."""
    if sizes.dispatch.size == 1 or sizes.dispatch.kind == "slicing":
        return 0
    if sizes.dispatch.kind == "all_gather":
        return (
            sizes.dispatch.size * sizes.routed_tokens * sizes.local_model.hidden_size * compute_bytes(sizes.precision)
        )
    return sizes.routed_row_bytes


def mlp_inner_bytes(sizes: PassSizes, layer: int) -> int:
    """Return the bytes of the input of the MLP's last matmul: the output of the (gated) activation."""
    size = compute_bytes(sizes.precision)
    if (trace := _plugin_layer_trace(sizes)) is not None:
        return trace.largest_tensor_bytes * sizes.tokens // sizes.seq_len
    if not sizes.local_model.has_experts(layer):
        return sizes.tokens * sizes.local_model.intermediate_size * size
    moe = sizes.local_model.moe
    assert moe is not None
    shared = sizes.tokens * moe.shared_size // sizes.mesh.tp
    return (sizes.expert_tokens * moe.expert_size // sizes.mesh.etp + shared) * size


def _every_second_matmul_bytes(sizes: PassSizes, layer: int) -> int:
    """Return the bytes of q, v, gate and down, out of the seven matmuls q, k, v, o, gate, up, down, and of attention's
    output and log-sum-exp."""
    own, size, tokens = sizes.local_model, compute_bytes(sizes.precision), sizes.tokens
    attention = (2 * own.num_heads + own.num_kv_heads) * own.head_dim * size + own.num_heads * master_bytes(
        sizes.precision
    )
    return tokens * attention + mlp_inner_bytes(sizes, layer) + sizes.hidden_bytes


def layer_norm_saved_bytes(sizes: PassSizes) -> int:
    """Return the bytes that a layer's norms save, and those of the inputs of attention and MLP.

    A norm of a sublayer's output saves its input; where there is none before, the sublayer's own input is saved by its
    first linear layers. Attention and MLP in parallel have one input. The norm before tiles is computed with them.
    """
    own, size = sizes.local_model, sizes.hidden_bytes
    statistics = sizes.streams * norm_saved_bytes(own, sizes.hidden_tokens, sizes.precision) - 2 * size
    inputs = (1 if own.parallel_residual else 2) * size
    norms = own.has_pre_norms * (2 if sizes.sequence_tiles == 1 else 1) + 2 * own.has_post_norms
    return inputs + norms * (size + statistics)


def norm_saved_bytes(spec: ModelSpec, tokens: int, precision: Precision) -> int:
    """Return the bytes that a norm saves: its input, one statistic per token (two for LayerNorm), and its output, which
    is the input of the next linear layers."""
    statistics = 2 if spec.norm == "layer" else 1
    return tokens * (2 * spec.hidden_size * compute_bytes(precision) + statistics * master_bytes(precision))


def further_activation_bytes(sizes: PassSizes, recompute: Recompute) -> int:
    """Return the bytes that a layer for multi-token prediction saves of one micro-batch beside what another layer does.

    Its tokens; the embeddings, both norms side by side, the layer's output and the norm of it, which the head reads;
    the statistics of three norms. Full recompute keeps the embeddings and the last norm; the layer's input is the norm
    that the head of the depth before has saved.
    """
    tokens = sizes.tokens * (8 + (sizes.mesh.tp > 1))
    if recompute == "full":
        return tokens + sizes.hidden_bytes
    statistics = 2 if sizes.model.norm == "layer" else 1
    return tokens + 5 * sizes.hidden_bytes + 3 * statistics * sizes.hidden_tokens * master_bytes(sizes.precision)


def softmax_attention_saved_bytes(spec: ModelSpec, tokens: int, precision: Precision, copied_kv_heads: int = 0) -> int:
    """Return the bytes that softmax attention saves: q and k after rotary embedding, v, the output, and flash
    attention's log-sum-exp per head (arXiv:2205.14135); with QK norms also their inputs and a statistic per norm.

    The output is also the input of the output projection, and counts once. `copied_kv_heads` are copies of key/value
    heads, made behind their norm.
    """
    width = 2 * (spec.num_heads + spec.num_kv_heads + copied_kv_heads) * spec.head_dim
    statistics = spec.num_heads
    if spec.qk_norm:
        width += (spec.num_heads + spec.num_kv_heads) * spec.head_dim
        statistics += 2 if spec.qk_norm_width == "projection" else spec.num_heads + spec.num_kv_heads
    return tokens * (width * compute_bytes(precision) + statistics * master_bytes(precision))


def dense_mlp_saved_bytes(spec: ModelSpec, tokens: int, precision: Precision) -> int:
    """Return the bytes of gate (if there is one), up, and the input of the last matmul; the activation of gate is
    recomputed."""
    return tokens * (3 if spec.gated else 2) * spec.intermediate_size * compute_bytes(precision)


def loss_saved_bytes(spec: ModelSpec, tokens: int, precision: Precision) -> int:
    """Return the bytes of the gradient of the logits, which the loss computes in its forward, in the logits' dtype."""
    return tokens * spec.vocab_size * compute_bytes(precision)


def vocab_parallel_bytes(spec: ModelSpec, plan: Plan, workload: Workload, pp_rank: int) -> int:
    """Return the bytes that a rank saves of one micro-batch from S to T under a vocabulary-parallel head.

    Per token: the softmax over the rank's vocabulary shard, a factor for each pipeline rank and the loss weight, all in
    the master dtype, and the hidden state.
    """
    tokens = plan.local_micro_batch_size(0) * workload.seq_len // plan.mesh(0).sequence_shards
    shard_size = chunk_bounds(spec.vocab_size, plan.pp, pp_rank)[1]
    statistics = (shard_size + plan.pp + 1) * master_bytes(plan.precision)
    return tokens * (statistics + spec.hidden_size * compute_bytes(plan.precision))
