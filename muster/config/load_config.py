"""Loading of a run's configuration from preset, files and command line, and writing of the result."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from muster.catalog import names
from muster.config.attempt_files import attempt_files
from muster.config.bucket_steps import require_bucket_steps
from muster.config.config_layers import (
    ConfigLayer,
    current_layer,
    looks_like_path,
    read_catalog_layer,
    read_file_layer,
)
from muster.config.file_writer import write_atomically
from muster.config.freezing import freeze_for_adapter
from muster.config.merge import AUTO_FIELDS, MergedConfig, coerce_value, run_schema, unique_plugins
from muster.config.migrations import migrate
from muster.config.optim_config import OptimConfig, UpdateTime
from muster.config.outer_config import OuterConfig
from muster.config.run_config import RunConfig, TrainConfig
from muster.config.run_length import steps_from_epochs, steps_from_tokens
from muster.config.run_paths import with_absolute_paths
from muster.config.step_law import STEP_LAW_SOURCE, derived_value_line, step_law_values
from muster.config.swarm_config import SwarmConfig
from muster.config.yaml_writer import yaml_text
from muster.plugins.loader import plugin_path, resolve_plugin
from muster.plugins.registry import find_component
from muster.spec.adapters import AdapterSpec
from muster.spec.config_errors import ConfigSchema, config_error, error_sentence
from muster.spec.dotted_keys import flatten, unflatten
from muster.spec.errors import ConfigError
from muster.spec.model import ModelSpec
from muster.spec.plan import Plan
from muster.spec.plan_name import format_plan_name

_CHOSEN = tuple(
    f"parallel.{field}."
    for field in (*AUTO_FIELDS, "micro_batch_size", "schedule", "axis_order", "overrides")
    + ("default_strategy.zero", "default_strategy.sp", "default_strategy.recompute")
)
"""Prefixes of keys that `auto` chooses where nobody gives them: AUTO_FIELDS and a few more."""


@dataclass(frozen=True, slots=True)
class ResolvedConfig:
    """A run's configuration, and the origin of each of its values."""

    config: RunConfig
    origins: Mapping[str, str]
    """Origins by dotted key; a value without one is the default."""
    plan_is_auto: bool
    """The degrees of `config.parallel` are still to be chosen, for the number of processes there will be."""


def load_run_config(preset: str | None, file: Path | None, overrides: Sequence[tuple[str, Any]]) -> ResolvedConfig:
    """Load the configuration of a preset, a run file over it, and pairs of dotted key and value over both; values may
    be text.

    Raises ConfigError with one sentence for each error.
    """
    layers: list[ConfigLayer] = []
    if preset is not None:
        layers += _chain(read_catalog_layer("presets", preset), [f"preset {preset}"])
    if file is not None:
        if not file.exists() and str(file) in names("presets"):
            raise ConfigError(f"there is no file {file}; for the preset of that name write --preset {file}")
        layers += _chain(own := read_file_layer(file), [str(file.resolve())])
        if preset is None and not overrides:
            _require_values(own, file, "the sections of a run, such as model, data and train")
    return _resolve([*layers, ConfigLayer("command line", dict(overrides), Path(), is_file=False)])


def _require_values(layer: ConfigLayer, path: Path, expected: str) -> None:
    """Raise ConfigError for a file that says nothing but its version."""
    if all(key == "version" or value is None for key, value in layer.values.items()):
        raise ConfigError(f"{path} has no values: expected {expected}")


def load_config_tree(tree: Mapping[str, Any], name: str) -> ResolvedConfig:
    """Load the configuration from data in a run file's form; `name` is its origin as shown to people.

    Raises ConfigError as `load_run_config`.
    """
    return _resolve(_chain(ConfigLayer(name, dict(flatten(tree)), Path()), [name]))


def _resolve(layers: Iterable[ConfigLayer]) -> ResolvedConfig:
    merged = MergedConfig()
    for layer in layers:
        merged.add(layer)
    merged.resolve_paths()
    _put_steps(merged)
    for path, (value, origin) in step_law_values(merged.values).items():
        merged.put(path, value, origin)
    try:
        config = RunConfig.model_validate(unflatten(merged.values))
    except ValidationError as error:
        raise config_error(error, run_schema(), merged.origins) from None
    files = [part.file for kind, name in config.plugin_components if (part := find_component(kind, name)) and part.file]
    # A listed file keeps its listed hash: in a run's config.yaml, the one of its training.
    named = {plugin_path(plugin.file).resolve() for plugin in config.plugins}
    plugins = unique_plugins([*config.plugins, *(resolve_plugin(str(file)) for file in files if file not in named)])
    return ResolvedConfig(config.model_copy(update={"plugins": plugins}), merged.origins, merged.plan_is_auto)


