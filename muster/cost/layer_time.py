"""How long a decoder layer's passes take on one rank: its products, its attention, and what is one pass over memory."""

from dataclasses import dataclass
from functools import cached_property

from muster.cost.collectives import (
    Group,
    all_gather_s,
    all_reduce_s,
    all_to_all_s,
    message_s,
    reduce_scatter_s,
)
from muster.cost.kernels import (
    flash_attention_s,
    grouped_matmul_s,
    matmul_s,
    number_bytes,
    stream_s,
    sustained_flops_per_s,
)
from muster.cost.spent import Spent
from muster.spec.device import AttentionKernel, DeviceSpec
from muster.spec.model import ModelSpec
from muster.spec.plan import Precision, Strategy
from muster.spec.software import Software

CAST_NORM = (20, 32)
"""Bytes that a norm's kernel moves for each number, forward and backward, with casts to float32 and back around it, as
eager programs have them."""
EAGER_NORM = (45, 115)
"""Bytes that an RMSNorm moves for each number, forward and backward, when each of its operations is a kernel, in
float32: cast, square, mean, product, cast, product with the weight; Llama's published code, and autograd's for it."""
EAGER_ROTATION = (20, 24)
"""Bytes for each number of queries and keys when rotary positions are two products, a negation, a concatenation and a
sum."""
LAYOUT = (4, 4)
"""Bytes for each number of queries, keys, values and of the output of attention that is written in another order before
it is read: heads together."""
PERMUTED = 0.5
"""Share of the streaming rate at which rows are gathered into another order (B200, github:MooreThreads/SimuMax
configs/system/b200_bf16_ceperm.json)."""
_FLASH: tuple[AttentionKernel, ...] = ("flash3", "flash2", "flash1")


@dataclass(frozen=True)
class LayerSetting:
    """What a layer's times depend on, as one rank sees it."""

    model: ModelSpec
    device: DeviceSpec
    software: Software
    strategy: Strategy
    precision: Precision
    sequences: float
    """Of a micro-batch, that the rank works on."""
    seq_len: int
    tp: Group
    cp: Group
    ep: Group
    etp: int = 1
    is_sharded: bool = False
    """Whether there are data-parallel ranks, which z2 and z3 reduce gradients over in every backward."""

    @property
    def tokens(self) -> float:
        """Positions that the rank's products work on."""
        return self.sequences * self.seq_len / self.cp.size

    @property
    def norm_tokens(self) -> float:
        """Positions of the hidden state between them: cut under sequence parallelism."""
        return self.tokens / self.tp.size if self.strategy.sp else self.tokens

    @cached_property
    def act(self) -> int:
        """Bytes of a number of the hidden state."""
        return max(2, number_bytes(self.precision))

    @cached_property
    def linear_precision(self) -> Precision:
        """Of the layers' products."""
        return self.precision

    @cached_property
    def wide(self) -> Precision:
        """Of attention, head and all else that fp8 leaves as it is."""
        return "bf16" if self.precision == "fp8" else self.precision

    @property
    def hidden_bytes(self) -> float:
        """The hidden state of a micro-batch, over all tensor-parallel ranks."""
        return self.tokens * self.model.hidden_size * self.act


@dataclass(slots=True)
class LayerPasses:
    """What the passes of a layer spend. A full backward is `again`, `inputs` and `weights`."""

    forward: Spent
    inputs: Spent
    weights: Spent
    again: Spent
    """What recompute repeats."""


def layer_passes(at: LayerSetting, layer: int) -> LayerPasses:
    """The passes of one layer."""
    model, attention = at.model, _Part()
    if model.has_linear_attention(layer):
        _linear_attention(at, attention)
    elif model.mla is not None:
        _latent_attention(at, attention)
    else:
        _attention(at, attention, model.window(layer))
    mlp = _Part()
    if model.has_experts(layer):
        _experts(at, mlp)
    else:
        _mlp(at, mlp, model.intermediate_size)
    _around(at, attention)
    _around(at, mlp)
    forward = attention.forward + mlp.forward
    return LayerPasses(
        forward, attention.inputs + mlp.inputs, attention.weights + mlp.weights, _again(at, attention, mlp)
    )


