"""What one micro-batch leaves behind in a layer, for every kind of layer and of recompute.

Dense layers follow `muster.model` tensor by tensor; what the runtime can't do yet (experts, latent and linear
attention, cp, ep, unfused attention) follows the same rule: kept is what a linear layer, a norm or a kernel with a
derivative of its own reads in its backward, once.
"""

from dataclasses import dataclass

from muster.cost.precision_bytes import compute_bytes, master_bytes
from muster.cost.time.plugin_layer import plugin_largest_tensor_bytes, plugin_layer_bytes
from muster.layout.tensor_layout import chunk_bounds, tp_shard
from muster.spec.model import ModelSpec
from muster.spec.plan import Mesh, Plan, Precision, Recompute
from muster.spec.workload import Workload


@dataclass(frozen=True, slots=True)
class PassSizes:
    """What a pass over one micro-batch works on, on one rank of a stage."""

    local_model: ModelSpec
    """The model as wide as the rank computes it."""
    mesh: Mesh
    tokens: int
    """Positions that attention and MLP work on."""
    hidden_tokens: int
    """Positions whose hidden state the rank holds: fewer under sequence parallelism."""
    precision: Precision
    model: ModelSpec
    """The model."""
    seq_len: int

    @property
    def hidden_bytes(self) -> int:
        """Of the hidden state as it is held."""
        return self.hidden_tokens * self.local_model.hidden_size * compute_bytes(self.precision)

    @property
    def full_hidden_bytes(self) -> int:
        """Of the hidden state of all tokens."""
        return self.tokens * self.local_model.hidden_size * compute_bytes(self.precision)

    @property
    def expert_tokens(self) -> int:
        """Rows that go through the rank's experts where every expert has as many: each token `top_k` times, dealt over
        the ranks that share the experts."""
        assert self.local_model.moe is not None
        return self.tokens * self.local_model.moe.top_k * self.mesh.etp // self.mesh.tp


def pass_sizes(spec: ModelSpec, plan: Plan, workload: Workload, stage: int, tp_index: int = 0) -> PassSizes:
    """Of a stage's `tp_index`-th tensor-parallel rank, the first of which never has less than another; context
    parallelism cuts every sequence (arXiv:2310.01889)."""
    mesh = plan.mesh(stage)
    tokens = plan.local_micro_batch_size(stage) * workload.seq_len // mesh.sequence_shards
    sp = plan.strategy(min(plan.layers(stage, spec.num_layers).start, spec.num_layers - 1)).sp
    own, hidden_tokens = _local_model(spec, mesh.tp, tp_index), tokens // mesh.tp if sp else tokens
    return PassSizes(own, mesh, tokens, hidden_tokens, plan.precision, spec, workload.seq_len)


def _local_model(spec: ModelSpec, tp: int, index: int) -> ModelSpec:
    """The model as wide as rank `index` of `tp` computes it."""

    def rows(name: str, count: int) -> int:
        return tp_shard(spec, f"layers.0.{name}.weight", (count, spec.hidden_size), tp, index)[0].size[0]

    widths = {
        "num_heads": rows("attn.q", spec.num_heads * spec.head_dim) // spec.head_dim,
        "num_kv_heads": rows("attn.k", spec.num_kv_heads * spec.head_dim) // spec.head_dim,
        "intermediate_size": rows("mlp.gate", spec.intermediate_size),
        "vocab_size": rows("head", spec.vocab_size),
    }
    return spec.model_copy(update=widths)


