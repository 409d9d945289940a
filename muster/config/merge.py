"""Merging of a run file's layers: a value of a later layer replaces those of earlier ones."""

from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from muster.config.config_layers import ConfigLayer, current_layer, looks_like_path, read_file_layer
from muster.config.named_model import read_model_layer
from muster.config.run_config import RunConfig
from muster.config.run_paths import PATH_KEYS, resolve_path_value
from muster.plugins.loader import PluginFile, load_plugins, resolve_plugin
from muster.spec.config_errors import ConfigSchema, config_error
from muster.spec.dotted_keys import flatten
from muster.spec.errors import ConfigError
from muster.spec.mesh_axes import DEGREE_FIELDS
from muster.spec.plan import Plan
from muster.spec.plan_name import parse_plan_name

AUTO_FIELDS = (*DEGREE_FIELDS, "vpp", "stages")
"""Plan fields that `auto` chooses."""

_KEPT = ("micro_batch_size", "precision")
"""Plan fields taken from the layers below when a plan's name or file leaves them out."""

_INSTEAD = {
    "train.steps": ("train.tokens", "train.epochs"),
    "train.tokens": ("train.steps", "train.epochs"),
    "train.epochs": ("train.steps", "train.tokens"),
    "data.blend": ("data.source",),
    "data.source": ("data.blend", "data.weight_schedule"),
}
"""Keys that replace others of lower layers."""