class _Part:
    """Attention or MLP of a layer in the making."""

    def __init__(self) -> None:
        self.forward, self.inputs, self.weights = Spent(), Spent(), Spent()
        self.last = Spent()
        """Of the forward, its last product."""
        self.core, self.products, self.cheap = Spent(), Spent(), Spent()
        """Of the forward: attention on its scores, matrix products, single passes over memory."""

    def stream(self, at: LayerSetting, forward: float, backward: float, kernels: float = 1) -> None:
        """Bytes that elementwise kernels move."""
        self.forward.add(seconds := stream_s(at.device, forward, kernels), kernels)
        self.cheap.add(seconds, kernels)
        self.inputs.add(stream_s(at.device, backward, kernels), kernels)

    def linear(self, at: LayerSetting, tokens: float, wide: float, inner: float, experts: float = 1) -> None:
        """A linear layer from `inner` to `wide` numbers, for `tokens` rows in all, that `experts` share: one product
        forward, two backward. fp8 casts what it multiplies, also transposed for the weights' gradients."""
        device, precision, groups = at.device, at.linear_precision, max(1.0, experts)
        forward_s = grouped_matmul_s(device, tokens, wide, inner, precision, groups)
        self.forward.add(forward_s)
        self.products.add(forward_s)
        self.last = Spent(forward_s, 1)
        self.inputs.add(grouped_matmul_s(device, tokens, inner, wide, precision, groups))
        summed, once = 2 * at.software.gradient_bytes, at.strategy.zero != "z1" and at.is_sharded
        into_sum = at.software.fused_gradients and not once
        out_bytes = float(summed if into_sum else at.act)
        self.weights.add(matmul_s(device, wide, inner, tokens / groups, precision, batch=groups, out_bytes=out_bytes))
        if not into_sum:
            # Added to the sum; or cast into the buffer that is reduced, and divided by the ranks' number.
            moved = wide * inner * groups * (at.act + (1.5 if once else 1.0) * summed)
            self.weights.add(stream_s(device, moved))
        if precision == "fp8":
            self.forward.add(stream_s(device, 4 * tokens * inner))
            self.inputs.add(stream_s(device, 4 * tokens * wide))
            self.weights.add(stream_s(device, 4 * wide * inner * groups))


# ----------------------------------------------------------------------------------------------------------------------
# Attention


def _attention(at: LayerSetting, part: _Part, window: int | None) -> None:
    """Queries, keys and values in one product, rotation, attention, the output's product."""
    model, tp, tokens = at.model, at.tp.size, at.tokens
    q_width, kv_width = (
        model.num_heads * model.head_dim / tp,
        model.num_kv_heads * model.head_dim / min(tp, model.num_kv_heads),
    )
    enter(at, part)
    part.linear(at, tokens, q_width + 2 * kv_width, model.hidden_size)
    rotated = tokens * (q_width + kv_width)
    if model.position == "rope":
        forward, backward = (2 * at.act, 2 * at.act) if at.software.fused else EAGER_ROTATION
        part.stream(at, forward * rotated, backward * rotated, 2 if at.software.fused else 10)
    if model.qk_norm:
        forward, backward = _norm_bytes(at, "rms")
        part.stream(at, forward * rotated, backward * rotated, 2)
    if not at.software.fused:
        laid = 2 * tokens * (q_width + kv_width)
        part.stream(at, LAYOUT[0] * laid, LAYOUT[1] * laid, 4)
    _scores(at, part, model.num_heads / tp, model.head_dim, model.head_dim, window, kv_width)
    part.linear(at, tokens, model.hidden_size, q_width)
    leave(at, part)


def _latent_attention(at: LayerSetting, part: _Part) -> None:
    """Low-rank queries and key/value pairs (arXiv:2405.04434 §2.1); the narrow vectors are the same on all
    tensor-parallel ranks."""
    model, mla, tp, tokens = at.model, at.model.mla, at.tp.size, at.tokens
    assert mla is not None
    heads, qk_dim = model.num_heads / tp, mla.nope_head_dim + mla.rope_head_dim
    enter(at, part)
    narrow = mla.kv_lora_rank + mla.rope_head_dim
    if mla.q_lora_rank is None:
        part.linear(at, tokens, heads * qk_dim, model.hidden_size)
    else:
        part.linear(at, tokens, mla.q_lora_rank, model.hidden_size)
        part.linear(at, tokens, heads * qk_dim, mla.q_lora_rank)
        narrow += mla.q_lora_rank
    part.linear(at, tokens, mla.kv_lora_rank + mla.rope_head_dim, model.hidden_size)
    part.linear(at, tokens, heads * (mla.nope_head_dim + mla.v_head_dim), mla.kv_lora_rank)
    part.stream(at, 2 * tokens * narrow * at.act, 3 * tokens * narrow * at.act, 2)
    turned = tokens * heads * (2 * qk_dim + mla.nope_head_dim) * at.act
    part.stream(at, 2 * turned, 2 * turned, 2)
    _scores(at, part, heads, qk_dim, mla.v_head_dim, None, heads * qk_dim)
    part.linear(at, tokens, model.hidden_size, heads * mla.v_head_dim)
    leave(at, part)