def layer_activation_bytes(sizes: PassSizes, layer: int, recompute: Recompute, attention_kernel: str = "flash") -> int:
    """What a layer keeps from its forward to its backward.

    full: its input alone. selective: neither what the two norms nor what the gated linear unit gives to the linear
    layers after it (`muster.model.recompute`). attention (arXiv:2205.05198 §5): without the scores, or what flash
    attention keeps of them. alternate (torchtitan's selective checkpointing by operation): the input, every second
    matrix product's output, attention's output.
    """
    own, tokens, precision = sizes.local_model, sizes.tokens, sizes.precision
    if (kept := _plugin_layer_bytes(sizes, recompute)) is not None:
        return kept
    if recompute == "full":
        return sizes.hidden_bytes
    if recompute == "every_second_matmul":
        return sizes.hidden_bytes + _every_second_matmul_bytes(sizes, layer)
    scores = attention_score_bytes(sizes) if attention_kernel != "flash" else 0
    norms = 2 * norm_saved_bytes(own, sizes.hidden_tokens, precision)
    total = norms + attention_activation_bytes(sizes, layer) + mlp_activation_bytes(sizes, layer)
    if recompute == "core_attention":
        return total - tokens * own.num_heads * master_bytes(precision)
    if recompute == "elementwise":
        total -= 2 * sizes.hidden_bytes + mlp_inner_bytes(sizes, layer)
    return total + scores


def _plugin_layer_bytes(sizes: PassSizes, recompute: Recompute) -> int | None:
    """What a plugin's layer keeps; None for Muster's own."""
    tp, tokens = sizes.mesh.tp, sizes.tokens
    return plugin_layer_bytes(sizes.model, tp, tokens, sizes.hidden_bytes, sizes.seq_len, sizes.precision, recompute)


def offloaded_activation_bytes(spec: ModelSpec, plan: Plan, workload: Workload, stage: int) -> int:
    """What goes to the host's memory of one micro-batch of a stage, on its first rank."""
    sizes = pass_sizes(spec, plan, workload, stage)
    return sum(
        layer_activation_bytes(sizes, layer, own.recompute, own.attention)
        for layer in plan.offloaded_layers(stage, spec.num_layers)
        for own in (plan.strategy(layer),)
    )


def attention_score_bytes(sizes: PassSizes) -> int:
    """The softmax of unfused attention, which weighs the values and is needed again by its own derivative."""
    return sizes.tokens * sizes.local_model.num_heads * sizes.seq_len * compute_bytes(sizes.precision)


def attention_activation_bytes(sizes: PassSizes, layer: int) -> int:
    """What a layer's attention keeps, its norm left out."""
    own, tokens, precision = sizes.local_model, sizes.tokens, sizes.precision
    size = compute_bytes(precision)
    if own.has_linear_attention(layer):
        linear = own.linear_attention
        assert linear is not None
        keys = linear.num_key_heads * linear.key_head_dim // sizes.mesh.tp
        values = linear.num_value_heads * linear.value_head_dim // sizes.mesh.tp
        # q, k, v before and after the convolution, the gate, the output before and after its norm (arXiv:2412.06464)
        return tokens * size * (2 * (2 * keys + values) + 3 * values)
    if own.mla is not None:
        return tokens * _mla_elements_per_token(own) * size + tokens * own.num_heads * master_bytes(precision)
    return softmax_attention_saved_bytes(own, tokens, precision)


def _mla_elements_per_token(own: ModelSpec) -> int:
    """Per token: the narrow vectors before and after their norms; queries, keys and values of all heads; the output
    (arXiv:2405.04434 §2.1)."""
    mla = own.mla
    assert mla is not None
    head = mla.nope_head_dim + mla.rope_head_dim
    narrow = 2 * ((mla.q_lora_rank or 0) + mla.kv_lora_rank) + mla.rope_head_dim
    return narrow + own.num_heads * (2 * head + 2 * mla.v_head_dim)


