"""Directories with a model's weights in any format: recognition, metadata, and weights by Muster's names."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from muster.checkpoint.checkpoint_dir import (
    find_latest,
    list_checkpoints,
    named_checkpoint,
    split_average,
)
from muster.checkpoint.formats.dcp import METADATA, DcpTensors
from muster.checkpoint.formats.huggingface import CONFIG_FILE, open_weights
from muster.checkpoint.formats.megatron import (
    TRACKER_FILE,
    is_torch_dist,
    latest_iteration,
    megatron_weight_map,
    read_arguments,
    spec_from_arguments,
)
from muster.checkpoint.formats.native import NativeTensors
from muster.checkpoint.formats.peft import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    base_folder,
    open_adapter_weights,
    read_adapter_config,
)
from muster.checkpoint.formats.safetensors import SafetensorsFiles
from muster.checkpoint.four_bit import DequantizedTensors
from muster.checkpoint.hf_mapping import from_hf, from_weight_map
from muster.checkpoint.manifest import MANIFEST, Manifest
from muster.checkpoint.remapped import JoinedTensors, MeanTensors, RenamedTensors, check_shapes
from muster.checkpoint.tensors import TensorSource
from muster.config.attempt_files import TOKENIZER_FOLDER
from muster.config.migrations import migrate
from muster.config.optimizer_state import EMA_STATE
from muster.interop.hf_config import load_hf_model
from muster.interop.weight_map import hf_shapes
from muster.layout.module_paths import ModulePaths
from muster.plugins.loader import PluginFile, load_plugins
from muster.spec.errors import ConfigError, MusterError
from muster.spec.four_bit import is_four_bit_part, stored_parameters
from muster.spec.model import ModelSpec, parameter_shapes

Format = Literal["muster", "hf", "dcp", "peft"]
"""Formats that can be written."""

AUXILIARY_FOLDER = "huggingface"
"""Folder in a Muster checkpoint for the tokenizer and other files of the Hugging Face directory it came from."""
DCP_SIDECAR = "muster.json"
"""File with step, plan and model in a `torch.distributed.checkpoint` folder that Muster wrote."""

EXPECTED_FORMATS = (
    "expected a run (with config.yaml), a Muster checkpoint (manifest.json), a Hugging Face directory (config.json and"
    " *.safetensors), a PEFT directory (adapter_config.json) or a torch.distributed.checkpoint folder (.metadata), of"
    " Megatron-LM too"
)


@dataclass(frozen=True)
class ModelDirectory:
    """Opened directory with a model's weights."""

    format: str
    """`muster`, `hf`, `dcp`, `peft` or `megatron`."""
    folder: Path
    """Folder of the tensors; for a run, its last undamaged checkpoint."""
    stored: TensorSource
    """Tensors under their stored names."""
    model: ModelSpec | None = None
    step: int | None = None
    plan: Mapping[str, Any] | None = None
    counters: Mapping[str, Any] = field(default_factory=dict)
    manifest: Manifest | None = None
    run: Path | None = None
    """Run directory that a checkpoint belongs to."""
    base: "ModelDirectory | None" = None
    """Directory of the model that a directory of adapters belongs to."""
    average: bool = False
    """True: its weights are the moving averages of those in a Muster checkpoint (`optim.ema_decay`)."""
    paths: ModulePaths = ModulePaths((1,), 1, 1)
    """Paths that the islands of a Muster checkpoint trained."""
    island: int = 0
    """Island whose path its weights are."""


def open_directory(
    path: Path, model: ModelSpec | None = None, report: Callable[[str], None] | None = None
) -> ModelDirectory:
    """Open the directory at `path`. `model` is the model in it, if no file of Muster describes it.

    After `@ema` its weights are the moving averages. `report` receives one sentence for each damaged checkpoint before
    which an older one of the run is taken. Raises ConfigError if its format is unknown or there are none,
    MusterError if it is damaged.
    """
    place, average = split_average(path)
    if average:
        directory = open_directory(place, model, report)
        if not any(_AVERAGE_NAME.fullmatch(name) for name in directory.stored.metas):
            raise ConfigError(
                f"{directory.folder} has no moving average of the weights: optim.ema_decay keeps one in training"
            )
        return replace(directory, average=True)
    path = named_checkpoint(path)
    if not path.is_dir():
        raise ConfigError(f"there is no directory {path}: {EXPECTED_FORMATS}")
    if (path / MANIFEST).exists():
        return _open_native(path, model)
    if (path / "config.yaml").exists() or list_checkpoints(path):
        return _open_native(_latest_of_run(path, report), model)
    if (path / TRACKER_FILE).exists():
        path = latest_iteration(path)
    if (path / METADATA).exists():
        return _open_megatron(path, model) if is_torch_dist(path) else _open_dcp(path, model)
    if (path / ADAPTER_CONFIG).exists():
        return _open_peft(path, model)
    if (path / CONFIG_FILE).exists():
        return ModelDirectory(format="hf", folder=path, stored=open_weights(path), model=model or load_hf_model(path))
    raise ConfigError(f"{path} is a directory of an unknown format: {EXPECTED_FORMATS}")