def _linear_attention(at: LayerSetting, part: _Part) -> None:
    """The gated delta rule in chunks of 64 positions (arXiv:2412.06464 §3.3): within a chunk products of chunk × chunk,
    between chunks reads and writes of a state of key_dim × value_dim, at a quarter of the sustained rate, since they
    are small and wait for each other."""
    linear, tp, tokens = at.model.linear_attention, at.tp.size, at.tokens
    assert linear is not None
    k_width = linear.num_key_heads * linear.key_head_dim / tp
    v_width = linear.num_value_heads * linear.value_head_dim / tp
    enter(at, part)
    part.linear(at, tokens, 2 * k_width + 2 * v_width + 2 * linear.num_value_heads / tp, at.model.hidden_size)
    moved = tokens * (2 * k_width + 2 * v_width) * at.act
    part.stream(at, 3 * moved, 5 * moved, 4)
    chunk, heads = 64, linear.num_value_heads / tp
    k_dim, v_dim = linear.key_head_dim, linear.value_head_dim
    flops = tokens * heads * (2 * chunk * (2 * k_dim + 2 * v_dim) + 4 * k_dim * v_dim)
    seconds = flops / (0.25 * sustained_flops_per_s(at.device, at.wide))
    part.forward.add(seconds, 4)
    part.core.add(seconds, 4)
    part.inputs.add(2.5 * seconds, 8)
    part.linear(at, tokens, at.model.hidden_size, v_width)
    leave(at, part)


def attention_kernel(device: DeviceSpec, software: Software, strategy: Strategy) -> AttentionKernel:
    """Which kernel computes attention: the plan says whether scores are kept, the software which generation, or it is
    the fastest that the device has a rate for."""
    if strategy.attention == "unfused":
        return "unfused" if software.attention == "unfused" else "fused"
    if software.attention is not None:
        return software.attention
    for kernel in _FLASH:
        if kernel in device.attention:
            return kernel
    return "flash2"


def _scores(
    at: LayerSetting, part: _Part, heads: float, qk_dim: float, v_dim: float, window: int | None, kv_width: float
) -> None:
    """Attention itself, and the keys and values that context-parallel ranks hand round a ring meanwhile
    (arXiv:2310.01889 §3)."""
    kernel, device, seq_len = attention_kernel(at.device, at.software, at.strategy), at.device, at.seq_len
    if kernel in _FLASH:
        span = min(window or seq_len, seq_len)
        seen = (span * (seq_len - span) + span * span / 2) / seq_len
        dim = (qk_dim + v_dim) / 2
        forward_s = flash_attention_s(device, kernel, at.tokens, seen, heads, dim, at.wide)
        backward_s = flash_attention_s(device, kernel, at.tokens, seen, heads, dim, at.wide, backward=True)
        kernels = 1.0
    else:
        forward_s, backward_s = _unfused_scores_s(at, heads, qk_dim, kernel)
        kernels = 4.0 if kernel == "fused" else 8.0
    if not at.software.balanced_context:
        # The last rank's queries see all keys of the others, and half of its own; on average they see half of all.
        forward_s, backward_s = ((2 - 1 / at.cp.size) * seconds for seconds in (forward_s, backward_s))
    part.forward.add(forward_s, kernels)
    part.core.add(forward_s, kernels)
    part.inputs.add(backward_s, 2 * kernels)
    if at.cp.size > 1:
        hops, parts = at.cp.size - 1, (at.cp.size - 1) / at.cp.size
        block = 2 * at.tokens * kv_width * at.act
        part.forward.beside("cp", hops * message_s(at.cp, block), parts * forward_s)
        part.inputs.beside("cp", hops * message_s(at.cp, 2 * block), parts * backward_s)


