"""A model by name: from the catalogue, a plugin, a Hugging Face directory, or a file."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from muster.catalog import names
from muster.config.config_layers import (
    ConfigLayer,
    looks_like_path,
    read_catalog_layer,
    read_file_layer,
)
from muster.config.yaml_reader import validate_values
from muster.interop.hf_config import load_hf_model
from muster.plugins.registry import find_component
from muster.spec.config_errors import ConfigSchema, config_error
from muster.spec.dotted_keys import flatten, unflatten
from muster.spec.errors import ConfigError
from muster.spec.model import ModelSpec

HF_PREFIX = "hf:"
"""Prefix of a Hugging Face directory's path, where a model's name is expected."""


def load_model(name: str, folder: Path = Path()) -> ModelSpec:
    """Load the model that a name stands for: one of the catalogue; `hf:DIR`, whose config.json is read; or the path of
    a YAML file in the catalogue's form. Relative paths begin at `folder`.

    Raises ConfigError with one sentence for each error.
    """
    layer = read_model_layer(name, folder)
    values = {key: value for key, value in layer.values.items() if key != "version"}
    try:
        return validate_values(ModelSpec, unflatten(values))
    except ValidationError as error:
        raise config_error(error, ConfigSchema(ModelSpec), {key: layer.origin(key) for key in values}) from None


def read_model_layer(name: str, folder: Path = Path()) -> ConfigLayer:
    """Read the model's values as a layer, unchecked; otherwise as `load_model`. Raises ConfigError."""
    if name.startswith(HF_PREFIX):
        spec = load_hf_model(folder / Path(name.removeprefix(HF_PREFIX)).expanduser())
        return ConfigLayer(f"model {name}", dict(flatten(spec.model_dump(mode="json", exclude_defaults=True))), folder)
    if (part := find_component("model", name)) is not None:
        return plugin_model_layer(name, part.target.spec_values)
    if (folder / name).is_dir() and name not in names("models"):
        raise ConfigError(f"model {name} is a directory: for the model of a Hugging Face directory write hf:{name}")
    return read_file_layer(folder / name) if looks_like_path(name) else read_catalog_layer("models", name)


def plugin_model_layer(name: str, values: Mapping[str, Any]) -> ConfigLayer:
    """Return the values of a plugin's model: those of the model that it is `like`, with its own over them."""
    given = dict(values)
    like = given.pop("like", None)
    base = {} if like is None else {k: v for k, v in read_model_layer(like).values.items() if k != "version"}
    return ConfigLayer(f"model {name}", {**base, **dict(flatten(given)), "name": name, "architecture": name}, Path())
