"""DeepSeek-V2 and V3 (which Kimi-K2 is), and dots.llm1: latent attention, experts of which some are shared, MTP layers.

MTP layers are stored after the last layer, with copies of the model's embedding and head. Rotary elements are stored as
neighbouring pairs, in queries as in keys (`rope_interleave` of the configuration).
"""

from collections.abc import Iterator
from typing import Any

from muster.interop.families.family import (
    SHARED_KEYS,
    SLIDING_ATTENTION,
    Config,
    ModelFamily,
    read_sliding_windows,
    require_count,
)
from muster.interop.families.llama import LAYER_NAMES, TOP_LEVEL_NAMES, read_llama, write_llama
from muster.interop.families.weight_link import WeightLink, link_stacked, link_whole
from muster.spec.errors import ConfigError
from muster.spec.model import ModelSpec, parameter_shapes

# ----------------------------------------------------------------------------------------------------------------------
# Configurations

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
_DEFAULTS = {"first_k_dense_replace": 0, "norm_topk_prob": False, "routed_scaling_factor": 1.0}
_DEFAULTS |= {"n_group": 1, "topk_group": 1}
"""Defaults of DeepSeek-V2 and dots.llm1 for keys that they leave out."""
_LATENT = {
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "qk_nope_head_dim": "nope_head_dim",
    "qk_rope_head_dim": "rope_head_dim",
    "v_head_dim": "v_head_dim",
}


_KEYS = SHARED_KEYS | {f"moe.{field}": key for key, field in _ROUTING.items()}
_KEYS |= {f"mla.{field}": key for key, field in _LATENT.items()} | {"mtp_layers": "num_nextn_predict_layers"}


def read_deepseek_v3(config: Config) -> dict[str, Any]:
    routing = {field: config[key] for key, field in _ROUTING.items()}
    return _latent(config) | {
        "moe": routing | _shared(config) | {"router": "sigmoid", "router_bias": True},
        "mtp_layers": config.get("num_nextn_predict_layers", 0),
    }


def read_deepseek_v2(config: Config) -> dict[str, Any]:
    """Read a config.json. Experts are chosen by the softmax alone: among all (`greedy`), or among the groups with the
    best ones."""
    method = config.get("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy") or config.get("scoring_func", "softmax") != "softmax":
        raise ConfigError(
            f"topk_method is {method!r} of scores by {config.get('scoring_func', 'softmax')!r}: nothing"
            " but greedy and group_limited_greedy by softmax is known"
        )
    routing = {**_DEFAULTS, **config} | ({"n_group": 1, "topk_group": 1} if method == "greedy" else {})
    return _latent(config) | {"moe": {field: routing[key] for key, field in _ROUTING.items()} | _shared(config)}


def read_dots1(config: Config) -> dict[str, Any]:
    given = {**_DEFAULTS, **config}
    routing = {field: given[key] for key, field in _ROUTING.items()}
    first = config.get("max_window_layers", 62)
    count = require_count(config, "num_hidden_layers")
    windows = read_sliding_windows(config, [SLIDING_ATTENTION if layer >= first else "" for layer in range(count)])
    moe = routing | _shared(config) | {"router": "sigmoid", "router_bias": True}
    return read_llama(config) | {"qk_norm": True, "moe": moe} | windows


def _latent(config: Config) -> dict[str, Any]:
    """Read latent attention, whose queries and keys have rotary and other elements."""
    if not config.get("rope_interleave", True):
        raise ConfigError(
            "rope_interleave is False, expected True: rotary elements that lie in halves are not supported"
        )
    mla = {field: config[key] for key, field in _LATENT.items()}
    return read_llama(config) | {
        "num_kv_heads": config["num_attention_heads"],
        "head_dim": require_count(config, "qk_nope_head_dim") + require_count(config, "qk_rope_head_dim"),
        "mla": mla,
    }


def _shared(config: Config) -> dict[str, Any]:
    if config.get("moe_layer_freq", 1) != 1:
        raise ConfigError(f"moe_layer_freq is {config['moe_layer_freq']!r}, expected 1: nothing else is supported")
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


# ----------------------------------------------------------------------------------------------------------------------
# Weights

_ATTENTION = {
    "q_down": "q_a_proj",
    "q_down_norm": "q_a_layernorm",
    "q_up": "q_b_proj",
    "kv_down": "kv_a_proj_with_mqa",
    "kv_down_norm": "kv_a_layernorm",
    "kv_up": "kv_b_proj",
}
_FURTHER = {"embed_norm": "enorm", "hidden_norm": "hnorm", "norm": "shared_head.norm"}


def weight_links(spec: ModelSpec) -> Iterator[WeightLink]:
    """Yield the weight map of a DeepSeek-V3."""
    for name, shape in parameter_shapes(spec):
        kind, _, rest = name.partition(".")
        if kind not in ("layers", "mtp"):
            yield link_whole(name, f"{TOP_LEVEL_NAMES[kind]}.{rest}", shape)
            continue
        index, _, part = rest.partition(".")
        layer = int(index) + (spec.num_layers if kind == "mtp" else 0)
        yield from _in_layer(name, shape, f"model.layers.{layer}", part)


def _in_layer(name: str, shape: tuple[int, ...], prefix: str, part: str) -> Iterator[WeightLink]:
    module, _, leaf = part.rpartition(".")
    if module.startswith("mlp.experts."):
        matrix = LAYER_NAMES[module.rpartition(".")[2]]
        yield from link_stacked(name, [f"{prefix}.mlp.experts.{i}.{matrix}.{leaf}" for i in range(shape[0])], shape)
    elif module == "mlp.router":
        yield link_whole(
            name, f"{prefix}.mlp.gate.{'e_score_correction_bias' if leaf == 'expert_bias' else leaf}", shape
        )
    else:
        words = {"shared": "shared_experts", **LAYER_NAMES, **_ATTENTION, **_FURTHER}
        yield link_whole(
            name, f"{prefix}.{'.'.join(words.get(word, word) for word in module.split('.'))}.{leaf}", shape
        )


# ----------------------------------------------------------------------------------------------------------------------
# Families

DEEPSEEK_V3 = ModelFamily("DeepseekV3ForCausalLM", read_deepseek_v3, write_deepseek_v3, weight_links, _KEYS)
DEEPSEEK_V2 = ModelFamily("DeepseekV2ForCausalLM", read_deepseek_v2, keys=_KEYS)
KIMI_K2 = ModelFamily("DeepseekV3ForCausalLM", read_deepseek_v3, keys=_KEYS)
DOTS1 = ModelFamily("Dots1ForCausalLM", read_dots1, keys=_KEYS)