def _unfused_scores_s(at: LayerSetting, heads: float, head_dim: float, kernel: AttentionKernel) -> tuple[float, float]:
    """Scores written to memory: two batched products forward, four backward, over the whole square, since the mask
    saves nothing; softmax with scale and mask reads and writes the scores once forward, reads them twice and writes
    them once backward (operation by operation: in float32, and each apart); dropout also keeps a byte for each
    (arXiv:2205.05198 §4.1 lists these tensors)."""
    device, queries, keys = at.device, at.seq_len / at.cp.size, at.seq_len
    batch = at.sequences * heads
    numbers = batch * queries * keys
    products_s = matmul_s(device, queries, keys, head_dim, at.wide, batch) + matmul_s(
        device, queries, head_dim, keys, at.wide, batch
    )
    softmax, softmax_back = (4, 6) if kernel == "fused" else (22, 26)
    dropout, dropout_back = (5, 5) if at.software.dropout else (0, 0)
    forward_s = products_s + stream_s(device, numbers * (softmax + dropout), 2)
    return forward_s, 2 * products_s + stream_s(device, numbers * (softmax_back + dropout_back), 2)


# ----------------------------------------------------------------------------------------------------------------------
# MLP and experts


def _mlp(at: LayerSetting, part: _Part, inner: float) -> None:
    enter(at, part)
    _mlp_products(at, part, at.tokens, inner / at.tp.size)
    leave(at, part)


def _mlp_products(at: LayerSetting, part: _Part, tokens: float, inner: float, experts: float = 1) -> None:
    """Up (and gate), activation, down."""
    gated = at.model.gated
    part.linear(at, tokens, (1 + gated) * inner, at.model.hidden_size, experts)
    numbers = tokens * inner * at.act
    forward, backward = (3, 5) if gated else (2, 3)
    extra = 1.0 if at.software.fused else 5 / 3
    part.stream(at, forward * extra * numbers, backward * extra * numbers, 1 if at.software.fused else 2)
    part.linear(at, tokens, at.model.hidden_size, inner, experts)


def _experts(at: LayerSetting, part: _Part) -> None:
    """Router, dispatch, grouped products over the experts held here, combine (arXiv:2101.03961 §2); tokens are taken to
    be spread evenly over experts. Each rank gives the tokens of its own part of the sequence."""
    model, moe = at.model, at.model.moe
    assert moe is not None
    own = at.norm_tokens if at.strategy.sp else at.tokens / at.tp.size
    sent = own * moe.top_k
    hidden = model.hidden_size * at.act
    part.stream(at, 2 * own * moe.num_experts * 4 + own * hidden, 3 * own * moe.num_experts * 4, 6)
    permuted = 4 * sent * hidden / PERMUTED
    part.stream(at, permuted, permuted, 4)
    for spent in (part.forward, part.inputs):
        spent.wait("ep", 2 * all_to_all_s(at.ep, sent * hidden))
    if at.etp > 1:
        for spent in (part.forward, part.inputs):
            gathered = sent * hidden * at.etp
            spent.wait("tp", all_gather_s(at.tp, gathered) + reduce_scatter_s(at.tp, gathered))
    _mlp_products(at, part, sent * at.etp, moe.expert_size / at.etp, moe.num_experts / at.ep.size)
    if moe.shared_size:
        _mlp(at, part, moe.shared_size)


# ----------------------------------------------------------------------------------------------------------------------
# Tensor parallelism, norms and residuals


def enter(at: LayerSetting, part: _Part) -> None:
    """A hidden state comes to column-parallel products (arXiv:2205.05198 §4.2.2). Forward: gathered, under sequence
    parallelism. Backward: its gradient is added up (or added up and cut) while the weights' gradients are computed, for
    which the hidden state is gathered again."""
    if at.tp.size == 1:
        return
    size = at.hidden_bytes
    hides_s = _beside_weights_s(at) if at.software.overlap_tensor_gradients else 0.0
    if at.strategy.sp:
        gather_s, scatter_s = all_gather_s(at.tp, size), reduce_scatter_s(at.tp, size)
        _travel(at, part.forward, gather_s)
        part.inputs.beside("tp", gather_s + scatter_s, 2 * hides_s)
    else:
        part.inputs.beside("tp", all_reduce_s(at.tp, size), hides_s)


def leave(at: LayerSetting, part: _Part) -> None:
    """Partial sums leave row-parallel products: added up forward (and cut, under sequence parallelism, whose backward
    gathers)."""
    if at.tp.size == 1:
        return
    size = at.hidden_bytes
    if at.strategy.sp:
        _travel(at, part.forward, reduce_scatter_s(at.tp, size))
        _travel(at, part.inputs, all_gather_s(at.tp, size))
    else:
        part.forward.wait("tp", all_reduce_s(at.tp, size))


