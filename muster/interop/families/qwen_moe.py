"""Qwen2-MoE and Qwen3-MoE: Qwen's names, and in place of the MLP a router and one tensor per matrix and expert."""

from collections.abc import Iterator
from typing import Any

from muster.interop.families.family import AUX_LOSS_DEFAULT, AUX_LOSS_KEY, SHARED_KEYS, Config, ModelFamily
from muster.interop.families.llama import LAYER_NAMES, hf_parameter_name, read_qwen2, read_qwen3, write_qwen
from muster.interop.families.weight_link import WeightLink, link_stacked, link_whole
from muster.spec.model import ModelSpec, parameter_shapes

_KEYS = SHARED_KEYS | {
    "moe.num_experts": "num_experts",
    "moe.top_k": "num_experts_per_tok",
    "moe.expert_size": "moe_intermediate_size",
    "moe.shared_size": "shared_expert_intermediate_size",
    "moe.every": "decoder_sparse_step",
    "moe.norm_top_k": "norm_topk_prob",
    "moe.aux_loss_coef": AUX_LOSS_KEY,
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
        "aux_loss_coef": config.get(AUX_LOSS_KEY, AUX_LOSS_DEFAULT),
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
            AUX_LOSS_KEY: moe.aux_loss_coef,
        }
    return config


def write_qwen2_moe(spec: ModelSpec) -> dict[str, Any]:
    config = write_qwen3_moe(spec) | {"qkv_bias": spec.qkv_bias}
    return config | ({} if spec.moe is None else {"shared_expert_intermediate_size": spec.moe.shared_size})


_SHARED = {"shared": "shared_expert", "shared_gate": "shared_expert_gate"}


def weight_links(spec: ModelSpec) -> Iterator[WeightLink]:
    """Yield the weight map of a Qwen2-MoE or Qwen3-MoE."""
    for name, shape in parameter_shapes(spec):
        layer, _, part = name.partition(".mlp.")
        if part.startswith("experts."):
            matrix = LAYER_NAMES[part.split(".")[1]]
            names = [f"model.{layer}.mlp.experts.{index}.{matrix}.weight" for index in range(shape[0])]
            yield from link_stacked(name, names, shape)
        elif part.startswith("router."):
            yield link_whole(name, f"model.{layer}.mlp.gate.weight", shape)
        else:
            yield link_whole(name, hf_parameter_name(name, _SHARED), shape)


QWEN2_MOE = ModelFamily("Qwen2MoeForCausalLM", read_qwen2_moe, write_qwen2_moe, weight_links, _KEYS)
QWEN3_MOE = ModelFamily("Qwen3MoeForCausalLM", read_qwen3_moe, write_qwen3_moe, weight_links, _KEYS)
