"""A model by its name: one of the catalogue, a Hugging Face directory, or a file."""

from pathlib import Path

from pydantic import ValidationError

from muster.spec.explain import Shape, config_error
from muster.spec.hf_config import load_hf_model
from muster.spec.layers import Layer, catalog_layer, file_layer, flatten, is_path, unflatten
from muster.spec.model import ModelSpec

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
    return file_layer(folder / name) if is_path(name) else catalog_layer("models", name)