def _travel(at: LayerSetting, spent: Spent, seconds: float) -> None:
    """A collective before or after a product: in parts beside it where the plan or the software does so, all but the
    first."""
    if at.software.overlap_tensor or at.strategy.tp_overlap == "chunked":
        first_s = seconds / at.tp.size
        spent.wait("tp", first_s)
        spent.beside("tp", seconds - first_s, _beside_weights_s(at))
    else:
        spent.wait("tp", seconds)


def _beside_weights_s(at: LayerSetting) -> float:
    """The least of the products that a collective runs beside: one of hidden × hidden / tp."""
    hidden = at.model.hidden_size
    width = min(4 * hidden, at.model.intermediate_size) if at.model.moe is None else hidden
    return matmul_s(at.device, at.tokens, width / at.tp.size, hidden, at.linear_precision)


def _around(at: LayerSetting, part: _Part) -> None:
    """The norm before, and the residual sum after: a read and a write, two reads and a write; backward three and three.
    Dropout keeps a byte for each number."""
    numbers = at.norm_tokens * at.model.hidden_size
    forward, backward = _norm_bytes(at, at.model.norm)
    kept = numbers * (1 if at.software.fused else 6) if at.software.dropout else 0.0
    part.stream(at, forward * numbers, backward * numbers, 1 if forward < EAGER_NORM[0] else 8)
    part.stream(at, 3 * numbers * at.act + kept, 3 * numbers * at.act + kept)


def _norm_bytes(at: LayerSetting, norm: str) -> tuple[int, int]:
    """Bytes for each number, forward and backward: read and written; its gradient and itself read, and written, and
    both read once more for the weight's gradient. torch has a kernel for LayerNorm, not for RMSNorm."""
    software = at.software
    fused = software.fused if software.fused_norms is None else software.fused_norms
    if norm == "rms" and not software.fused:
        return CAST_NORM if fused else EAGER_NORM
    return (2 * at.act, 5 * at.act)


def _again(at: LayerSetting, attention: _Part, mlp: _Part) -> Spent:
    """What the backward computes again (`muster.spec.plan.Recompute`)."""
    match at.strategy.recompute:
        case "full":
            whole = attention.forward + mlp.forward
            return whole + mlp.last * -1 if at.software.stops_recompute else whole
        case "attention":
            return attention.core
        case "selective":
            return attention.cheap + mlp.cheap
        case "alternate":
            return attention.cheap + mlp.cheap + (attention.products + mlp.products) * 0.5
        case _:
            return Spent()


def head_passes(at: LayerSetting, words: float) -> LayerPasses:
    """The last norm, the product with `words` rows of the head on this rank, and the loss over their logits.

    The loss in one kernel reads the logits and writes their gradient; operation by operation it makes float32 copies of
    both (Megatron-LM's `vocab_parallel_cross_entropy`: cast, largest, difference, exponential, sum, quotient, and one
    pass backward with the cast).
    """
    part, hidden = _Part(), at.model.hidden_size
    numbers = at.norm_tokens * hidden * at.act
    part.stream(at, 2 * numbers, 3 * numbers, 1)
    enter(at, part)
    wide, tokens = at.wide, at.tokens
    part.forward.add(matmul_s(at.device, tokens, words, hidden, wide))
    part.inputs.add(matmul_s(at.device, tokens, hidden, words, wide))
    part.weights.add(matmul_s(at.device, words, hidden, tokens, wide, out_bytes=2 * at.software.gradient_bytes))
    forward, backward = (at.act, 2 * at.act) if at.software.fused_loss else (30, 14)
    part.forward.add(stream_s(at.device, forward * tokens * words), 2 if at.software.fused_loss else 8)
    part.inputs.add(stream_s(at.device, backward * tokens * words), 1 if at.software.fused_loss else 4)
    if at.tp.size > 1:
        part.forward.wait("tp", 3 * all_reduce_s(at.tp, 4 * tokens))
    return LayerPasses(part.forward, part.inputs, part.weights, Spent())


def embedding_passes(at: LayerSetting) -> LayerPasses:
    """Looking words up reads and writes the hidden state; its backward adds rows up in the gradient. Tensor-parallel
    ranks each know some of the words, and add up."""
    part, numbers = _Part(), at.tokens * at.model.hidden_size
    part.forward.add(stream_s(at.device, 2 * numbers * at.act))
    part.weights.add(stream_s(at.device, numbers * (at.act + 2 * at.software.gradient_bytes)), 3)
    leave(at, part)
    return LayerPasses(part.forward, part.inputs, part.weights, Spent())
