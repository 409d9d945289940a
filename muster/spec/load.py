"""Loads a run's configuration from preset, files and command line, and writes what came of it."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from muster.catalog import names
from muster.spec.errors import ConfigError
from muster.spec.explain import Shape, config_error
from muster.spec.layers import Layer, catalog_layer, file_layer, flatten, is_path, unflatten
from muster.spec.length import steps_of_epochs, steps_said
from muster.spec.named_model import model_layer
from muster.spec.parts import find_part
from muster.spec.plan import Plan
from muster.spec.plan_name import format_plan_name, parse_plan_name
from muster.spec.plugins import Plugin, import_plugins, path_of, plugin_of
from muster.spec.run import RunConfig
from muster.spec.step_law import SOURCE, derived_line, step_law_values
from muster.spec.write import replace_text, yaml_text

DEGREES = ("dp_replicate", "dp_shard", "tp", "pp", "vpp", "cp", "ep", "etp", "stages")
"""The fields of a plan that `auto` chooses."""

_CHOSEN = tuple(
    f"parallel.{field}."
    for field in (*DEGREES, "micro_batch_size", "schedule", "axis_order", "overrides")
    + ("default_strategy.zero", "default_strategy.sp", "default_strategy.recompute")
)
"""The same, and what it chooses where nobody said it: beginnings of paths."""

_KEPT = ("micro_batch_size", "precision")
"""The fields that a plan takes over from the layers below when its name or file doesn't say them."""


@dataclass(frozen=True, slots=True)
class Resolved:
    """A run's configuration, and where each of its values comes from."""

    config: RunConfig
    origins: Mapping[str, str]
    """By dotted path; a value without an origin is the default."""
    auto: bool
    """The degrees of `config.parallel` are still to be chosen, for the number of processes there will be."""


def load_run(preset: str | None, file: Path | None, overrides: Sequence[tuple[str, Any]]) -> Resolved:
    """The configuration that a preset, a run file over it, and pairs of dotted key and value over both give; a value
    may be text.

    Raises ConfigError with one sentence for each thing that is wrong.
    """
    layers: list[Layer] = []
    if preset is not None:
        layers += _chain(catalog_layer("presets", preset), [f"preset {preset}"])
    if file is not None:
        if not file.exists() and str(file) in names("presets"):
            raise ConfigError(f"there is no file {file}; for the preset of that name write --preset {file}")
        layers += _chain(file_layer(file), [str(file.resolve())])
    return _resolve([*layers, Layer("command line", dict(overrides), Path())])


def load_tree(tree: Mapping[str, Any], name: str) -> Resolved:
    """The configuration in data of a run file's form; `name` is what people are told that it comes from.

    Raises ConfigError as `load_run`.
    """
    return _resolve(_chain(Layer(name, dict(flatten(tree)), Path()), [name]))


def _resolve(layers: Iterable[Layer]) -> Resolved:
    merged = _Merged()
    for layer in layers:
        merged.add(layer)
    _put_steps(merged)
    for path, (value, origin) in step_law_values(merged.values).items():
        merged._put(path, value, origin)
    try:
        config = RunConfig.model_validate(unflatten(merged.values))
    except ValidationError as error:
        raise config_error(error, _shape(), merged.origins) from None
    files = [part.file for kind, name in config.own_parts if (part := find_part(kind, name)) and part.file]
    # A file that is named keeps the hash that is said of it: in a run's config.yaml, that of when it was trained.
    named = {path_of(plugin.file).resolve() for plugin in config.plugins}
    plugins = _once([*config.plugins, *(plugin_of(str(file)) for file in files if file not in named)])
    return Resolved(config.model_copy(update={"plugins": plugins}), merged.origins, merged.auto)


def _once(plugins: Iterable[Plugin]) -> tuple[Plugin, ...]:
    """Each file once, with the hash that was said last."""
    return tuple({plugin.file: plugin for plugin in plugins}.values())


def with_steps(resolved: Resolved, num_samples: int) -> Resolved:
    """The same with the steps that `train.epochs` stands for, of data with so many training samples."""
    config, train = resolved.config, resolved.config.train
    assert train.epochs is not None
    steps, origin = steps_of_epochs(train.epochs, num_samples, train.global_batch_size, train.steps)
    config = config.model_copy(update={"train": train.model_copy(update={"steps": steps})})
    return replace(resolved, config=config, origins={**resolved.origins, "train.steps": origin})


