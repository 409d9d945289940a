"""Mixtral: Llama's names, and in place of the MLP a router and a tensor for each matrix of each expert."""

from collections.abc import Iterator
from typing import Any

from muster.interop.families.family import AUX_LOSS_DEFAULT, AUX_LOSS_KEY, SHARED_KEYS, Config, ModelFamily
from muster.interop.families.llama import hf_parameter_name, read_mistral, write_mistral
from muster.interop.families.weight_link import WeightLink, link_stacked, link_whole
from muster.spec.model import ModelSpec, parameter_shapes

MIXTRAL_KEYS = SHARED_KEYS | {"moe.num_experts": "num_local_experts", "moe.top_k": "num_experts_per_tok"}
MIXTRAL_KEYS |= {"moe.expert_size": "intermediate_size", "moe.aux_loss_coef": AUX_LOSS_KEY}


def read_mixtral(config: Config) -> dict[str, Any]:
    moe = {"num_experts": config["num_local_experts"], "top_k": config["num_experts_per_tok"]}
    moe |= {"aux_loss_coef": config.get(AUX_LOSS_KEY, AUX_LOSS_DEFAULT)}
    return read_mistral(config) | {"moe": moe | {"expert_size": config["intermediate_size"]}}


def write_mixtral(spec: ModelSpec) -> dict[str, Any]:
    config = write_mistral(spec)
    if spec.moe is not None:
        config |= {"num_local_experts": spec.moe.num_experts, "num_experts_per_tok": spec.moe.top_k}
        config |= {"intermediate_size": spec.moe.expert_size, AUX_LOSS_KEY: spec.moe.aux_loss_coef}
    return config


_EXPERT = {"gate": "w1", "down": "w2", "up": "w3"}


def weight_links(spec: ModelSpec) -> Iterator[WeightLink]:
    """Yield the weight map of a Mixtral."""
    for name, shape in parameter_shapes(spec):
        layer, _, part = name.partition(".mlp.")
        prefix = f"model.{layer}.block_sparse_moe"
        if part.startswith("experts."):
            matrix = _EXPERT[part.split(".")[1]]
            yield from link_stacked(
                name, [f"{prefix}.experts.{index}.{matrix}.weight" for index in range(shape[0])], shape
            )
        elif part.startswith("router."):
            yield link_whole(name, f"{prefix}.gate.weight", shape)
        else:
            yield link_whole(name, hf_parameter_name(name), shape)


MIXTRAL = ModelFamily("MixtralForCausalLM", read_mixtral, write_mixtral, weight_links, MIXTRAL_KEYS)