def _put_steps(merged: MergedConfig) -> None:
    """Set the steps that train.tokens stands for, where they are not given."""
    if (found := steps_from_tokens(merged.values)) is not None and "train.steps" not in merged.values:
        merged.values["train.steps"], merged.origins["train.steps"] = found


def _chain(layer: ConfigLayer, seen: list[str]) -> list[ConfigLayer]:
    """Return the layer and those that it extends, the lowest first."""
    parent = layer.values.get("extends")
    if parent is None:
        return [layer]
    if not isinstance(parent, str):
        raise ConfigError(
            f"extends: expected the path of a run file or the name of a preset, got {parent!r}"
            f" (from {layer.origin('extends')})"
        )
    identity = str((layer.base_dir / parent).resolve()) if looks_like_path(parent) else f"preset {parent}"
    if identity in seen:
        raise ConfigError(f"{layer.origin('extends')}: {layer.name} extends {parent}, which extends it in turn")
    below = (
        read_file_layer(layer.base_dir / parent) if looks_like_path(parent) else read_catalog_layer("presets", parent)
    )
    return [*_chain(below, [*seen, identity]), layer]


def with_steps_from_epochs(resolved: ResolvedConfig, num_samples: int) -> ResolvedConfig:
    """Return the configuration with the steps that `train.epochs` stands for, for data with so many training
    samples."""
    config = resolved.config
    train = resolved.config.train
    assert train.epochs is not None
    steps, origin = steps_from_epochs(train.epochs, num_samples, train.global_batch_size, train.steps)
    config = config.model_copy(update={"train": train.model_copy(update={"steps": steps})})
    return replace(resolved, config=config, origins={**resolved.origins, "train.steps": origin})


def derived_value_lines(resolved: ResolvedConfig) -> list[str]:
    """Return one line for people for each value that was left out and comes from the Step Law."""
    sections = resolved.config.model_dump()
    return [
        derived_value_line(path, sections[section][key], origin)
        for path, origin in resolved.origins.items()
        if origin.startswith(STEP_LAW_SOURCE)
        for section, _, key in [path.partition(".")]
    ]


def load_plan(path: Path) -> Plan:
    """Load the plan in a plan.yaml. Raises ConfigError."""
    layer = read_file_layer(path)
    _require_values(layer, path, "the fields of a plan, such as dp_shard: 4")
    return _plan_in(current_layer("plan", layer))


@dataclass(frozen=True, slots=True)
class PlanInput:
    """A plan that was given as a file, and what a run file says of the step beside it; None where it says nothing."""

    plan: Plan
    model: ModelSpec | None = None
    seq_len: int | None = None
    global_batch_size: int | None = None
    optim: OptimConfig | None = None
    is_auto: bool = False
    """True where the run file leaves the plan to `auto`; `plan` has what it says beside."""
    outer: OuterConfig | None = None
    update_time: UpdateTime = "after_passes"
    """Time at which the host updates parameters."""
    rebalance_experts_every: int = 0
    """Steps between moves of experts; 0: they stay."""
    swarm: SwarmConfig | None = None
    train: TrainConfig | None = None
    """The whole section, with a step, a sequence length and a batch of 1 where the file leaves these out."""
    has_plugins: bool = False


def load_plan_input(path: Path) -> PlanInput:
    """Load a plan.yaml, or the plan and the step of a run file, which may lack data and anything else.

    Raises ConfigError, and InfeasibleError where the run file's optimizer can't take the plan's steps.
    """
    layer = read_file_layer(path)
    if not any(key.partition(".")[0] in _RUN_SECTIONS for key in layer.values):
        return PlanInput(load_plan(path))
    merged = MergedConfig()
    for below in _chain(layer, [str(path.resolve())]):
        merged.add(below)
    merged.resolve_paths()
    _require_known_keys(merged)
    _put_steps(merged)
    for key, (value, origin) in step_law_values(merged.values).items():
        merged.put(key, value, origin)
    train = _section(merged, "train", TrainConfig, {"steps": 1, "seq_len": 1, "global_batch_size": 1})
    model, optim = _section(merged, "model", ModelSpec, {}), _section(merged, "optim", OptimConfig, {"lr": 1.0})
    adapter = _section(merged, "adapter", AdapterSpec, {})
    if adapter is not None and model is not None:
        model = model.model_copy(update={"adapter": adapter})
    if model is not None and model.adapter is not None:
        optim = freeze_for_adapter(optim or OptimConfig(lr=1.0))
    plan = _section(merged, "parallel", Plan, {}) or Plan()
    require_bucket_steps(plan, optim, train)
    return PlanInput(
        plan,
        model,
        train.seq_len if train is not None and "train.seq_len" in merged.values else None,
        train.global_batch_size if train is not None and "train.global_batch_size" in merged.values else None,
        optim,
        merged.plan_is_auto,
        _section(merged, "outer", OuterConfig, {}),
        "after_passes" if train is None else train.update_time,
        0 if train is None else train.rebalance_experts_every,
        _section(merged, "swarm", SwarmConfig, {}),
        train,
        bool(merged.values.get("plugins")),
    )