def auxiliary_folder(directory: ModelDirectory) -> Path | None:
    """Return the folder with the tokenizer and other files of a Hugging Face directory; None if there is none."""
    if directory.format == "hf":
        return directory.folder
    if directory.base is not None:
        return auxiliary_folder(directory.base)
    places = [directory.folder / AUXILIARY_FOLDER]
    if directory.run is not None:
        places.append(directory.run / TOKENIZER_FOLDER)
    return next((place for place in places if place.is_dir()), None)


def model_weights(directory: ModelDirectory) -> TensorSource:
    """Return the model's parameters by the names of `muster.spec.model.parameter_shapes`, those in 4 bits in float32.

    Raises ConfigError if the model is unknown, MusterError if a parameter is missing or has another shape.
    """
    weights = held_weights(directory)
    holds_four_bits = any(map(is_four_bit_part, weights.metas))
    return DequantizedTensors(weights, directory.model) if holds_four_bits and directory.model else weights


def held_weights(directory: ModelDirectory) -> TensorSource:
    """Return the model's parameters as the directory holds them, some by their parts in 4 bits.

    Raises as `model_weights` does.
    """
    spec = directory.model
    if spec is None:
        raise ConfigError(f"{directory.folder} doesn't describe its model: give --model, such as --model tiny")
    if directory.format == "hf":
        kind = read_json(directory.folder / CONFIG_FILE).get("model_type")
        return from_hf(directory.stored, spec, directory.folder, kind)
    if directory.base is not None:
        base = replace(directory.base, model=spec.model_copy(update={"adapter": None}))
        return JoinedTensors((model_weights(base), open_adapter_weights(directory.folder, spec)))
    if directory.format == "megatron":
        stacked = not any(name.startswith("decoder.layers.0.") for name in directory.stored.metas)
        links = list(megatron_weight_map(spec, stacked))
        check_shapes(directory.stored, hf_shapes(links), directory.folder)
        return from_weight_map(directory.stored, spec, links)
    prefix, shapes = _PARAMETER_PREFIX[directory.format], dict(stored_parameters(spec, parameter_shapes(spec)))
    names = {name: prefix + name for name in shapes}
    modules = {name: directory.paths.module_of(directory.island, name) for name in shapes}
    names |= {name: f"modules/{module}/{names[name]}" for name, module in modules.items() if module}
    check_shapes(directory.stored, {names[name]: shape for name, shape in shapes.items()}, directory.folder)
    if not directory.average:
        return RenamedTensors(directory.stored, names)
    averages = {
        name: [stored for stored in _averages_of(directory, name) if stored in directory.stored.metas]
        for name in shapes
    }
    # Frozen parameters have no average: they are their own.
    return MeanTensors(directory.stored, {name: averages[name] or [names[name]] for name in shapes})


def _averages_of(directory: ModelDirectory, name: str) -> list[str]:
    """Return the stored averages of a parameter: those of all islands that trained the same module."""
    paths, own = directory.paths, f"optim/{name}{_AVERAGE_SUFFIX}"
    return [own] if paths.islands == 1 else [f"islands/{n}/{own}" for n in paths.members(directory.island, name)]


def state_tensors(directory: ModelDirectory) -> TensorSource:
    """Return all tensors of a directory by their names in a Muster checkpoint: `model/…` and, if present, `optim/…`.

    Raises as `model_weights` does.
    """
    if directory.format == "muster" and not directory.average:
        return directory.stored
    weights = model_weights(directory)
    if directory.format == "dcp":
        names = {
            f"{group}/{rest}": name for name in directory.stored.metas for group, rest in [_split_group(name)] if group
        }
        return RenamedTensors(directory.stored, names)
    return RenamedTensors(weights, {f"model/{name}": name for name in weights.metas})


_AVERAGE_SUFFIX = f".{EMA_STATE}"
_AVERAGE_NAME = re.compile(rf"(islands/\d+/)?optim/.*{re.escape(_AVERAGE_SUFFIX)}")
_PARAMETER_PREFIX = {"muster": "model/", "dcp": "model."}
"""Prefix of a parameter's stored name, by format."""


