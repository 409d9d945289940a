"""A model by its name: one of the catalogue, a Hugging Face directory, or a file."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from muster.spec.explain import Shape, config_error
from muster.spec.hf_config import load_hf_model
from muster.spec.layers import Layer, catalog_layer, file_layer, flatten, is_path, unflatten
from muster.spec.model import ModelSpec
from muster.spec.parts import find_part

HF_PREFIX = "hf:"
"""Before the path of a Hugging Face directory, where a model's name is wanted."""


def load_model(name: str, folder: Path = Path()) -> ModelSpec:
    """The model that a name stands for: one of the catalogue; `hf:DIR`, whose config.json is read; or the path of a
    YAML file of the catalogue's form. Relative paths begin at `folder`.

    Raises ConfigError with one sentence for each thing that is wrong.
    """
    layer = model_layer(name, folder)
    values = {key: value for key, value in layer.values.items() if key != "version"}
    try:
        return ModelSpec.model_validate(unflatten(values))
    except ValidationError as error:
        raise config_error(error, Shape(ModelSpec), {key: layer.origin(key) for key in values}) from None


def model_layer(name: str, folder: Path = Path()) -> Layer:
    """As `load_model`: what is said of the model, unchecked, as a layer of its own. Raises ConfigError."""
    if name.startswith(HF_PREFIX):
        spec = load_hf_model(folder / Path(name.removeprefix(HF_PREFIX)).expanduser())
        return Layer(f"model {name}", dict(flatten(spec.model_dump(mode="json", exclude_defaults=True))), folder)
    if (part := find_part("model", name)) is not None:
        return own_layer(name, part.what.values)
    return file_layer(folder / name) if is_path(name) else catalog_layer("models", name)


def own_layer(name: str, values: Mapping[str, Any]) -> Layer:
    """What is said of a model that a plugin registers: that of the one that it is `like`, with its values over it."""
    said = dict(values)
    like = said.pop("like", None)
    base = {} if like is None else {k: v for k, v in model_layer(like).values.items() if k != "version"}
    return Layer(f"model {name}", {**base, **dict(flatten(said)), "name": name, "architecture": name}, Path())
