"""The families with experts: Mixtral, Qwen2-MoE and 3, DeepSeek-V2 and V3 (which Kimi-K2 is), dots.llm1, gpt-oss."""

from typing import Any

from muster.interop.hf_config.dense import (
    LLAMA_KEYS,
    SLIDING_ATTENTION,
    Config,
    read_llama,
    read_mistral,
    read_qwen2,
    read_qwen3,
    read_sliding_windows,
    require_count,
    write_llama,
    write_mistral,
    write_qwen,
)
from muster.spec.errors import ConfigError
from muster.spec.model import ModelSpec

MIXTRAL_KEYS = LLAMA_KEYS | {"moe.num_experts": "num_local_experts", "moe.top_k": "num_experts_per_tok"}
MIXTRAL_KEYS |= {"moe.expert_size": "intermediate_size"}
QWEN_KEYS = LLAMA_KEYS | {
    "moe.num_experts": "num_experts",
    "moe.top_k": "num_experts_per_tok",
    "moe.expert_size": "moe_intermediate_size",
    "moe.shared_size": "shared_expert_intermediate_size",
    "moe.every": "decoder_sparse_step",
    "moe.norm_top_k": "norm_topk_prob",
}


def read_mixtral(config: Config) -> dict[str, Any]:
    moe = {"num_experts": config["num_local_experts"], "top_k": config["num_experts_per_tok"]}
    return read_mistral(config) | {"moe": moe | {"expert_size": config["intermediate_size"]}}


def write_mixtral(spec: ModelSpec) -> dict[str, Any]:
    config = write_mistral(spec)
    if spec.moe is not None:
        config |= {"num_local_experts": spec.moe.num_experts, "num_experts_per_tok": spec.moe.top_k}
        config |= {"intermediate_size": spec.moe.expert_size}
    return config


def read_gpt_oss(config: Config) -> dict[str, Any]:
    """Its experts have biases always, and every second layer a window, the first too (arXiv:2508.10925 §2.2)."""
    moe = {"num_experts": config["num_local_experts"], "top_k": config["num_experts_per_tok"], "router_bias": True}
    usual = [
        SLIDING_ATTENTION if layer % 2 == 0 else "full_attention"
        for layer in range(require_count(config, "num_hidden_layers"))
    ]
    bias = config.get("attention_bias", True)
    return read_llama({"rms_norm_eps": 1e-5, "head_dim": 64, **config}) | {
        "qkv_bias": bias,
        "out_bias": bias,
        "mlp_bias": True,
        "attention_sinks": True,
        "moe": moe | {"expert_size": config["intermediate_size"]},
        **read_sliding_windows(config, usual),
    }


def read_qwen2_moe(config: Config) -> dict[str, Any]:
    shared = {"shared_size": config["shared_expert_intermediate_size"], "shared_gate": True}
    biased = {"qkv_bias": config.get("qkv_bias", True)}
    return read_qwen2(config) | biased | {"moe": _qwen_experts(config) | shared}


def read_qwen3_moe(config: Config) -> dict[str, Any]:
    return read_qwen3(config) | {"moe": _qwen_experts(config)}


def _qwen_experts(config: Config) -> dict[str, Any]:
    return {
        "num_experts": config["num_experts"] if "num_experts" in config else config["num_local_experts"],
        "top_k": config["num_experts_per_tok"],
        "expert_size": config["moe_intermediate_size"],
        "every": config.get("decoder_sparse_step", 1),
        "norm_top_k": config.get("norm_topk_prob", False),
    }


def write_qwen3_moe(spec: ModelSpec) -> dict[str, Any]:
    config = write_qwen(spec)
    if (moe := spec.moe) is not None:
        config |= {
            "num_experts": moe.num_experts,
            "num_experts_per_tok": moe.top_k,
            "moe_intermediate_size": moe.expert_size,
            "decoder_sparse_step": moe.every,
            "norm_topk_prob": moe.norm_top_k,
        }
    return config