def _split_group(name: str) -> tuple[str, str]:
    """Split `optim.layers.0.…` into (`optim`, `layers.0.…`); without `model` or `optim` the group is empty."""
    group, _, rest = name.partition(".")
    return (group, rest) if group in ("model", "optim") else ("", name)


def _latest_of_run(path: Path, report: Callable[[str], None] | None) -> Path:
    root = path if list_checkpoints(path) else path / "checkpoints"
    problems: list[str] = []
    if (folder := find_latest(root, problems.append)) is not None:
        if report is not None:
            for problem in problems:
                report(problem)
        return folder
    if problems:
        raise MusterError(f"{path} has no readable checkpoint: {'; '.join(problems)}")
    raise ConfigError(f"{path} has no complete checkpoint yet: train to the end or to train.save_every")


def _open_native(folder: Path, model: ModelSpec | None) -> ModelDirectory:
    stored = NativeTensors(folder)
    manifest = stored.manifest
    run = folder.resolve().parent.parent
    load_plugins(PluginFile.model_validate(plugin) for plugin in manifest.run.get("plugins") or ())
    return ModelDirectory(
        format="muster",
        folder=folder,
        stored=stored,
        model=_checked_model(model, manifest.model, folder / MANIFEST),
        step=manifest.step,
        plan=_current_plan(manifest.plan, folder / MANIFEST),
        counters=manifest.counters,
        manifest=manifest,
        run=run if (run / "config.yaml").exists() else None,
        paths=_paths_of(manifest),
    )


def _paths_of(manifest: Manifest) -> ModulePaths:
    """Return the paths through the modules that a checkpoint holds."""
    islands, outer = manifest.plan.get("islands", 1), manifest.run.get("outer") or {}
    modules = tuple(outer.get("modules", (1,))) if islands > 1 else (1,)
    return ModulePaths(modules, islands, manifest.model.get("num_layers", 1))


def _open_peft(folder: Path, model: ModelSpec | None) -> ModelDirectory:
    adapter, place = read_adapter_config(folder)
    base = open_directory(base_folder(folder, place), model)
    if base.model is None:
        raise ConfigError(f"{base.folder} doesn't describe the model of the adapters in {folder}: give --model")
    try:
        spec = ModelSpec.model_validate({**base.model.model_dump(), "adapter": adapter})
    except ValidationError as error:
        raise ConfigError(f"{folder}: {error.errors()[0]['msg'].removeprefix('Value error, ')}") from error
    stored = SafetensorsFiles([folder / ADAPTER_WEIGHTS])
    return ModelDirectory(format="peft", folder=folder, stored=stored, model=spec, base=base)


def _open_dcp(folder: Path, model: ModelSpec | None) -> ModelDirectory:
    about = read_json(folder / DCP_SIDECAR) if (folder / DCP_SIDECAR).exists() else {}
    return ModelDirectory(
        format="dcp",
        folder=folder,
        stored=DcpTensors(folder),
        model=_checked_model(model, about["model"], folder / DCP_SIDECAR) if "model" in about else model,
        step=about.get("step"),
        plan=_current_plan(about.get("plan"), folder / DCP_SIDECAR),
        counters=about.get("counters", {}),
    )


def _current_plan(plan: Mapping[str, Any] | None, path: Path) -> Mapping[str, Any] | None:
    """Return a stored plan in today's names."""
    return migrate("plan", plan, str(path)) if plan else plan


def _open_megatron(folder: Path, model: ModelSpec | None) -> ModelDirectory:
    arguments = read_arguments(folder)
    if model is None and arguments:
        model = spec_from_arguments(arguments, folder)
    return ModelDirectory(
        format="megatron", folder=folder, stored=DcpTensors(folder), model=model, step=arguments.get("iteration")
    )


def _checked_model(model: ModelSpec | None, stored: Mapping[str, Any], path: Path) -> ModelSpec:
    """Return the model that a file describes. Raises ConfigError if `model` is another one."""
    found = parse_model_spec(stored, path)
    if model is not None and model.model_copy(update={"name": found.name}) != found:
        raise ConfigError(f"{path} describes the model {found.name}, but --model is another one: leave --model out")
    return found


def parse_model_spec(fields: Mapping[str, Any], path: Path) -> ModelSpec:
    """Return the model that a file describes. Raises MusterError."""
    try:
        return ModelSpec.model_validate(fields)
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(map(str, problem["loc"]))
        raise MusterError(f"{path} is damaged: model.{where}: {problem['msg'].lower()}") from error


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file. Raises MusterError."""
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise MusterError(f"could not read {path}: {error.strerror}") from error
    except ValueError as error:
        raise MusterError(f"{path} is damaged: it is not JSON") from error
    if not isinstance(content, dict):
        raise MusterError(f"{path} is damaged: expected an object in JSON")
    return content
