"""Gemma 2 and 3: Llama's keys and tensors, norms around attention and MLP, windows, soft caps (2) or QK norms (3)."""

from collections.abc import Iterator, Mapping
from typing import Any

from muster.interop.families.family import (
    SHARED_KEYS,
    SLIDING_ATTENTION,
    Config,
    ModelFamily,
    read_sliding_windows,
    require_count,
)
from muster.interop.families.llama import hf_parameter_name, read_llama, write_llama
from muster.interop.families.weight_link import WeightLink, link_whole
from muster.spec.errors import ConfigError
from muster.spec.model import ModelSpec, parameter_shapes

_KEYS = SHARED_KEYS | {
    "activation": "hidden_activation",
    "attention_softcap": "attn_logit_softcapping",
    "logit_softcap": "final_logit_softcapping",
}
_DEFAULTS = {"head_dim": 256, "tie_word_embeddings": True}
_ACTIVATION = "gelu_pytorch_tanh"


def read_gemma2(config: Config) -> dict[str, Any]:
    """Read a config.json. Every second layer, the first included, has a window (arXiv:2408.00118 §2)."""
    usual = [_layer_kind(layer % 2 == 0) for layer in range(require_count(config, "num_hidden_layers"))]
    softcaps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    return _read_gemma({**softcaps, "sliding_window": 4096, **config}, usual)


def _read_gemma(config: Config, usual_layers: list[str]) -> dict[str, Any]:
    if config.get("use_bidirectional_attention"):
        raise ConfigError("use_bidirectional_attention is true, expected false: only causal attention is supported")
    activation = config.get("hidden_activation") or _ACTIVATION
    return read_llama({**_DEFAULTS, **config, "hidden_act": activation}) | {
        "norm_unit_offset": True,
        "norm_placement": "both",
        "scale_embeddings": True,
        "query_pre_attn_scalar": config.get("query_pre_attn_scalar", 256),
        "attention_softcap": config.get("attn_logit_softcapping"),
        "logit_softcap": config.get("final_logit_softcapping"),
        **read_sliding_windows(config, usual_layers),
    }


def read_gemma3(config: Config) -> dict[str, Any]:
    """Read a config.json. Every sixth layer has no window, and another base of the rotary wavelengths
    (arXiv:2503.19786 §2)."""
    config = {**_GEMMA3_DEFAULTS, **config}
    pattern = require_count(config, "sliding_window_pattern")
    usual = [
        _layer_kind((layer + 1) % (pattern or 1) != 0) for layer in range(require_count(config, "num_hidden_layers"))
    ]
    rope, local_theta = _read_two_ropes(config)
    fields = _read_gemma({**config, **rope}, usual) | {"qk_norm": True}
    return fields | ({"window_rope_theta": local_theta} if "sliding_window" in fields else {})


_GEMMA3_DEFAULTS = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131_072,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
}


def _read_two_ropes(config: Config) -> tuple[dict[str, Any], Any]:
    """Return the keys of the rotary wavelengths in layers without a window, and the base in those with one.

    Before transformers 5 they are `rope_theta`, `rope_scaling` and `rope_local_base_freq`.
    """
    found = config.get("rope_parameters") or {}
    if not isinstance(found, Mapping):
        raise ConfigError(f"rope_parameters: expected a mapping, got {found!r}")
    full, local = (found.get(kind) or {} for kind in ("full_attention", SLIDING_ATTENTION))
    if local.get("rope_type", "default") != "default":
        raise ConfigError(f"rope_parameters.{SLIDING_ATTENTION}.rope_type is {local['rope_type']!r}, expected default")
    keys = {
        "rope_parameters": None,
        "rope_theta": full.get("rope_theta", config.get("rope_theta", 1_000_000.0)),
        "rope_scaling": full or config.get("rope_scaling"),
    }
    return keys, local.get("rope_theta", config.get("rope_local_base_freq", 10_000.0))


def _layer_kind(has_window: bool) -> str:
    return SLIDING_ATTENTION if has_window else "full_attention"


def write_gemma2(spec: ModelSpec) -> dict[str, Any]:
    config = write_llama(spec)
    del config["mlp_bias"], config["hidden_act"]
    scalar = spec.query_pre_attn_scalar or spec.head_dim
    return config | {
        "hidden_activation": _ACTIVATION if spec.activation == "gelu_tanh" else spec.activation,
        "query_pre_attn_scalar": int(scalar) if scalar == int(scalar) else scalar,
        "attn_logit_softcapping": spec.attention_softcap,
        "final_logit_softcapping": spec.logit_softcap,
        "sliding_window": spec.sliding_window,
        "layer_types": [_layer_kind(spec.attention_window(layer) is not None) for layer in range(spec.num_layers)],
    }


def write_gemma3(spec: ModelSpec) -> dict[str, Any]:
    return write_gemma2(spec) | {"rope_local_base_freq": spec.window_rope_theta or spec.rope_theta}


_NORMS = {
    "attn_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}


def weight_links(spec: ModelSpec) -> Iterator[WeightLink]:
    """Yield the weight map of a Gemma 2 or 3."""
    for name, shape in parameter_shapes(spec):
        yield link_whole(name, hf_parameter_name(name, _NORMS), shape)


GEMMA2 = ModelFamily("Gemma2ForCausalLM", read_gemma2, write_gemma2, weight_links, _KEYS)
GEMMA3 = ModelFamily(
    "Gemma3ForCausalLM",
    read_gemma3,
    write_gemma3,
    weight_links,
    _KEYS | {"window_rope_theta": "rope_local_base_freq"},
)