def derived_lines(resolved: Resolved) -> list[str]:
    """One line for people for each value that was left out and comes from the Step Law."""
    sections = resolved.config.model_dump()
    return [
        derived_line(path, sections[section][key], origin)
        for path, origin in resolved.origins.items()
        if origin.startswith(SOURCE)
        for section, _, key in [path.partition(".")]
    ]


def load_plan(path: Path) -> Plan:
    """The plan in a plan.yaml. Raises ConfigError."""
    layer, shape = file_layer(path), Shape(Plan)
    values = {key: _coerce(value, shape.kinds(key)) for key, value in layer.values.items()}
    try:
        return Plan.model_validate(unflatten(values))
    except ValidationError as error:
        raise config_error(error, shape, {key: layer.origin(key) for key in values}) from None


def config_text(resolved: Resolved, plan: Plan) -> str:
    """A run file that says all of the configuration, the plan in it, and where each value comes from.

    The order of a searched schedule stands in it only where it was given: the plan.yaml has what was found.
    """
    found = {"order"} if resolved.config.parallel.order is None else None
    tree = resolved.config.model_dump(mode="json") | {"parallel": plan.model_dump(mode="json", exclude=found)}

    def origin(path: str) -> str:
        chosen = resolved.auto and f"{path}.".startswith(_CHOSEN)
        return resolved.origins.get(path, f"auto, for world size {plan.world_size}" if chosen else "default")

    return yaml_text(tree, origin)


def plan_text(plan: Plan) -> str:
    """A plan.yaml, headed by the plan's name and hash."""
    return f"# {format_plan_name(plan)}\n# hash {plan.hash}\n{yaml_text(plan.model_dump(mode='json'))}"


def write_resolved(resolved: Resolved, plan: Plan, run_dir: Path) -> None:
    """Writes config.yaml and plan.yaml, which load back to the same values. Raises OSError."""
    run_dir.mkdir(parents=True, exist_ok=True)
    replace_text(run_dir / "config.yaml", config_text(resolved, plan))
    replace_text(run_dir / "plan.yaml", plan_text(plan))


# ----------------------------------------------------------------------------------------------------------------------
# Layers


_INSTEAD = {
    "train.steps": ("train.tokens", "train.epochs"),
    "train.tokens": ("train.steps", "train.epochs"),
    "train.epochs": ("train.steps", "train.tokens"),
    "data.mix": ("data.source",),
    "data.source": ("data.mix", "data.changes"),
}
"""Keys that stand in the place of others from lower layers."""


_RENAMED = {"train.eval_every": "eval.every", "train.eval_batches": "eval.batches"}
"""Keys that had other names: a file that has them is read, with a word."""


def _put_steps(merged: "_Merged") -> None:
    """The steps that train.tokens stands for, where they are not given."""
    if (found := steps_said(merged.values)) is not None and "train.steps" not in merged.values:
        merged.values["train.steps"], merged.origins["train.steps"] = found


