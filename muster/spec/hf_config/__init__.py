"""Hugging Face's config.json as a ModelSpec, and the way back.

What is written is in the words that every version of `transformers` reads.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from muster.spec.errors import ConfigError, InfeasibleError
from muster.spec.explain import Shape, sentence
from muster.spec.hf_config import dense, experts
from muster.spec.hf_config.dense import Config
from muster.spec.model import ModelSpec
from muster.spec.suggest import did_you_mean

_ONLY_IN_SPEC = {"name", "scaled_residual"}
"""Fields of a ModelSpec of which a config.json says nothing."""


@dataclass(frozen=True)
class Family:
    """How one `model_type` is read and written."""

    architecture: str
    read: Callable[[Config], dict[str, Any]]
    """Fields of a ModelSpec."""
    write: Callable[[ModelSpec], dict[str, Any]]
    """Keys of a config.json, which may say less than the ModelSpec does."""


FAMILIES = {
    "llama": Family("LlamaForCausalLM", dense.read_llama, dense.write_llama),
    "mistral": Family("MistralForCausalLM", dense.read_mistral, dense.write_windowed),
    "qwen2": Family("Qwen2ForCausalLM", dense.read_qwen2, dense.write_qwen),
    "qwen3": Family("Qwen3ForCausalLM", dense.read_qwen3, dense.write_qwen),
    "gpt2": Family("GPT2LMHeadModel", dense.read_gpt2, dense.write_gpt2),
    "mixtral": Family("MixtralForCausalLM", experts.read_mixtral, experts.write_mixtral),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", experts.read_qwen3_moe, experts.write_qwen3_moe),
    "deepseek_v3": Family("DeepseekV3ForCausalLM", experts.read_deepseek_v3, experts.write_deepseek_v3),
}
"""By `model_type`."""


def load_hf_model(folder: Path) -> ModelSpec:
    """The model that the config.json in a directory describes. Raises ConfigError where that can't be read."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"there is no {path}: expected a Hugging Face directory with its config.json") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"can't read {path}: expected JSON ({error})") from None
    if not isinstance(config, dict):
        raise ConfigError(f"can't read {path}: expected a JSON object, got {type(config).__name__}")
    try:
        return spec_from_hf(config, folder.resolve().name)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def spec_from_hf(config: Config, name: str = "custom") -> ModelSpec:
    """The model that a config.json describes.

    Raises ConfigError where the family is unknown, or it says something that a ModelSpec has no word for.
    """
    kind = config.get("model_type")
    if kind not in FAMILIES:
        hint = did_you_mean(str(kind), FAMILIES)
        raise ConfigError(f"model_type {kind!r} is no family that is known{hint} (there are {', '.join(FAMILIES)})")
    for key, expected in _FIXED.items():
        if config.get(key, expected) != expected:
            raise ConfigError(f"{key} is {config[key]!r}, expected {expected!r}: nothing else is known")
    try:
        return ModelSpec.model_validate({"name": name, **FAMILIES[kind].read(config)})
    except KeyError as error:
        raise ConfigError(f"{error.args[0]}: missing, expected it of model_type {kind}") from None
    except ValidationError as error:
        raise ConfigError(sentence(error.errors()[0], Shape(ModelSpec), {})) from None


def hf_config(spec: ModelSpec) -> dict[str, Any]:
    """The config.json of a model: its shape, without dtype and special tokens, in the first family that has all of it.

    Raises InfeasibleError where none has.
    """
    nearest: tuple[int, str, list[str]] | None = None
    for kind, family in FAMILIES.items():
        config = {"architectures": [family.architecture], "model_type": kind, **family.write(spec)}
        try:
            lost = _differences(spec, spec_from_hf(config, spec.name))
        except ConfigError:
            continue
        if not lost:
            return config
        if nearest is None or len(lost) < nearest[0]:
            nearest = len(lost), kind, lost
    assert nearest is not None
    _, kind, lost = nearest
    raise InfeasibleError(
        f"model {spec.name} is of no Hugging Face family that is known: nearest is {kind}, which can't say its"
        f" {', '.join(lost)}"
    )


def _differences(spec: ModelSpec, other: ModelSpec) -> list[str]:
    fields = set(ModelSpec.model_fields) - _ONLY_IN_SPEC
    return sorted(field for field in fields if getattr(spec, field) != getattr(other, field))


_FIXED = {
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
    "partial_rotary_factor": 1.0,
    "mlp_only_layers": [],
    "router_jitter_noise": 0.0,
}
"""What only one value is known of."""
