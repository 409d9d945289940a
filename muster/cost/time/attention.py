"""Time of attention: its matmuls, its scores, and what context-parallel ranks send."""

from muster.cost.context_traffic import AttentionShape, StateShape
from muster.cost.time.collectives import all_reduce_s
from muster.cost.time.context_parallel import (
    add_block_merges,
    add_context_transfers,
    add_slice_merges,
    add_state_transfers,
)
from muster.cost.time.kernels import flash_attention_s, matmul_s, stream_s, sustained_flops_per_s
from muster.cost.time.sublayer import (
    LayerContext,
    SublayerCost,
    add_adapters,
    add_dropout,
    add_exposed_tp,
    add_latent_entry,
    add_tp_entry,
    add_tp_exit,
    norm_bytes,
)
from muster.spec.context_kinds import CONTEXT_KINDS
from muster.spec.device import AttentionKernel, DeviceSpec
from muster.spec.framework_traits import FrameworkTraits
from muster.spec.layer_strategy import LayerStrategy
from muster.spec.model_components import DECAY_RANK, PLAIN_CHUNK

EAGER_ROPE_BYTES = (20, 24)
"""Bytes (forward, backward) per element of queries and keys where rotary embedding is eager: two multiplications, a
negation, a concatenation and a sum."""
HEAD_TRANSPOSE_BYTES = (4, 4)
"""Bytes (forward, backward) per element of queries, keys, values and outputs that are transposed so that each head is
contiguous."""
SOFT_CAP_BYTES = (76, 136)
"""Bytes (forward, backward) per visible score of attention that caps or drops scores outside of a fused kernel
(`muster.model.piecewise_attention`): scale, tanh, mask and softmax in float32, and in the backward once more, with
the gradients of softmax and cap."""
SINK_PASSES, SINK_KERNELS = (2.5, 10), 5
"""Passes over attention's output (forward, backward), in its own bytes, and kernels that add sinks to it
(`muster.model.attention_sinks`): its scaling, and in the backward its product with the gradient in float32."""
FLASH_ELEMENT_BYTES = 2
"""Bytes per element of what FlashAttention's kernels take: blocks in float32 have their scores in memory."""
CHUNK_BYTES, CHUNK_KERNELS = 24, 20
"""Bytes per element of queries, keys and values, and kernels, with which a forward of linear attention decays and
splits them into chunks in float32: three reads and three writes of four bytes each."""
_FLASH_KERNELS: tuple[AttentionKernel, ...] = ("flash3", "flash2", "flash1")


def add_self_attention(at: LayerContext, part: SublayerCost, window: int | None) -> None:
    """Add attention with full queries, keys and values: their matmul, rotation, the scores, the output's matmul."""
    model, tp, tokens = at.model, at.tp.size, at.tokens
    q_width, kv_width = (
        model.num_heads * model.head_dim / tp,
        model.num_kv_heads * model.head_dim / min(tp, model.num_kv_heads),
    )
    if model.parallel_sublayers == 1:
        add_tp_entry(at, part)
    hidden = model.hidden_size
    widths = {"q": (q_width, hidden), "k": (kv_width, hidden), "v": (kv_width, hidden), "o": (hidden, q_width)}
    part.add_linears(at, tokens, {name: widths[name] for name in ("q", "k", "v")}, follows_norm=model.has_pre_norms)
    rotated = tokens * (q_width + kv_width)
    if model.position == "rope":
        forward, backward = (
            (2 * at.element_bytes, 2 * at.element_bytes) if at.framework.fused_elementwise else EAGER_ROPE_BYTES
        )
        part.add_elementwise(at, forward * rotated, backward * rotated, 2 if at.framework.fused_elementwise else 10)
    if model.qk_norm:
        forward, backward = norm_bytes(at, "rms")
        part.add_elementwise(at, forward * rotated, backward * rotated, 2)
        if model.qk_norm_width == "projection" and tp > 1:
            # Mean squares of queries and keys over all heads, in float32.
            add_exposed_tp(part, sum_s := all_reduce_s(at.tp, 8 * tokens), sum_s)
    if not at.framework.fused_elementwise:
        laid = 2 * tokens * (q_width + kv_width)
        part.add_elementwise(at, HEAD_TRANSPOSE_BYTES[0] * laid, HEAD_TRANSPOSE_BYTES[1] * laid, 4)
    _add_scores(at, part, model.num_heads / tp, model.head_dim, model.head_dim, window, kv_width)
    if model.attention_sinks and not at.framework.fused_swiglu_clamp:
        forward, backward = (passes * tokens * q_width * at.element_bytes for passes in SINK_PASSES)
        part.add_elementwise(at, forward, backward, SINK_KERNELS)
    part.add_linears(at, tokens, {"o": widths["o"]})
    add_adapters(at, part, widths)
    if model.parallel_sublayers == 1:
        add_tp_exit(at, part)


