"""Models by the names that people give: of a preset, a directory, a file."""

from pathlib import Path

from pydantic import ValidationError

from muster.catalog import names
from muster.spec.errors import ConfigError
from muster.spec.layers import Layer, catalog_layer, file_layer, unflatten
from muster.spec.model import ModelSpec
from muster.spec.suggest import did_you_mean


def load_model(text: str) -> ModelSpec:
    """The model that `text` names: a preset of the catalogue, or a YAML file with the keys of `ModelSpec`.

    Raises ConfigError with the nearest name.
    """
    if text in names("models"):
        return _model(catalog_layer("models", text))
    path = Path(text)
    if path.suffix in (".yaml", ".yml"):
        return _model(file_layer(path))
    known = names("models")
    raise ConfigError(
        f"there is no model '{text}'{did_you_mean(text, known)} (give a file, or one of {', '.join(known)})"
    )


def _model(layer: Layer) -> ModelSpec:
    values = {key: value for key, value in layer.values.items() if key != "version"}
    try:
        return ModelSpec.model_validate(unflatten(values))
    except ValidationError as error:
        from muster.spec.explain import Shape, config_error

        origins = {key: layer.origin(key) for key in values}
        raise config_error(error, Shape(ModelSpec), origins) from None
