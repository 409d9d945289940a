"""Activation bytes of layers that save activations in fp8, following DeepSeek-V3."""

from muster.cost.activations import PassSizes, attention_activation_bytes
from muster.cost.precision_bytes import compute_bytes, master_bytes

_FP8_BYTES = 1 + 4 / 128
"""Bytes of an fp8 element with a float32 scale per 128 elements (arXiv:2412.19437 §3.3.2)."""
_FP12_BYTES = 1.5
"""Bytes of an element of attention's output, in a 12-bit format (§3.3.3)."""


def fp8_layer_activation_bytes(sizes: PassSizes, layer: int) -> int:
    """Return the bytes that a layer saves of a micro-batch (§3.2.3, §3.3.3).

    Saved are the inputs of both norms in the compute dtype (norms are recomputed), the inputs of matmuls in fp8, and
    the inputs of the MLP's activation (its output is recomputed).
    """
    return int(2 * sizes.hidden_bytes + _attention(sizes, layer) + _mlp(sizes, layer))


def _attention(sizes: PassSizes, layer: int) -> float:
    """Return the bytes that attention saves: its output, a statistic per head, and for latent attention the low-rank
    vectors before their norms, from which queries, keys and values are recomputed; else queries, keys and values."""
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
    """Return the bytes of gate and up; with experts also of the dispatched rows and the router's probabilities.

    Routing weights are assumed to multiply the experts' activations, so that the experts' outputs aren't saved for the
    weights' gradient (Megatron-LM, core/fusions/fused_bias_swiglu.py).
    """
    own, inner = sizes.local_model, 1 + sizes.local_model.gated
    if not own.has_experts(layer):
        return sizes.tokens * inner * own.intermediate_size * _FP8_BYTES
    moe, tp = own.moe, sizes.mesh.tp
    assert moe is not None
    router = sizes.hidden_tokens * moe.num_experts * master_bytes(sizes.precision)
    rows = sizes.expert_tokens * (own.hidden_size + inner * moe.expert_size // sizes.mesh.etp)
    return router + (rows + sizes.tokens * inner * moe.shared_size // tp) * _FP8_BYTES
