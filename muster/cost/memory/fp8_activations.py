"""What layers keep whose activations are stored for the backward in fp8, as DeepSeek-V3's are."""

from muster.cost.activations import PassSizes, attention_activation_bytes
from muster.cost.precision_bytes import compute_bytes, master_bytes

_FP8_BYTES = 1 + 4 / 128
"""Bytes of a number in fp8 with a float32 scale for each 128 (arXiv:2412.19437 §3.3.2)."""
_FP12_BYTES = 1.5
"""Of the output of attention, whose format has 12 bits (§3.3.3)."""


def fp8_layer_activation_bytes(sizes: PassSizes, layer: int) -> int:
    """What a layer keeps of a micro-batch: both hidden states in the compute dtype, since norms are made again; of its
    products the inputs, in fp8; of the MLP what goes into its activation, whose output is made again (§3.2.3, §3.3.3).
    """
    return int(2 * sizes.hidden_bytes + _attention(sizes, layer) + _mlp(sizes, layer))


def _attention(sizes: PassSizes, layer: int) -> float:
    """Latent attention: the narrow vectors before their norms, from which queries, keys and values are made again; its
    output, and a statistic for each head. Else queries, keys and values, which attention's own derivative reads."""
    own, tokens, size = sizes.local_model, sizes.tokens, compute_bytes(sizes.precision)
    if own.has_linear_attention(layer):
        return attention_activation_bytes(sizes, layer)
    statistics = own.num_heads * master_bytes(sizes.precision)
    if own.mla is None:
        read = (own.num_heads + 2 * own.num_kv_heads) * own.head_dim
        return tokens * (read * size + own.num_heads * own.head_dim * _FP12_BYTES + statistics)
    mla = own.mla
    queries = mla.q_lora_rank or own.num_heads * (mla.nope_head_dim + mla.rope_head_dim)
    narrow = queries + mla.kv_lora_rank + mla.rope_head_dim
    return tokens * (narrow * size + own.num_heads * mla.v_head_dim * _FP12_BYTES + statistics)


def _mlp(sizes: PassSizes, layer: int) -> float:
    """Gate and up; of experts also the rows as they were sent, and the router's probabilities. An expert's weight is
    taken to multiply its activated state, so that its output isn't kept for the weight's gradient (Megatron-LM,
    core/fusions/fused_bias_swiglu.py)."""
    own, inner = sizes.local_model, 1 + sizes.local_model.gated
    if not own.has_experts(layer):
        return sizes.tokens * inner * own.intermediate_size * _FP8_BYTES
    moe, tp = own.moe, sizes.mesh.tp
    assert moe is not None
    router = sizes.hidden_tokens * moe.num_experts * master_bytes(sizes.precision)
    rows = sizes.expert_tokens * (own.hidden_size + inner * moe.expert_size // sizes.mesh.etp)
    return router + (rows + sizes.tokens * inner * moe.shared_size // tp) * _FP8_BYTES