def add_latent_attention(at: LayerContext, part: SublayerCost) -> None:
    """Add attention with low-rank queries and key/value pairs (MLA, arXiv:2405.04434 §2.1).

    Tensor-parallel ranks make the latent vectors whole, or under sequence parallelism each those of its positions,
    which are gathered before they are projected up.
    """
    model, mla, tp, tokens = at.model, at.model.mla, at.tp.size, at.tokens
    assert mla is not None
    heads, qk_dim = model.num_heads / tp, mla.qk_head_dim
    if mla.q_lora_rank is None:
        add_tp_entry(at, part)
        part.add_linear(at, tokens, heads * qk_dim, model.hidden_size)
    else:
        part.add_linear(at, at.norm_tokens, mla.q_lora_rank, model.hidden_size)
        part.add_linear(at, tokens, heads * qk_dim, mla.q_lora_rank)
        part.latent_up_projections = part.last_matmul
    part.add_linear(at, at.norm_tokens, mla.kv_lora_rank + mla.rope_head_dim, model.hidden_size)
    add_latent_entry(at, part, mla.latent_width)
    part.add_linear(at, tokens, heads * (mla.nope_head_dim + mla.v_head_dim), mla.kv_lora_rank)
    part.latent_up_projections += part.last_matmul
    narrow = at.norm_tokens * mla.latent_width * at.element_bytes
    part.add_elementwise(at, 2 * narrow, 3 * narrow, 2)
    turned = tokens * heads * (2 * qk_dim + mla.nope_head_dim) * at.element_bytes
    part.add_elementwise(at, 2 * turned, 2 * turned, 2)
    v_dim = qk_dim if at.framework.padded_values else mla.v_head_dim
    _add_scores(at, part, heads, qk_dim, v_dim, None, heads * qk_dim)
    part.add_linear(at, tokens, model.hidden_size, heads * mla.v_head_dim)
    add_tp_exit(at, part)


def add_linear_attention(at: LayerContext, part: SublayerCost) -> None:
    """Add linear attention in chunks (arXiv:2312.06635 §4.2, arXiv:2412.06464 §3.3).

    Within a chunk there are matmuls of chunk × chunk, between chunks reads and writes of a state of key_dim ×
    value_dim. They reach a quarter of the sustained rate, since they are small and wait for each other. Muster's own
    chunks are passes of many kernels over operands in the master dtype (`muster.model.chunked_recurrence`).
    """
    linear, tp, tokens = at.model.linear_attention, at.tp.size, at.tokens
    assert linear is not None
    k_width, v_width, heads = linear.k_width / tp, linear.v_width / tp, linear.num_value_heads / tp
    is_delta = linear.kind == "gated_deltanet"
    decays = 2 * heads if is_delta else DECAY_RANK if linear.kind == "gla" else linear.decay_width / tp
    add_tp_entry(at, part)
    part.add_linear(at, tokens, 2 * k_width + 2 * v_width + decays, at.model.hidden_size)
    if linear.kind == "gla":
        part.add_linear(at, tokens, k_width, DECAY_RANK)
    moved = tokens * (2 * k_width + 2 * v_width) * at.element_bytes
    part.add_elementwise(at, 3 * moved, 5 * moved, 4)
    chunk = PLAIN_CHUNK if is_delta else linear.chunk
    k_dim, v_dim = linear.key_head_dim, linear.value_head_dim
    flops = tokens * heads * (2 * chunk * (2 if is_delta else 1) * (k_dim + v_dim) + 4 * k_dim * v_dim)
    seconds, kernels = flops / (0.25 * sustained_flops_per_s(at.device, at.high_precision)), 4.0
    if not is_delta:
        seconds += stream_s(at.device, CHUNK_BYTES * tokens * (2 * k_width + v_width), CHUNK_KERNELS)
        kernels = CHUNK_KERNELS + at.seq_len / at.cp.size / chunk
    part.forward.add(seconds, kernels)
    part.attention_core.add(seconds, kernels)
    part.input_grads.add(2.5 * seconds, 2.5 * kernels)
    if not is_delta and at.cp.size > 1:
        states = StateShape(max(1, round(at.sequences)), round(heads), k_dim, v_dim)
        add_state_transfers(at, part, states, seconds)
    part.add_linear(at, tokens, at.model.hidden_size, v_width)
    add_tp_exit(at, part)


def choose_attention_kernel(device: DeviceSpec, software: FrameworkTraits, strategy: LayerStrategy) -> AttentionKernel:
    """Return the kernel that computes attention.

    The plan decides whether scores are written to memory, the framework which generation of kernels it has; else it is
    the fastest for which the device has a rate.
    """
    if strategy.attention == "unfused":
        return "unfused" if software.attention == "unfused" else "fused"
    if software.attention is not None:
        return software.attention
    for kernel in _FLASH_KERNELS:
        if kernel in device.attention:
            return kernel
    return "flash2"


