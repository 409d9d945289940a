"""The dense families: Llama, Mistral, Qwen2, Qwen3, Seed-OSS and Phi-3, which share nearly all words, and GPT-2."""

from collections.abc import Mapping
from typing import Any

from muster.spec.errors import ConfigError
from muster.spec.model import ModelSpec

Config = Mapping[str, Any]

_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_new": "gelu_tanh", "relu": "relu"}
_ACTIVATIONS |= {"gelu_pytorch_tanh": "gelu_tanh"}
_HF_ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_new", "relu": "relu"}

# ----------------------------------------------------------------------------------------------------------------------
# What Llama and its descendants share

SLIDING_ATTENTION = "sliding_attention"
"""In `layer_types`, a layer with a window."""

_SHARED = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "intermediate_size": "intermediate_size",
}
_OPTIONAL = {"num_key_value_heads": "num_kv_heads", "head_dim": "head_dim", "initializer_range": "init_std"}

LLAMA_KEYS = {field: key for key, field in (_SHARED | _OPTIONAL).items()} | {
    "norm_eps": "rms_norm_eps",
    "tied_embeddings": "tie_word_embeddings",
    "max_positions": "max_position_embeddings",
    "qkv_bias": "attention_bias",
    "out_bias": "attention_bias",
}
"""The key of a config.json behind a field of a ModelSpec; others have the field's own name."""


def read_llama(config: Config) -> dict[str, Any]:
    fields = {field: config[key] for key, field in _SHARED.items()}
    fields |= {field: config[key] for key, field in _OPTIONAL.items() if config.get(key) is not None}
    return fields | {
        "norm_eps": config.get("rms_norm_eps", 1e-6),
        "tied_embeddings": config.get("tie_word_embeddings", False),
        "max_positions": config.get("max_position_embeddings"),
        "activation": _activation(config.get("hidden_act", "silu")),
        "qkv_bias": config.get("attention_bias", False),
        "out_bias": config.get("attention_bias", False),
        "mlp_bias": config.get("mlp_bias", False),
        **_read_rope(config),
    }


def write_llama(spec: ModelSpec) -> dict[str, Any]:
    return {
        **{key: getattr(spec, field) for key, field in _SHARED.items()},
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "hidden_act": _HF_ACTIVATIONS[spec.activation],
        "initializer_range": spec.init_std,
        "rms_norm_eps": spec.norm_eps,
        "tie_word_embeddings": spec.tied_embeddings,
        "attention_bias": spec.out_bias,
        "mlp_bias": spec.mlp_bias,
        **({} if spec.max_positions is None else {"max_position_embeddings": spec.max_positions}),
        **_write_rope(spec),
    }


def require_count(config: Config, key: str) -> int:
    """A count that others are made of. Raises KeyError where it is missing, ConfigError where it is none."""
    value = config[key]
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ConfigError(f"{key}: expected a whole number, got {value!r}")
    return value