class MergedConfig:
    """Values of all layers so far, later ones on top."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.origins: dict[str, str] = {}
        self.base_dirs: dict[str, Path] = {}
        """Directory that the path under a key begins at."""
        self.plan_is_auto = True

    def add(self, layer: ConfigLayer) -> None:
        """Add a layer on top. Raises ConfigError."""
        base_dir = layer.data_base_dir
        layer = current_layer("run", layer)
        given = {path: value for path, value in layer.values.items() if path != "extends"}
        if (
            named := given.pop("plugins", None)
        ) is not None:  # first, as they may register components that the layer names
            self._add_plugins(named, layer)
        for key in ("model", "model.preset"):
            if isinstance(name := given.get(key), str):
                del given[key]
                self._replace_model(name, layer.base_dir, layer.origin(key))
        for key in ("parallel", "parallel.plan"):
            if isinstance(text := given.get(key), str):
                del given[key]
                self._replace_plan(text, layer.base_dir, layer.origin(key))
                if text == "auto" and (chosen := [path for path in given if _is_degree(path)]):
                    raise ConfigError(
                        f"{chosen[0]}: 'auto' chooses it; give a plan's name instead of auto, such as dp2-pp2"
                        f" (from {layer.origin(chosen[0])})"
                    )
        for path, others in _INSTEAD.items():
            if given.get(path):
                for other in others:
                    self._drop(other)
        for path, value in given.items():
            if value is None and run_schema().keys_of(run_schema().schema_at(path) or {}):
                continue  # a section without any keys
            self.plan_is_auto = self.plan_is_auto and not _is_degree(path)
            self.put(path, value, layer.origin(path))
            self.base_dirs[path] = base_dir

    def resolve_paths(self) -> None:
        """Turn each path into one as seen from the working directory; all plugins must be loaded, since a name of
        theirs is no path."""
        for key in PATH_KEYS:
            if key in self.values:
                self.values[key] = resolve_path_value(key, self.values[key], self.base_dirs.get(key, Path()))

    def _add_plugins(self, named: object, layer: ConfigLayer) -> None:
        try:
            found = [
                resolve_plugin(one, layer.base_dir) for one in (named if isinstance(named, list | tuple) else [named])
            ]
            load_plugins(found)
        except ConfigError as error:
            raise ConfigError(f"{error} (from {layer.origin('plugins')})") from None
        plugins = [PluginFile(**one) for one in self.values.get("plugins", [])]
        self.values["plugins"] = [one.model_dump() for one in unique_plugins([*plugins, *found])]
        self.origins["plugins"] = layer.origin("plugins")

    def put(self, path: str, value: object, origin: str) -> None:
        """Set a value in place of those above and below it."""
        for known in list(self.values):
            if known.startswith(path + ".") or path.startswith(known + "."):
                del self.values[known], self.origins[known]
        if isinstance(value, str) and path.startswith("optim.options."):
            value = yaml.safe_load(value)
        self.values[path] = coerce_value(value, run_schema().types_at(path))
        self.origins[path] = origin

    def _drop(self, section: str) -> None:
        for path in [path for path in self.values if path == section or path.startswith(section + ".")]:
            del self.values[path], self.origins[path]

    def _replace_model(self, name: str, folder: Path, origin: str) -> None:
        try:
            layer = read_model_layer(name, folder)
        except ConfigError as error:
            raise ConfigError(f"model: {error} (from {origin})") from None
        self._drop("model")
        for path, value in layer.values.items():
            if path != "version":
                self.put(f"model.{path}", value, layer.name)

    def _replace_plan(self, text: str, folder: Path, origin: str) -> None:
        """Replace the plan so far by the one that a name, a path or `auto` stands for."""
        paths = {field: f"parallel.{field}" for field in _KEPT}
        kept = {field: (self.values[path], self.origins[path]) for field, path in paths.items() if path in self.values}
        given: dict[str, tuple[Any, str]] = {}
        if looks_like_path(text):
            layer = current_layer("plan", read_file_layer(folder / text))
            given = {field: (value, layer.origin(field)) for field, value in layer.values.items()}
        elif text != "auto":
            given = {field: (value, origin) for field, value in self._named(text, origin).items()}
            given |= {field: old for field, old in kept.items() if given[field][0] == old[0]}
        self._drop("parallel")
        self.plan_is_auto = text == "auto"
        for field, (value, source) in (kept | given).items():
            self.put(f"parallel.{field}", value, source)

    def _named(self, name: str, origin: str) -> dict[str, Any]:
        base = {field: self.values[f"parallel.{field}"] for field in _KEPT if f"parallel.{field}" in self.values}
        try:
            return dict(flatten(parse_plan_name(name, Plan.model_validate(base)).model_dump(mode="json")))
        except ValidationError as error:
            raise config_error(error, run_schema(), self.origins, "parallel") from None
        except ConfigError as error:
            raise ConfigError(f"parallel: {error} (from {origin})") from None


def _is_degree(path: str) -> bool:
    section, _, rest = path.partition(".")
    return section == "parallel" and rest.partition(".")[0] in AUTO_FIELDS


@cache
def run_schema() -> ConfigSchema:
    """Return the schema of run files."""
    return ConfigSchema(RunConfig)


def coerce_value(value: object, kinds: set[str]) -> object:
    """Return the value that a text stands for where text isn't expected: YAML reads `1e-3` as text, and a command line
    has nothing else. A truth value where a number is expected stays a word, which no number is."""
    if isinstance(value, str) and value == "null" and "null" in kinds:
        return None
    if isinstance(value, bool) and kinds & {"integer", "number"} and "boolean" not in kinds:
        return str(value).lower()  # Python would count true as 1
    if isinstance(value, str) and kinds & {"integer", "number"}:
        value = _number(value, whole="integer" in kinds)
    if isinstance(value, str) and "array" in kinds:
        try:
            return yaml.safe_load(value)
        except yaml.YAMLError:
            return value
    if isinstance(value, float) and "integer" in kinds and value.is_integer():
        return int(value)
    return value


def _number(text: str, whole: bool) -> int | float | str:
    for convert in (int, float) if whole else (float,):
        try:
            return convert(text)
        except ValueError:
            pass
    return text


def unique_plugins(plugins: Iterable[PluginFile]) -> tuple[PluginFile, ...]:
    """Return each plugin file once, with the hash that was given last."""
    return tuple({plugin.file: plugin for plugin in plugins}.values())