def _add_scores(
    at: LayerContext, part: SublayerCost, heads: float, qk_dim: float, v_dim: float, window: int | None, kv_width: float
) -> None:
    """Add the scores and their matmuls, and what context parallelism sends (arXiv:2310.01889 §3)."""
    kernel, device, seq_len = choose_attention_kernel(at.device, at.framework, at.strategy), at.device, at.seq_len
    seen = (_seen_pairs(at.earlier_positions + seq_len, window) - _seen_pairs(at.earlier_positions, window)) / seq_len
    whole = (_seen_pairs(at.earlier_positions + seq_len, None) - _seen_pairs(at.earlier_positions, None)) / seq_len
    in_blocks = (at.context.ring > 1 or at.is_sliced) and at.device.kind != "cpu"
    in_blocks = in_blocks and not CONTEXT_KINDS[at.context.kind].saves_scores
    drops = bool(at.model.attention_dropout) and at.framework.counted_dropout
    is_capped = at.model.attention_softcap is not None and not at.framework.fused_soft_cap
    if is_capped or drops or (in_blocks and at.element_bytes != FLASH_ELEMENT_BYTES):
        forward_s, backward_s = _soft_capped_scores_s(at, heads, qk_dim, seen)
        kernels = 12.0
    elif at.cp.size > 1 and CONTEXT_KINDS[at.context.kind].saves_scores:
        forward_s, backward_s = _unfused_scores_s(at, heads, qk_dim, "unfused")
        kernels = 8.0
    elif kernel in _FLASH_KERNELS:
        dim = (qk_dim + v_dim) / 2
        is_windowed, in_fp8 = seen < whole, at.framework.fp8_attention and at.matmul_precision == "fp8"
        own = heads, dim, at.high_precision
        forward_s = flash_attention_s(device, kernel, at.tokens, seen, *own, windowed=is_windowed, in_fp8=in_fp8)
        if in_fp8:  # whose backward computes scores outside of windows, too
            seen, is_windowed = whole, False
        backward_s = flash_attention_s(
            device, kernel, at.tokens, seen, *own, backward=True, windowed=is_windowed, in_fp8=in_fp8
        )
        kernels = 1.0
    else:
        forward_s, backward_s = _unfused_scores_s(at, heads, qk_dim, kernel)
        kernels = 4.0 if kernel == "fused" else 8.0
    if not at.framework.balanced_cp or (at.cp.size > 1 and at.context.is_contiguous):
        # The last rank's queries see all keys of the others, and half of its own; on average they see half of all.
        forward_s, backward_s = ((2 - 1 / at.cp.size) * seconds for seconds in (forward_s, backward_s))
    part.forward.add(forward_s, kernels)
    part.attention_core.add(forward_s, kernels)
    part.input_grads.add(backward_s, 2 * kernels)
    add_dropout(at, part, at.tokens * heads * seen, at.model.attention_dropout)
    shape = AttentionShape(round(at.tokens), round(heads), max(1, round(kv_width / qk_dim)), round(qk_dim))
    if at.is_sliced and not at.framework.fused_cp_merge:
        add_slice_merges(at, part, shape)
    if at.cp.size > 1:
        add_context_transfers(at, part, shape, forward_s, backward_s)
        if in_blocks and not at.framework.fused_cp_merge:
            add_block_merges(at, part, shape)


def _seen_pairs(end: int, window: int | None) -> float:
    """Return the pairs of one of a sequence's first positions and a position that it sees, under a causal mask."""
    span = end if window is None else min(end, window)
    return span * (end - span) + span * span / 2


def _soft_capped_scores_s(at: LayerContext, heads: float, head_dim: float, seen: float) -> tuple[float, float]:
    """Return the seconds (forward, backward) of attention whose capped scores are in memory piece by piece: two batched
    matmuls forward and five backward over the `seen` keys of each position, and passes over the scores."""
    device, batch = at.device, at.sequences * heads
    product_s = matmul_s(device, at.seq_len, seen, head_dim, at.high_precision, batch)
    forward, backward = (stream_s(device, moved * at.tokens * heads * seen, 12) for moved in SOFT_CAP_BYTES)
    return 2 * product_s + forward, 5 * product_s + backward


def _unfused_scores_s(at: LayerContext, heads: float, head_dim: float, kernel: AttentionKernel) -> tuple[float, float]:
    """Return the seconds (forward, backward) of attention whose scores are written to memory.

    There are two batched matmuls forward and four backward, over the whole square, as the mask saves nothing. A
    fused softmax with scale and mask reads and writes the scores once forward, and reads them twice and writes them
    once backward; unfused, each operator does so in float32. Dropout also stores a byte per score
    (arXiv:2205.05198 §4.1 lists these tensors).
    """
    device, queries, keys = at.device, at.seq_len / at.cp.size, at.seq_len
    batch = at.sequences * heads
    numbers = batch * queries * keys
    products_s = matmul_s(device, queries, keys, head_dim, at.high_precision, batch) + matmul_s(
        device, queries, head_dim, keys, at.high_precision, batch
    )
    softmax, softmax_back = (4, 6) if kernel == "fused" else (22, 26)
    dropout, dropout_back = (5, 5) if at.framework.dropout else (0, 0)
    forward_s = products_s + stream_s(device, numbers * (softmax + dropout), 2)
    return forward_s, 2 * products_s + stream_s(device, numbers * (softmax_back + dropout_back), 2)