def _activation(name: object) -> str:
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise ConfigError(f"hidden_act {name!r} is unknown, expected one of {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


_ROPE = {
    "factor": "factor",
    "original_max_position_embeddings": "original_positions",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "truncate": "truncate",
    "attention_factor": "attention_factor",
    "mscale": "mscale",
    "mscale_all_dim": "mscale_all_dim",
}
_ROPE_OF = {
    "linear": ("factor",),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "yarn": tuple(key for key in _ROPE if "freq" not in key),
}


def _read_rope(config: Config) -> dict[str, Any]:
    """From `rope_parameters`, or as it was before transformers 5, from `rope_theta` and `rope_scaling`."""
    said = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    found = config.get(said) or {}
    if not isinstance(found, Mapping) or any(isinstance(value, Mapping) for value in found.values()):
        raise ConfigError(f"{said}: expected one mapping for all layers, got {found!r}")
    if (part := found.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ConfigError(f"{said}.partial_rotary_factor is {part!r}, expected 1.0: nothing else is known")
    theta = found.get("rope_theta", config.get("rope_theta", 10_000.0))
    kind = found.get("rope_type", found.get("type", "default"))
    if kind == "default":
        return {"rope_theta": theta}
    if kind not in _ROPE_OF:
        raise ConfigError(f"rope_type {kind!r} is unknown, expected one of default, {', '.join(_ROPE_OF)}")
    scaling = {_ROPE[key]: found[key] for key in _ROPE_OF[kind] if found.get(key) is not None}
    if kind == "yarn" and "original_positions" not in scaling:
        scaling["original_positions"] = config.get("max_position_embeddings")
    return {"rope_theta": theta, "rope_scaling": {"kind": kind, **scaling}}


def _write_rope(spec: ModelSpec) -> dict[str, Any]:
    if (scaling := spec.rope_scaling) is None:
        return {"rope_theta": spec.rope_theta, "rope_scaling": None}
    values = {key: getattr(scaling, _ROPE[key]) for key in _ROPE_OF[scaling.kind]}
    said = {key: value for key, value in values.items() if value is not None}
    return {"rope_theta": spec.rope_theta, "rope_scaling": {"rope_type": scaling.kind, **said}}


# ----------------------------------------------------------------------------------------------------------------------
# Families


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
    """Which layers have a window: a list, or all from `max_window_layers` on."""
    if not config.get("use_sliding_window"):
        return {}
    count, first = require_count(config, "num_hidden_layers"), config.get("max_window_layers", 28)
    return read_sliding_windows(config, [SLIDING_ATTENTION if layer >= first else "" for layer in range(count)])


def read_sliding_windows(config: Config, usual: list[str]) -> dict[str, Any]:
    """The window of those layers that `layer_types` says have one; `usual` is what it says where it is left out."""
    if config.get("sliding_window") is None:
        return {}
    types, count = config.get("layer_types") or usual, require_count(config, "num_hidden_layers")
    if len(types) != count or (other := {*types} - {SLIDING_ATTENTION, "full_attention", ""}):
        what = f"{len(types)} layers" if len(types) != count else f"a layer of {other.pop()}"
        raise ConfigError(f"layer_types: expected {SLIDING_ATTENTION} or full_attention for {count} layers, got {what}")
    layers = [layer for layer, kind in enumerate(types) if kind == SLIDING_ATTENTION]
    if not layers:
        return {}
    window = {"sliding_window": config["sliding_window"]}
    return window if len(layers) == count else window | {"window_layers": layers}


def write_qwen(spec: ModelSpec) -> dict[str, Any]:
    kinds = ("full_attention", "sliding_attention")
    types = [kinds[spec.attention_window(layer) is not None] for layer in range(spec.num_layers)]
    first = types.index(kinds[1]) if kinds[1] in types else spec.num_layers
    return write_mistral(spec) | {
        "use_sliding_window": spec.sliding_window is not None,
        "max_window_layers": first,
        "layer_types": types,
    }


GPT2_KEYS = {
    "hidden_size": "n_embd",
    "num_layers": "n_layer",
    "num_heads": "n_head",
    "intermediate_size": "n_inner",
    "max_positions": "n_positions",
    "norm_eps": "layer_norm_epsilon",
    "init_std": "initializer_range",
    "tied_embeddings": "tie_word_embeddings",
}


def read_gpt2(config: Config) -> dict[str, Any]:
    hidden = require_count(config, "n_embd")
    return {
        "vocab_size": config["vocab_size"],
        "hidden_size": hidden,
        "num_layers": config["n_layer"],
        "num_heads": config["n_head"],
        "intermediate_size": config.get("n_inner") or 4 * hidden,
        "max_positions": config.get("n_positions", 1024),
        "norm_eps": config.get("layer_norm_epsilon", 1e-5),
        "activation": _activation(config.get("activation_function", "gelu_new")),
        "init_std": config.get("initializer_range", 0.02),
        "tied_embeddings": config.get("tie_word_embeddings", True),
        "norm": "layer",
        "position": "learned",
        "gated": False,
        "qkv_bias": True,
        "out_bias": True,
        "mlp_bias": True,
    }


def write_gpt2(spec: ModelSpec) -> dict[str, Any]:
    return {
        "vocab_size": spec.vocab_size,
        "n_embd": spec.hidden_size,
        "n_layer": spec.num_layers,
        "n_head": spec.num_heads,
        "n_inner": spec.intermediate_size,
        "n_positions": spec.max_positions,
        "layer_norm_epsilon": spec.norm_eps,
        "activation_function": _HF_ACTIVATIONS[spec.activation],
        "initializer_range": spec.init_std,
        "tie_word_embeddings": spec.tied_embeddings,
        **{f"{part}_pdrop": 0.0 for part in ("resid", "embd", "attn")},
    }