class _Merged:
    """The values of all layers so far, the later ones on top."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.origins: dict[str, str] = {}
        self.auto = True

    def add(self, layer: Layer) -> None:
        said = {_RENAMED.get(path, path): value for path, value in layer.values.items() if path != "extends"}
        for path in layer.values.keys() & _RENAMED.keys():
            print(f"{path} (from {layer.origin(path)}) is {_RENAMED[path]} now: read as that", file=sys.stderr)
        if (named := said.pop("plugins", None)) is not None:  # first, as they may register what the layer names
            self._add_plugins(named, layer)
        for key in ("model", "model.preset"):
            if isinstance(name := said.get(key), str):
                del said[key]
                self._replace_model(name, layer.folder, layer.origin(key))
        for key in ("parallel", "parallel.plan"):
            if isinstance(text := said.get(key), str):
                del said[key]
                self._replace_plan(text, layer.folder, layer.origin(key))
                if text == "auto" and (chosen := [path for path in said if _is_degree(path)]):
                    raise ConfigError(
                        f"{chosen[0]}: 'auto' chooses it; instead of auto give a plan's name, such as dp2-pp2"
                        f" (from {layer.origin(chosen[0])})"
                    )
        for path, others in _INSTEAD.items():
            if said.get(path):
                for other in others:
                    self._drop(other)
        for path, value in said.items():
            if value is None and _shape().keys(_shape().at(path) or {}):
                continue  # a section without a line in it
            self.auto = self.auto and not _is_degree(path)
            self._put(path, value, layer.origin(path))

    def _add_plugins(self, named: object, layer: Layer) -> None:
        try:
            found = [plugin_of(one, layer.folder) for one in (named if isinstance(named, list | tuple) else [named])]
            import_plugins(found)
        except ConfigError as error:
            raise ConfigError(f"{error} (from {layer.origin('plugins')})") from None
        plugins = [Plugin(**one) for one in self.values.get("plugins", [])]
        self.values["plugins"] = [one.model_dump() for one in _once([*plugins, *found])]
        self.origins["plugins"] = layer.origin("plugins")

    def _put(self, path: str, value: object, origin: str) -> None:
        for known in list(self.values):
            if known.startswith(path + ".") or path.startswith(known + "."):
                del self.values[known], self.origins[known]
        if isinstance(value, str) and path.startswith("optim.options."):
            value = yaml.safe_load(value)
        self.values[path] = _coerce(value, _shape().kinds(path))
        self.origins[path] = origin

    def _drop(self, section: str) -> None:
        for path in [path for path in self.values if path == section or path.startswith(section + ".")]:
            del self.values[path], self.origins[path]

    def _replace_model(self, name: str, folder: Path, origin: str) -> None:
        try:
            layer = model_layer(name, folder)
        except ConfigError as error:
            raise ConfigError(f"model: {error} (from {origin})") from None
        self._drop("model")
        for path, value in layer.values.items():
            if path != "version":
                self._put(f"model.{path}", value, layer.name)

    def _replace_plan(self, text: str, folder: Path, origin: str) -> None:
        """Puts the plan that a name, a path or `auto` stands for in the place of the one so far."""
        paths = {field: f"parallel.{field}" for field in _KEPT}
        kept = {field: (self.values[path], self.origins[path]) for field, path in paths.items() if path in self.values}
        said: dict[str, tuple[Any, str]] = {}
        if is_path(text):
            layer = file_layer(folder / text)
            said = {field: (value, layer.origin(field)) for field, value in layer.values.items()}
        elif text != "auto":
            said = {field: (value, origin) for field, value in self._named(text, origin).items()}
            said |= {field: old for field, old in kept.items() if said[field][0] == old[0]}
        self._drop("parallel")
        self.auto = text == "auto"
        for field, (value, source) in (kept | said).items():
            self._put(f"parallel.{field}", value, source)

    def _named(self, name: str, origin: str) -> dict[str, Any]:
        base = {field: self.values[f"parallel.{field}"] for field in _KEPT if f"parallel.{field}" in self.values}
        try:
            return dict(flatten(parse_plan_name(name, Plan.model_validate(base)).model_dump(mode="json")))
        except ValidationError as error:
            raise config_error(error, _shape(), self.origins, "parallel") from None
        except ConfigError as error:
            raise ConfigError(f"parallel: {error} (from {origin})") from None


def _chain(layer: Layer, seen: list[str]) -> list[Layer]:
    """The layer and those that it extends, the lowest first."""
    parent = layer.values.get("extends")
    if parent is None:
        return [layer]
    if not isinstance(parent, str):
        raise ConfigError(
            f"extends: expected the path of a run file or the name of a preset, got {parent!r}"
            f" (from {layer.origin('extends')})"
        )
    identity = str((layer.folder / parent).resolve()) if is_path(parent) else f"preset {parent}"
    if identity in seen:
        raise ConfigError(f"{layer.origin('extends')}: {layer.name} extends {parent}, which extends it: a circle")
    below = file_layer(layer.folder / parent) if is_path(parent) else catalog_layer("presets", parent)
    return [*_chain(below, [*seen, identity]), layer]


def _is_degree(path: str) -> bool:
    section, _, rest = path.partition(".")
    return section == "parallel" and rest.partition(".")[0] in DEGREES


@cache
def _shape() -> Shape:
    return Shape(RunConfig)


def _coerce(value: object, kinds: set[str]) -> object:
    """What a text stands for where no text is wanted: YAML reads `1e-3` as one, and a command line has nothing else."""
    if isinstance(value, str) and value == "null" and "null" in kinds:
        return None
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