def mlp_activation_bytes(sizes: PassSizes, layer: int) -> int:
    """What a layer's MLP keeps, its norm left out. Experts: the router's probabilities, the rows as they were sent, and
    what each expert keeps of them; rows are combined after they were weighed, so that no more is kept of them."""
    own, size = sizes.local_model, compute_bytes(sizes.precision)
    if (kept := _plugin_layer_bytes(sizes, "none")) is not None:
        return kept
    if not own.has_experts(layer):
        return dense_mlp_saved_bytes(own, sizes.tokens, sizes.precision)
    moe, inner = own.moe, 2 + own.gated
    assert moe is not None
    router = sizes.hidden_tokens * moe.num_experts * master_bytes(sizes.precision)
    rows = sizes.expert_tokens * (own.hidden_size + inner * moe.expert_size // sizes.mesh.etp) * size
    weighed = sizes.expert_tokens * own.hidden_size * size
    return router + rows + weighed + sizes.tokens * inner * moe.shared_size // sizes.mesh.tp * size


def mlp_inner_bytes(sizes: PassSizes, layer: int) -> int:
    """The MLP's activated inner state: the input of its last matrix product."""
    size = compute_bytes(sizes.precision)
    largest = plugin_largest_tensor_bytes(sizes.model, sizes.mesh.tp, sizes.tokens, sizes.seq_len, sizes.precision)
    if largest is not None:
        return largest
    if not sizes.local_model.has_experts(layer):
        return sizes.tokens * sizes.local_model.intermediate_size * size
    moe = sizes.local_model.moe
    assert moe is not None
    shared = sizes.tokens * moe.shared_size // sizes.mesh.tp
    return (sizes.expert_tokens * moe.expert_size // sizes.mesh.etp + shared) * size


def _every_second_matmul_bytes(sizes: PassSizes, layer: int) -> int:
    """q, v, gate and down of the seven products q, k, v, o, gate, up, down; attention's output and log-sum-exp."""
    own, size, tokens = sizes.local_model, compute_bytes(sizes.precision), sizes.tokens
    attention = (2 * own.num_heads + own.num_kv_heads) * own.head_dim * size + own.num_heads * master_bytes(
        sizes.precision
    )
    return tokens * attention + mlp_inner_bytes(sizes, layer) + sizes.hidden_bytes


def norm_saved_bytes(spec: ModelSpec, tokens: int, precision: Precision) -> int:
    """A norm's input and its statistics per token (LayerNorm has a mean besides), and its output as the input of the
    linear layers after it."""
    statistics = 2 if spec.norm == "layer" else 1
    return tokens * (2 * spec.hidden_size * compute_bytes(precision) + statistics * master_bytes(precision))


def softmax_attention_saved_bytes(spec: ModelSpec, tokens: int, precision: Precision) -> int:
    """q and k after their rotation, v, the output, and flash attention's log-sum-exp per head (arXiv:2205.14135); with
    norms of q and k also what goes into these, and a statistic per head.

    The output is the input of the linear layer after it too, and counts once.
    """
    width = 2 * (spec.num_heads + spec.num_kv_heads) * spec.head_dim
    statistics = spec.num_heads
    if spec.qk_norm:
        width += (spec.num_heads + spec.num_kv_heads) * spec.head_dim
        statistics += spec.num_heads + spec.num_kv_heads
    return tokens * (width * compute_bytes(precision) + statistics * master_bytes(precision))


def dense_mlp_saved_bytes(spec: ModelSpec, tokens: int, precision: Precision) -> int:
    """gate if there is one, up, and what comes of them as the input of the last linear layer; the activation of gate is
    computed again."""
    return tokens * (3 if spec.gated else 2) * spec.intermediate_size * compute_bytes(precision)


def loss_saved_bytes(spec: ModelSpec, tokens: int, precision: Precision) -> int:
    """The gradient of the logits, which the loss makes in its forward, in the dtype of the logits."""
    return tokens * spec.vocab_size * compute_bytes(precision)


def vocab_parallel_bytes(spec: ModelSpec, plan: Plan, workload: Workload, pp_rank: int) -> int:
    """What a rank keeps of one micro-batch from S to T where the vocabulary is spread: the softmax over its words,
    a factor for each rank and a weight by position, all as sums are kept, and the hidden state."""
    positions, wide = plan.local_micro_batch_size(0) * workload.seq_len, master_bytes(plan.precision)
    words = chunk_bounds(spec.vocab_size, plan.pp, pp_rank)[1]
    return positions * ((words + plan.pp + 1) * wide + spec.hidden_size * compute_bytes(plan.precision))
