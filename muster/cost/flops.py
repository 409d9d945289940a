"""Floating-point operations of a decoder."""

from muster.spec.model import ModelSpec, active_numel, parameter_shapes
from muster.spec.plugin_model import plugin_model


def forward_flops_per_token(spec: ModelSpec, seq_len: int, causal: bool = False) -> int:
    """Return the matmul FLOPs of the forward for one token of a sequence of `seq_len`.

    2 per weight of a matmul: all weights except norms and the embedding's lookup; of the experts only a token's
    `top_k`; the head once more for each of `mtp_layers`. Attention takes 2 · seq_len · heads · (key width + value
    width) in each layer with softmax attention, linear attention 4 · heads · key width · value width to add to its
    state and to read it (the gated delta rule reads it twice). Following PaLM (arXiv:2204.02311, appendix B) and
    Megatron-LM (arXiv:2104.04473, appendix) the causal mask is not discounted; with `causal`, only the scores count
    that the mask and a sliding window leave, about half, as FlashAttention-2 counts (arXiv:2307.08691 §4.1). A plugin's
    layers count by the matmuls of a traced forward.

    Example: 7 · 10⁹ weights at a short sequence need about 14 GFLOPs per token forward, 42 with the backward.
    """
    if (own := plugin_model(spec)) is not None:
        head = 2 * spec.vocab_size * spec.hidden_size
        return head + spec.num_layers * own.layer_trace(spec, seq_len, 1, "bf16").flops // seq_len
    looked_up = ("embed.weight", "positions.weight")
    matrices = sum(
        active_numel(spec, name, shape)
        for name, shape in parameter_shapes(spec)
        if len(shape) > 1 and name not in looked_up and not name.endswith(".bias")
    )
    heads = spec.tied_embeddings + spec.mtp_layers
    return (
        2 * (matrices + heads * spec.vocab_size * spec.hidden_size)
        + _score_flops(spec, seq_len, causal)
        + _state_flops(spec)
    )


def _score_flops(spec: ModelSpec, seq_len: int, causal: bool) -> int:
    mla = spec.mla
    widths = 2 * spec.head_dim if mla is None else mla.nope_head_dim + mla.rope_head_dim + mla.v_head_dim
    layers = [layer for layer in range(spec.num_layers) if not spec.has_linear_attention(layer)]
    if causal:
        # Position i sees i + 1 positions, at most its window: half the sum over the sequence per position.
        windows = [min(spec.attention_window(layer) or seq_len, seq_len) for layer in layers]
        windows += [seq_len] * spec.mtp_layers
        seen = sum(window * (2 * seq_len - window + 1) for window in windows)
        return 2 * spec.num_heads * widths * seen // (2 * seq_len)
    return 2 * seq_len * spec.num_heads * widths * (len(layers) + spec.mtp_layers)


def _state_flops(spec: ModelSpec) -> int:
    if (linear := spec.linear_attention) is None:
        return 0
    return len(linear.layers) * linear.state_numel * (6 if linear.kind == "gated_deltanet" else 4)


def train_flops_per_token(spec: ModelSpec, seq_len: int, causal: bool = False, has_backward: bool = True) -> int:
    """Return the FLOPs of forward and backward for one token: each matmul of the forward has two in the backward; a
    step without backward has two forwards.

    Recomputed work (activation recompute, flash attention's backward) doesn't count: these are MFU's model FLOPs.
    """
    return (3 if has_backward else 2) * forward_flops_per_token(spec, seq_len, causal)
