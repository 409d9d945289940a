"""Gemma 2: Llama's keys and tensors, norms around attention and MLP, soft caps, and a window in every second layer."""

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
