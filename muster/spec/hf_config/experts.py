"""The families with experts: Mixtral, Qwen3-MoE, DeepSeek-V3."""

from typing import Any

from muster.spec.hf_config.dense import (
    Config,
    read_llama,
    read_mistral,
    read_qwen3,
    write_llama,
    write_qwen,
    write_windowed,
)
from muster.spec.model import ModelSpec


def read_mixtral(config: Config) -> dict[str, Any]:
    moe = {"num_experts": config["num_local_experts"], "top_k": config["num_experts_per_tok"]}
    return read_mistral(config) | {"moe": moe | {"expert_size": config["intermediate_size"]}}


def write_mixtral(spec: ModelSpec) -> dict[str, Any]:
    config = write_windowed(spec)
    if spec.moe is not None:
        config |= {"num_local_experts": spec.moe.num_experts, "num_experts_per_tok": spec.moe.top_k}
        config |= {"intermediate_size": spec.moe.expert_size}
    return config


def read_qwen3_moe(config: Config) -> dict[str, Any]:
    moe = {
        "num_experts": config["num_experts"] if "num_experts" in config else config["num_local_experts"],
        "top_k": config["num_experts_per_tok"],
        "expert_size": config["moe_intermediate_size"],
        "every": config.get("decoder_sparse_step", 1),
        "norm_top_k": config.get("norm_topk_prob", False),
    }
    return read_qwen3(config) | {"moe": moe}


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
_LATENT = {
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "qk_nope_head_dim": "nope_head_dim",
    "qk_rope_head_dim": "rope_head_dim",
    "v_head_dim": "v_head_dim",
}


def read_deepseek_v3(config: Config) -> dict[str, Any]:
    moe = {field: config[key] for key, field in _ROUTING.items()}
    mla = {field: config[key] for key, field in _LATENT.items()}
    moe["shared_size"] = (config.get("n_shared_experts") or 0) * moe["expert_size"]
    moe |= {"router": "sigmoid", "router_bias": True}
    return read_llama(config) | {
        "num_kv_heads": config["num_attention_heads"],
        "head_dim": mla["nope_head_dim"] + mla["rope_head_dim"],
        "moe": moe,
        "mla": mla,
        "mtp_layers": config.get("num_nextn_predict_layers", 0),
    }


def write_deepseek_v3(spec: ModelSpec) -> dict[str, Any]:
    config = write_llama(spec)
    if spec.moe is not None and spec.mla is not None:
        del config["head_dim"]
        config |= {key: getattr(spec.moe, field) for key, field in _ROUTING.items()}
        config |= {key: getattr(spec.mla, field) for key, field in _LATENT.items()}
        config |= {"n_shared_experts": spec.moe.shared_size // spec.moe.expert_size, "scoring_func": "sigmoid"}
        config |= {"topk_method": "noaux_tc", "num_nextn_predict_layers": spec.mtp_layers, "rope_interleave": True}
    return config
