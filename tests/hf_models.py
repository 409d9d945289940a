"""Tiny models of `transformers`, one of each family, with random weights in which no bias is zero and no norm one."""

from functools import cache
from typing import Any

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "beta_fast": 8.0, "beta_slow": 2.0}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": SIZES | {"model_type": "llama", "rms_norm_eps": 1e-5},
    "llama-3.1": SIZES
    | {
        "model_type": "llama",
        "rope_theta": 500.0,
        "rope_scaling": LLAMA3 | {"original_max_position_embeddings": 16},
        "tie_word_embeddings": True,
        "head_dim": 16,
    },
    "llama-biased": SIZES | {"model_type": "llama", "attention_bias": True, "mlp_bias": True, "hidden_act": "gelu"},
    "llama-linear": SIZES | {"model_type": "llama", "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "mistral": SIZES | {"model_type": "mistral", "sliding_window": 7, "head_dim": 8},
    "qwen2": SIZES | {"model_type": "qwen2", "rope_theta": 1e6, "tie_word_embeddings": True},
    "qwen2-windows": SIZES
    | {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "qwen3": SIZES | {"model_type": "qwen3", "head_dim": 12},
    "qwen3-yarn": SIZES
    | {
        "model_type": "qwen3",
        "head_dim": 16,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    },
    "phi3": SIZES | {"model_type": "phi3", "sliding_window": 9, "pad_token_id": None, "eos_token_id": None},
    "smollm3": SIZES | {"model_type": "smollm3", "no_rope_layers": [1, 0, 1], "rope_theta": 5e4, "pad_token_id": None},
    "smollm3-windows": SIZES
    | {"model_type": "smollm3", "no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 6}
    | {"pad_token_id": None, "tie_word_embeddings": True},
    "olmo2": SIZES | {"model_type": "olmo2", "pad_token_id": None, "eos_token_id": None},
    "gpt_neox": SIZES
    | {"model_type": "gpt_neox", "rotary_pct": 0.5, "rotary_emb_base": 5e3, "hidden_act": "gelu", "eos_token_id": None},
    "gpt_neox-sequential": SIZES
    | {"model_type": "gpt_neox", "use_parallel_residual": False, "attention_bias": False, "hidden_act": "gelu_new"}
    | {"tie_word_embeddings": True, "eos_token_id": None},
    "gemma2": SIZES
    | {"model_type": "gemma2", "head_dim": 12, "query_pre_attn_scalar": 24, "sliding_window": 7, "eos_token_id": None}
    | {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.5, "pad_token_id": None, "bos_token_id": None},
    "gemma3_text": SIZES
    | {"model_type": "gemma3_text", "head_dim": 12, "query_pre_attn_scalar": 24, "sliding_window": 7}
    | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "eos_token_id": None}
    | {"rope_theta": 5e4, "rope_local_base_freq": 1e3, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    | {"pad_token_id": None, "bos_token_id": None},
    "gpt2": {"model_type": "gpt2", "vocab_size": 61, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64},
    "mixtral": SIZES | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": SIZES
    | {"model_type": "qwen2_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
    | {"shared_expert_intermediate_size": 20},
    "qwen3_moe": SIZES
    | {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
    | {"decoder_sparse_step": 2, "norm_topk_prob": True, "head_dim": 12},
    "gpt_oss": SIZES
    | {"model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "sliding_window": 7}
    | {"swiglu_limit": 0.2, "swiglu_alpha": 1.5, "rope_theta": 5e4, "router_aux_loss_coef": 0.0, "pad_token_id": None}
    | {"rope_scaling": YARN | {"factor": 8.0, "original_max_position_embeddings": 16, "truncate": False}},
    "deepseek_v3": SIZES
    | {
        "model_type": "deepseek_v3",
        "num_key_value_heads": 4,
        "n_routed_experts": 12,
        "n_shared_experts": 2,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 12,
        "first_k_dense_replace": 1,
        "n_group": 4,
        "topk_group": 2,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "q_lora_rank": 20,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 10,
        "num_nextn_predict_layers": 0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 0.7,
            "mscale_all_dim": 1.3,
        },
    },
}
CONFIGS["deepseek_v3-dense"] = CONFIGS["deepseek_v3"] | {"first_k_dense_replace": 3, "q_lora_rank": None}
_EXPERTS = {
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
}
READ_ONLY: dict[str, dict[str, Any]] = {
    "seed_oss": SIZES | {"model_type": "seed_oss", "head_dim": 12},
    "ministral": SIZES | {"model_type": "ministral", "sliding_window": 7, "head_dim": 8},
    "deepseek_v2": CONFIGS["deepseek_v3"]
    | {"model_type": "deepseek_v2", "topk_method": "group_limited_greedy", "q_lora_rank": None},
    "kimi_k2": CONFIGS["deepseek_v3"] | {"model_type": "kimi_k2", "n_group": 1, "topk_group": 1},
    "dots1": SIZES | _EXPERTS | {"model_type": "dots1", "head_dim": 8},
}
"""Families of which no configuration is written."""
EXPERTS = ["mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3", "gpt_oss"]
"""Families with experts that run; `transformers` stacks their experts in memory and stores them apart."""
DENSE = [name for name in CONFIGS if name not in EXPERTS]


@cache
def random_model(name: str) -> Any:
    """A model of `transformers` in float32, on the CPU."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(7)
    config = AutoConfig.for_model(**CONFIGS[name])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        biases = [tensor for key, tensor in model.named_buffers() if key.endswith("e_score_correction_bias")]
        for tensor in (*model.parameters(), *biases):
            tensor.add_(torch.randn_like(tensor) * 0.1)
    return model