def _require_known_keys(merged: MergedConfig) -> None:
    """Raise ConfigError for keys that run files don't have, also in sections that a plan doesn't come from."""
    try:
        RunConfig.model_validate(unflatten(merged.values))
    except ValidationError as error:
        unknown = [one for one in error.errors() if one["type"] == "extra_forbidden"]
        if unknown:
            sentences = (error_sentence(one, run_schema(), merged.origins) for one in unknown)
            raise ConfigError("\n".join(sentences)) from None


_RUN_SECTIONS = frozenset(RunConfig.model_fields) - {"version"} | {"extends"}
"""First parts of keys that a run file has, and a plan.yaml has not."""

_Section = TypeVar("_Section", bound=BaseModel)


def _section(merged: MergedConfig, name: str, kind: type[_Section], stand_ins: Mapping[str, object]) -> _Section | None:
    """Return a section of a run file, with stand-ins for what it must have; None where the file says nothing of it."""
    prefix = f"{name}."
    values = {key.removeprefix(prefix): value for key, value in merged.values.items() if key.startswith(prefix)}
    if not values:
        return None
    try:
        return kind.model_validate({**stand_ins, **unflatten(values)})
    except ValidationError as error:
        raise config_error(error, run_schema(), merged.origins, name) from None


def load_outer_config(overrides: Sequence[tuple[str, Any]]) -> OuterConfig | None:
    """Return the outer steps that keys of a run file's section `outer` give on the command line; None for no keys.
    Raises ConfigError, also for keys of other sections."""
    for key, _ in overrides:
        if not key.startswith("outer."):
            raise ConfigError(
                f"--{key} is a key of run files: of these expected only outer.*, such as --outer.every 50; others come"
                " from a run file, --plan FILE"
            )
    merged = MergedConfig()
    merged.add(ConfigLayer("command line", dict(overrides), Path(), is_file=False))
    return _section(merged, "outer", OuterConfig, {})


def _plan_in(layer: ConfigLayer) -> Plan:
    shape = ConfigSchema(Plan)
    values = {key: coerce_value(value, shape.types_at(key)) for key, value in layer.values.items()}
    return _plan_of(values, shape, {key: layer.origin(key) for key in values})


def _plan_of(values: Mapping[str, Any], schema: ConfigSchema, origins: Mapping[str, str]) -> Plan:
    try:
        return Plan.model_validate(unflatten(values))
    except ValidationError as error:
        raise config_error(error, schema, origins) from None


def plan_from_tree(tree: Mapping[str, Any], source: str) -> Plan:
    """Return the plan in a nested tree of any schema, such as a checkpoint's manifest has; `source` names its file.

    Raises ConfigError for a later schema, ValidationError for what is no plan.
    """
    return Plan.model_validate(migrate("plan", tree, source))


def config_yaml(resolved: ResolvedConfig, plan: Plan, within: Path | None = None) -> str:
    """Return a run file with the complete configuration, the plan in it, and the origin of each value.

    Paths are absolute, but for those inside the directory `within`, in which the file will lie. A pinned schedule is in
    it only where it was given: the plan.yaml has the one that was found.
    """
    found = {"pinned_schedule"} if resolved.config.parallel.pinned_schedule is None else None
    config = with_absolute_paths(resolved.config, within)
    tree = config.model_dump(mode="json") | {"parallel": plan.model_dump(mode="json", exclude=found)}

    def origin(path: str) -> str:
        chosen = resolved.plan_is_auto and f"{path}.".startswith(_CHOSEN)
        return resolved.origins.get(path, f"auto, for world size {plan.world_size}" if chosen else "default")

    return yaml_text(tree, origin)


def plan_yaml(plan: Plan) -> str:
    """Return a plan.yaml, headed by the plan's name and hash."""
    return f"# {format_plan_name(plan)}\n# hash {plan.hash}\n{yaml_text(plan.model_dump(mode='json'))}"


def write_run_files(resolved: ResolvedConfig, plan: Plan, run_dir: Path) -> None:
    """Write config.yaml and plan.yaml, which load back to the same values. Raises OSError."""
    run_dir.mkdir(parents=True, exist_ok=True)
    write_atomically(run_dir / "config.yaml", config_yaml(resolved, plan, run_dir))
    write_atomically(run_dir / "plan.yaml", plan_yaml(plan))


def write_attempt_files(resolved: ResolvedConfig, plan: Plan, run_dir: Path, resumes: bool) -> None:
    """Write the configuration and plan of an attempt; those of one that begins a run are also the run's. Raises
    OSError."""
    files = attempt_files(run_dir)
    write_atomically(files.config, config_yaml(resolved, plan, run_dir))
    write_atomically(files.plan, plan_yaml(plan))
    if not resumes:
        write_run_files(resolved, plan, run_dir)
