"""Hugging Face's config.json as a ModelSpec, and the way back.

Files are written in the form that every version of `transformers` reads.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from muster.interop.families import FAMILIES
from muster.interop.families.family import Config
from muster.interop.families.unsupported import NEAREST_FAMILY
from muster.spec.config_errors import ConfigSchema, error_sentence
from muster.spec.errors import ConfigError, InfeasibleError
from muster.spec.model import DROPOUT_RATES, ModelSpec
from muster.spec.suggest import did_you_mean

_ONLY_IN_SPEC = {"name", "scaled_residual"}
"""Fields of a ModelSpec without a counterpart in config.json."""


def load_hf_model(folder: Path) -> ModelSpec:
    """Load the model that the config.json in a directory describes, without layers for multi-token prediction whose
    weights the directory doesn't hold: transformers writes their number, but never saves them. Raises ConfigError where
    the configuration can't be read."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_unique)
    except FileNotFoundError:
        raise ConfigError(f"there is no {path}: expected a Hugging Face directory with its config.json") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"can't read {path}: expected JSON ({error})") from None
    if not isinstance(config, dict):
        raise ConfigError(f"can't read {path}: expected a JSON object, got {type(config).__name__}")
    try:
        spec = spec_from_hf_config(config, folder.resolve().name)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    if spec.mtp_layers and not _may_hold_layer(folder, spec.num_layers):
        return spec.model_copy(update={"mtp_layers": 0})
    return spec


def _may_hold_layer(folder: Path, number: int) -> bool:
    """Return False where the directory's weights are known to have no tensor of this layer."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    try:
        if index.exists():
            names = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        else:
            with single.open("rb") as file:  # the length of a header in JSON, whose keys are the tensors' names
                names = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    except (OSError, ValueError, KeyError, MemoryError):  # whoever reads the weights says so
        return True
    return any(f".layers.{number}." in name for name in names)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object of these pairs. Raises ConfigError for a key that is given twice."""
    names = [name for name, _ in pairs]
    if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        raise ConfigError(f"{twice[0]} is given twice")
    return dict(pairs)


def spec_from_hf_config(config: Config, name: str = "custom") -> ModelSpec:
    """Return the model that a config.json describes.

    Raises ConfigError where the family is unknown, or the model has something that a ModelSpec can't express.
    """
    kind = config.get("model_type")
    if kind not in FAMILIES:
        raise ConfigError(_unknown(config))
    for key, expected in _FIXED.items():
        if config.get(key) not in (None, expected):
            raise ConfigError(f"{key} is {config[key]!r}, expected {expected!r}: nothing else is supported")
    try:
        return ModelSpec.model_validate(
            {"name": name, **FAMILIES[kind].read(config), **FAMILIES[kind].read_dropout(config)}
        )
    except KeyError as error:
        raise ConfigError(f"{error.args[0]}: missing, required by model_type {kind}") from None
    except ValidationError as error:
        message = error_sentence(error.errors()[0], ConfigSchema(ModelSpec), {})
        raise ConfigError(_in_words_of(message, {**FAMILIES[kind].keys, **FAMILIES[kind].dropout})) from None


def _unknown(config: Config) -> str:
    """Return the reason why a configuration of no known family is refused, and the nearest family."""
    kind = config.get("model_type")
    part = config.get("text_config")
    inner = str(part.get("model_type")) if isinstance(part, Mapping) else ""
    if inner in FAMILIES:
        return (
            f"model_type {kind!r} is more than a decoder, and only decoders are supported; nearest is the decoder in"
            f" it: save its text_config, of model_type {inner!r}, as a config.json of its own"
        )
    if (found := next((name for name in (inner, kind) if name in NEAREST_FAMILY), None)) is not None:
        nearest, more = NEAREST_FAMILY[found]
        return f"model_type {found!r} is not supported: it has {more}; nearest is {nearest!r}, which lacks that"
    hint = did_you_mean(str(kind), FAMILIES)
    return f"model_type {kind!r} is not a supported family{hint} (there are {', '.join(FAMILIES)})"


def _in_words_of(sentence: str, keys: Mapping[str, str]) -> str:
    """Return a sentence about fields of a ModelSpec as one about the keys that they were read from."""
    return re.sub(r"\b[a-z_]+(\.[a-z_]+)?\b", lambda word: keys.get(word[0], word[0]), sentence)


def hf_config_from_spec(spec: ModelSpec, preferred: str | None = None) -> dict[str, Any]:
    """Return the config.json of a model: its shape, without dtype and special tokens, in the first family that has all
    of it, the one of the model_type `preferred` before the others.

    Raises InfeasibleError where none has.
    """
    nearest: tuple[tuple[bool, int], str, list[str]] | None = None
    for kind, family in sorted(FAMILIES.items(), key=lambda pair: pair[0] != preferred):
        if family.write is None:
            continue
        config = {"architectures": [family.architecture], "model_type": kind, **family.write(spec)}
        config |= family.write_dropout(spec)
        try:
            lost = _differences(spec, spec_from_hf_config(config, spec.name))
        except ConfigError:
            continue
        if not lost:
            return config
        distance = "moe" in lost, len(lost)  # a family without experts, or with them, is the farthest from the other
        if nearest is None or distance < nearest[0]:
            nearest = distance, kind, lost
    assert nearest is not None
    _, kind, lost = nearest
    raise InfeasibleError(
        f"model {spec.name} fits no Hugging Face family that can be written: nearest is {kind}, which can't express its"
        f" {', '.join(lost)}"
    )


def _differences(spec: ModelSpec, other: ModelSpec) -> list[str]:
    """Return the fields in which two models differ; of experts that both have, the fields of these."""
    spec, other = (_without_training(one) for one in (spec, other))
    fields = set(ModelSpec.model_fields) - _ONLY_IN_SPEC
    differing = [field for field in fields if getattr(spec, field) != getattr(other, field)]
    ours, theirs = spec.moe, other.moe
    if ours is not None and theirs is not None and "moe" in differing:
        differing.remove("moe")
        names = type(ours).model_fields
        differing += [f"moe.{name}" for name in names if getattr(ours, name) != getattr(theirs, name)]
    return sorted(differing)


def _without_training(spec: ModelSpec) -> ModelSpec:
    """Return a model without what only its training needs: dropout, losses of the router and weights of losses."""
    spec = spec.model_copy(update=dict.fromkeys(DROPOUT_RATES, 0.0) | {"mtp_loss_scaling_factor": 0.0})
    if spec.moe is None:
        return spec
    losses = {"aux_loss_coef": 0.0, "aux_loss_scope": "sequence", "router_z_loss_coef": 0.0}
    return spec.model_copy(update={"moe": spec.moe.model_copy(update=losses)})


_FIXED = {
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
    "partial_rotary_factor": 1.0,
    "mlp_only_layers": [],
    "router_jitter_noise": 0.0,
}
"""Keys of which only one value is supported."""
