"""Llama 2 to 3.2, Mistral, Ministral, Qwen2, Qwen2.5, Qwen3 and Seed-OSS: nearly the same keys and tensors.

The rotary pairs of these weights are in the order that `muster.model.kernels.apply_rotary` expects.
"""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from muster.interop.families.family import (
    HF_ACTIVATIONS,
    OPTIONAL_FIELDS,
    SHARED_COUNTS,
    SLIDING_ATTENTION,
    Config,
    ModelFamily,
    read_activation,
    read_rope,
    read_sliding_windows,
    require_count,
    write_rope,
)
from muster.interop.families.weight_link import WeightLink, link_whole
from muster.spec.model import ModelSpec, parameter_shapes

# ----------------------------------------------------------------------------------------------------------------------
# Configurations


def read_llama(config: Config) -> dict[str, Any]:
    fields = {field: config[key] for key, field in SHARED_COUNTS.items()}
    fields |= {field: config[key] for key, field in OPTIONAL_FIELDS.items() if config.get(key) is not None}
    return fields | {
        "norm_eps": config.get("rms_norm_eps", 1e-6),
        "tied_embeddings": config.get("tie_word_embeddings", False),
        "max_positions": config.get("max_position_embeddings"),
        "activation": read_activation(config.get("hidden_act", "silu")),
        "qkv_bias": config.get("attention_bias", False),
        "out_bias": config.get("attention_bias", False),
        "mlp_bias": config.get("mlp_bias", False),
        **read_rope(config),
    }


def write_llama(spec: ModelSpec) -> dict[str, Any]:
    return {
        **{key: getattr(spec, field) for key, field in SHARED_COUNTS.items()},
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "hidden_act": HF_ACTIVATIONS[spec.activation],
        "initializer_range": spec.init_std,
        "rms_norm_eps": spec.norm_eps,
        "tie_word_embeddings": spec.tied_embeddings,
        "attention_bias": spec.out_bias,
        "mlp_bias": spec.mlp_bias,
        **({} if spec.max_positions is None else {"max_position_embeddings": spec.max_positions}),
        **write_rope(spec),
    }


def read_mistral(config: Config) -> dict[str, Any]:
    return read_llama(config) | {"sliding_window": config.get("sliding_window")}


def write_mistral(spec: ModelSpec) -> dict[str, Any]:
    return write_llama(spec) | {"sliding_window": spec.sliding_window}


def read_qwen2(config: Config) -> dict[str, Any]:
    return read_llama(config) | {"qkv_bias": True, "out_bias": False} | _read_layer_types(config)


def read_qwen3(config: Config) -> dict[str, Any]:
    return read_llama(config) | {"qk_norm": True} | _read_layer_types(config)


def read_seed_oss(config: Config) -> dict[str, Any]:
    biases = {"qkv_bias": config.get("attention_bias", True), "out_bias": config.get("attention_out_bias", False)}
    return read_llama({"head_dim": 128, **config}) | biases


def read_ministral(config: Config) -> dict[str, Any]:
    return read_llama(config) | read_sliding_windows(
        config, [SLIDING_ATTENTION] * require_count(config, "num_hidden_layers")
    )


def _read_layer_types(config: Config) -> dict[str, Any]:
    """Read the layers with a window: a list, or all from `max_window_layers` on."""
    if not config.get("use_sliding_window"):
        return {}
    count = require_count(config, "num_hidden_layers")
    first = config.get("max_window_layers", 28)
    return read_sliding_windows(config, [SLIDING_ATTENTION if layer >= first else "" for layer in range(count)])


def write_qwen(spec: ModelSpec) -> dict[str, Any]:
    kinds = ("full_attention", "sliding_attention")
    types = [kinds[spec.attention_window(layer) is not None] for layer in range(spec.num_layers)]
    first = types.index(kinds[1]) if kinds[1] in types else spec.num_layers
    return write_mistral(spec) | {
        "use_sliding_window": spec.sliding_window is not None,
        "max_window_layers": first,
        "layer_types": types,
    }


# ----------------------------------------------------------------------------------------------------------------------
# Weights

TOP_LEVEL_NAMES = {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "attn": "self_attn",
    "q": "q_proj",
    "k": "k_proj",
    "v": "v_proj",
    "o": "o_proj",
    "gate": "gate_proj",
    "up": "up_proj",
    "down": "down_proj",
}


def weight_links(spec: ModelSpec) -> Iterator[WeightLink]:
    """Yield the weight map of a dense model."""
    for name, shape in parameter_shapes(spec):
        yield link_whole(name, hf_parameter_name(name), shape)


def hf_parameter_name(name: str, others: Mapping[str, str] = MappingProxyType({})) -> str:
    """Return `model.layers.3.self_attn.q_proj.weight` for `layers.3.attn.q.weight`; `others` are names of modules that
    differ from Llama's."""
    module, _, leaf = name.rpartition(".")
    if module in TOP_LEVEL_NAMES:
        return f"{TOP_LEVEL_NAMES[module]}.{leaf}"
    names = {**LAYER_NAMES, **others}
    return "model." + ".".join([*(names.get(part, part) for part in module.split(".")), leaf])


# ----------------------------------------------------------------------------------------------------------------------
# Families

LLAMA = ModelFamily("LlamaForCausalLM", read_llama, write_llama, weight_links)
MISTRAL = ModelFamily("MistralForCausalLM", read_mistral, write_mistral, weight_links)
QWEN2 = ModelFamily("Qwen2ForCausalLM", read_qwen2, write_qwen, weight_links)
QWEN3 = ModelFamily("Qwen3ForCausalLM", read_qwen3, write_qwen, weight_links)
SEED_OSS = ModelFamily("SeedOssForCausalLM", read_seed_oss)
MINISTRAL = ModelFamily("MinistralForCausalLM", read_ministral)
