"""Families that a ModelSpec can't express: the nearest supported one, and the features that it lacks."""

_ONE = "one norm for attention and MLP in parallel"
_BEHIND = "norms after attention and MLP instead of before them (post-norm)"
_DELTA = "gated delta-net layers, a gate on the output of attention, and partial rotary embeddings"
_GRANITE = "multipliers on embeddings, residual stream, scores and logits"
_MAMBA = "state-space (Mamba) layers"
_PART = "partial rotary embeddings"
_SPARSE = "sparse attention, chosen by an indexer"
_SOME = "layers without position embeddings (NoPE)"
_WIDE = "QK norms over all heads together"

NEAREST_FAMILY = {
    "apertus": ("llama", "an activation with trained parameters"),
    "bamba": ("llama", _MAMBA),
    "cohere": ("gpt_neox", _ONE),
    "cohere2": ("gpt_neox", _ONE),
    "deepseek_v32": ("deepseek_v3", _SPARSE),
    "deepseek_v4": ("deepseek_v3", _SPARSE),
    "exaone4": ("qwen3", _BEHIND),
    "falcon": ("gpt_neox", _ONE),
    "falcon_h1": ("llama", _MAMBA),
    "gemma": ("gemma2", "no norms after attention and MLP"),
    "glm": ("llama", _PART),
    "glm4": ("llama", f"{_PART}, and norms after attention and MLP too"),
    "glm4_moe": ("dots1", _PART),
    "glm_moe_dsa": ("deepseek_v3", _SPARSE),
    "gptj": ("gpt_neox", _ONE),
    "granite": ("llama", _GRANITE),
    "granitemoe": ("mixtral", _GRANITE),
    "granitemoehybrid": ("mixtral", f"{_MAMBA} and {_GRANITE}"),
    "jamba": ("mixtral", _MAMBA),
    "kimi_linear": ("deepseek_v3", "Kimi delta attention layers"),
    "llama4_text": ("mixtral", f"chunked attention, and {_SOME}"),
    "longcat_flash": ("deepseek_v3", "two attentions in a layer and experts that compute nothing"),
    "mamba": ("llama", _MAMBA),
    "mamba2": ("llama", _MAMBA),
    "minimax": ("mixtral", "linear (lightning) attention with a decay for each head"),
    "minimax_m2": ("qwen3_moe", f"{_WIDE}, and {_PART}"),
    "ministral3": ("mistral", "queries that grow with their position (llama_4_scaling_beta)"),
    "nemotron": ("llama", f"a squared ReLU, and {_PART}"),
    "nemotron_h": ("llama", _MAMBA),
    "olmo": ("llama", "norms without weights"),
    "olmo3": ("olmo2", "layers with a sliding window, of which some have other rotary positions"),
    "olmoe": ("qwen3_moe", _WIDE),
    "phi": ("gpt_neox", _ONE),
    "qwen3_5_moe_text": ("qwen3_moe", _DELTA),
    "qwen3_5_text": ("qwen3", _DELTA),
    "qwen3_next": ("qwen3_moe", _DELTA),
    "zamba2": ("llama", _MAMBA),
}
"""The nearest supported family and the features beyond it, by `model_type`."""
