"""Loads a run's configuration from preset, files and command line, and writes what came of it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from muster.catalog import names
from muster.spec.errors import ConfigError
from muster.spec.explain import Shape, config_error
from muster.spec.layers import Layer, catalog_layer, file_layer, flatten, is_path, unflatten
from muster.spec.length import steps_of_epochs, steps_said
from muster.spec.merge import DEGREES, Merged, coerce, once, run_shape
from muster.spec.parts import find_part
from muster.spec.plan import Plan
from muster.spec.plan_name import format_plan_name
from muster.spec.plugins import path_of, plugin_of
from muster.spec.run import RunConfig
from muster.spec.step_law import SOURCE, derived_line, step_law_values
from muster.spec.write import replace_text, yaml_text

_CHOSEN = tuple(
    f"parallel.{field}."
    for field in (*DEGREES, "micro_batch_size", "schedule", "axis_order", "overrides")
    + ("default_strategy.zero", "default_strategy.sp", "default_strategy.recompute")
)
"""DEGREES, and what else `auto` chooses where nobody said it: beginnings of paths."""


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
    merged = Merged()
    for layer in layers:
        merged.add(layer)
    _put_steps(merged)
    for path, (value, origin) in step_law_values(merged.values).items():
        merged.put(path, value, origin)
    try:
        config = RunConfig.model_validate(unflatten(merged.values))
    except ValidationError as error:
        raise config_error(error, run_shape(), merged.origins) from None
    files = [part.file for kind, name in config.own_parts if (part := find_part(kind, name)) and part.file]
    # A file that is named keeps the hash that is said of it: in a run's config.yaml, that of when it was trained.
    named = {path_of(plugin.file).resolve() for plugin in config.plugins}
    plugins = once([*config.plugins, *(plugin_of(str(file)) for file in files if file not in named)])
    return Resolved(config.model_copy(update={"plugins": plugins}), merged.origins, merged.auto)


def _put_steps(merged: Merged) -> None:
    """The steps that train.tokens stands for, where they are not given."""
    if (found := steps_said(merged.values)) is not None and "train.steps" not in merged.values:
        merged.values["train.steps"], merged.origins["train.steps"] = found


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
    values = {key: coerce(value, shape.kinds(key)) for key, value in layer.values.items()}
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