_ROUTING = {
    "n_routed_experts": "num_experts",
    "num_experts_per_tok": "top_k",
    "moe_intermediate_size": "expert_size",
    "first_k_dense_replace": "dense_layers",
    "norm_topk_prob": "norm_top_k",
    "routed_scaling_factor": "route_scale",
    "n_group": "num_groups",
    "topk_group": "top_groups",
}
_UNSAID = {"first_k_dense_replace": 0, "norm_topk_prob": False, "routed_scaling_factor": 1.0}
_UNSAID |= {"n_group": 1, "topk_group": 1}
"""What is meant where DeepSeek-V2 and dots.llm1 don't say it."""
_LATENT = {
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "qk_nope_head_dim": "nope_head_dim",
    "qk_rope_head_dim": "rope_head_dim",
    "v_head_dim": "v_head_dim",
}


DEEPSEEK_KEYS = LLAMA_KEYS | {f"moe.{field}": key for key, field in _ROUTING.items()}
DEEPSEEK_KEYS |= {f"mla.{field}": key for key, field in _LATENT.items()} | {"mtp_layers": "num_nextn_predict_layers"}


def read_deepseek_v3(config: Config) -> dict[str, Any]:
    routing = {field: config[key] for key, field in _ROUTING.items()}
    return _latent(config) | {
        "moe": routing | _shared(config) | {"router": "sigmoid", "router_bias": True},
        "mtp_layers": config.get("num_nextn_predict_layers", 0),
    }


def read_deepseek_v2(config: Config) -> dict[str, Any]:
    """Its experts are chosen by the softmax alone: of all (`greedy`), or of the groups with the best ones."""
    method = config.get("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy") or config.get("scoring_func", "softmax") != "softmax":
        raise ConfigError(
            f"topk_method is {method!r} of scores by {config.get('scoring_func', 'softmax')!r}: nothing"
            " but greedy and group_limited_greedy by softmax is known"
        )
    routing = {**_UNSAID, **config} | ({"n_group": 1, "topk_group": 1} if method == "greedy" else {})
    return _latent(config) | {"moe": {field: routing[key] for key, field in _ROUTING.items()} | _shared(config)}


def read_dots1(config: Config) -> dict[str, Any]:
    said = {**_UNSAID, **config}
    routing = {field: said[key] for key, field in _ROUTING.items()}
    first, count = config.get("max_window_layers", 62), require_count(config, "num_hidden_layers")
    windows = read_sliding_windows(config, [SLIDING_ATTENTION if layer >= first else "" for layer in range(count)])
    moe = routing | _shared(config) | {"router": "sigmoid", "router_bias": True}
    return read_llama(config) | {"qk_norm": True, "moe": moe} | windows


def _latent(config: Config) -> dict[str, Any]:
    """Latent attention, of whose turned and other numbers queries and keys are made."""
    mla = {field: config[key] for key, field in _LATENT.items()}
    return read_llama(config) | {
        "num_kv_heads": config["num_attention_heads"],
        "head_dim": require_count(config, "qk_nope_head_dim") + require_count(config, "qk_rope_head_dim"),
        "mla": mla,
    }


def _shared(config: Config) -> dict[str, Any]:
    if config.get("moe_layer_freq", 1) != 1:
        raise ConfigError(f"moe_layer_freq is {config['moe_layer_freq']!r}, expected 1: nothing else is known")
    if not config.get("n_shared_experts"):
        return {}
    return {"shared_size": require_count(config, "n_shared_experts") * require_count(config, "moe_intermediate_size")}


def write_deepseek_v3(spec: ModelSpec) -> dict[str, Any]:
    config = write_llama(spec)
    if spec.moe is not None and spec.mla is not None:
        del config["head_dim"]
        config |= {key: getattr(spec.moe, field) for key, field in _ROUTING.items()}
        config |= {key: getattr(spec.mla, field) for key, field in _LATENT.items()}
        config |= {"n_shared_experts": spec.moe.shared_size // spec.moe.expert_size, "scoring_func": "sigmoid"}
        config |= {"topk_method": "noaux_tc", "num_nextn_predict_layers": spec.mtp_layers, "rope_interleave": True}
    return config
