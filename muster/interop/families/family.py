"""A model family: its config.json as a ModelSpec, the way back, and its weight map; with the keys that most share."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from muster.interop.families.weight_link import WeightLink
from muster.spec.errors import ConfigError
from muster.spec.model import ModelSpec

Config = Mapping[str, Any]
"""A config.json."""

_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_new": "gelu_tanh", "relu": "relu"}
_ACTIVATIONS |= {"gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh"}
HF_ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_new", "relu": "relu"}


@dataclass(frozen=True)
class ModelFamily:
    """One `model_type`: how its configuration and its weights translate."""

    architecture: str
    """Class name in `transformers`."""
    read: Callable[[Config], dict[str, Any]]
    """Fields of a ModelSpec from a config.json."""
    write: Callable[[ModelSpec], dict[str, Any]] | None = None
    """Keys of a config.json, which may say less than the ModelSpec does; None: the family is only read."""
    weight_links: Callable[[ModelSpec], Iterator[WeightLink]] | None = None
    """The weight map, for the families that can be written."""
    keys: Mapping[str, str] = field(default_factory=lambda: SHARED_KEYS)
    """Key of a config.json behind a field of a ModelSpec, where it has another name; error messages name it."""
    dropout: Mapping[str, str] = field(default_factory=lambda: {"attention_dropout": "attention_dropout"})
    """Key of a config.json behind each rate of dropout that the family's layers apply."""
    default_dropout: float = 0.0
    """Rates where the keys are left out."""

    def read_dropout(self, config: Config) -> dict[str, Any]:
        """Return the rates of dropout in a config.json, with which `transformers` would train."""
        given = {field: config.get(key) for field, key in self.dropout.items()}
        return {field: self.default_dropout if rate is None else rate for field, rate in given.items()}

    def write_dropout(self, spec: ModelSpec) -> dict[str, Any]:
        """Return the keys for a model's rates of dropout, as far as the family has them."""
        return {key: getattr(spec, field) for field, key in reversed(tuple(self.dropout.items()))}


AUX_LOSS_KEY, AUX_LOSS_DEFAULT = "router_aux_loss_coef", 0.001
"""Coefficient of the load-balancing loss in a config.json, and the value that `transformers` has where it is left
out."""
SLIDING_ATTENTION = "sliding_attention"
"""Value in `layer_types` of a layer with a sliding window."""

SHARED_COUNTS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "intermediate_size": "intermediate_size",
}
OPTIONAL_FIELDS = {"num_key_value_heads": "num_kv_heads", "head_dim": "head_dim", "initializer_range": "init_std"}

SHARED_KEYS = {field: key for key, field in (SHARED_COUNTS | OPTIONAL_FIELDS).items()} | {
    "norm_eps": "rms_norm_eps",
    "tied_embeddings": "tie_word_embeddings",
    "max_positions": "max_position_embeddings",
    "qkv_bias": "attention_bias",
    "out_bias": "attention_bias",
}
"""Key of a config.json behind a field of a ModelSpec; others have the field's own name."""


def require_count(config: Config, key: str) -> int:
    """Return a count that others are computed from. Raises KeyError where it is missing, ConfigError where it isn't an
    integer."""
    value = config[key]
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ConfigError(f"{key}: expected a whole number, got {value!r}")
    return value


def read_activation(name: object) -> str:
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


def read_rope(config: Config) -> dict[str, Any]:
    """Read `rope_parameters`, or its forms before transformers 5, `rope_theta` and `rope_scaling`."""
    section = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    found = config.get(section) or {}
    if not isinstance(found, Mapping) or any(isinstance(value, Mapping) for value in found.values()):
        raise ConfigError(f"{section}: expected one mapping for all layers, got {found!r}")
    if (part := found.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ConfigError(f"{section}.partial_rotary_factor is {part!r}, expected 1.0: nothing else is supported")
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


def write_rope(spec: ModelSpec) -> dict[str, Any]:
    if (scaling := spec.rope_scaling) is None:
        return {"rope_theta": spec.rope_theta, "rope_scaling": None}
    values = {key: getattr(scaling, _ROPE[key]) for key in _ROPE_OF[scaling.kind]}
    given = {key: value for key, value in values.items() if value is not None}
    return {"rope_theta": spec.rope_theta, "rope_scaling": {"rope_type": scaling.kind, **given}}


def read_sliding_windows(config: Config, usual: list[str]) -> dict[str, Any]:
    """Read the window of the layers that `layer_types` lists; `usual` is its value where it is left out."""
    if config.get("sliding_window") is None:
        return {}
    types = config.get("layer_types") or usual
    count = require_count(config, "num_hidden_layers")
    if len(types) != count or (other := {*types} - {SLIDING_ATTENTION, "full_attention", ""}):
        problem = f"{len(types)} layers" if len(types) != count else f"a layer of {other.pop()}"
        raise ConfigError(
            f"layer_types: expected {SLIDING_ATTENTION} or full_attention for {count} layers, got {problem}"
        )
    layers = [layer for layer, kind in enumerate(types) if kind == SLIDING_ATTENTION]
    if not layers:
        return {}
    window = {"sliding_window": config["sliding_window"]}
    return window if len(layers) == count else window | {"window_layers": layers}
