"""Directories of adapters as PEFT writes them: adapter_config.json and adapter_model.safetensors
(github:huggingface/peft, docs/source/developer_guides/checkpoint.md)."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from muster.checkpoint.formats.huggingface import write_json
from muster.checkpoint.formats.safetensors import SafetensorsFiles
from muster.checkpoint.remapped import RenamedTensors, check_shapes
from muster.checkpoint.tensors import TensorSource
from muster.interop.weight_map import weight_map
from muster.spec.adapters import MAGNITUDE, AdapterSpec, adapted_module, is_adapter
from muster.spec.errors import ConfigError, InfeasibleError, MusterError
from muster.spec.model import ModelSpec, parameter_shapes

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_ABSENT = {
    "bias": "none",
    "fan_in_fan_out": False,
    "modules_to_save": None,
    "layers_to_transform": None,
    "layers_pattern": None,
    "rank_pattern": {},
    "alpha_pattern": {},
    "lora_bias": False,
    "trainable_token_indices": None,
    "target_parameters": None,
}
"""Keys of PEFT's LoraConfig that may only have this value, or an empty one."""


def read_adapter_config(folder: Path) -> tuple[AdapterSpec, str | None]:
    """Return the adapters that a directory describes, and where their base model is.

    Raises MusterError if the file is damaged, ConfigError for adapters that Muster doesn't know.
    """
    path = folder / ADAPTER_CONFIG
    try:
        found = json.loads(path.read_bytes())
        kind, targets = found["peft_type"], found["target_modules"]
        given = {key: found[key] for key in ("r", "lora_alpha", "use_rslora") if key in found}
        given["kind"] = "dora" if found.get("use_dora") else "lora"
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise MusterError(f"{path} is damaged: expected PEFT's configuration in JSON") from error
    if kind != "LORA":
        raise ConfigError(f"{path}: adapters of the kind {kind} aren't known, expected LORA")
    for key, value in _ABSENT.items():
        if found.get(key) not in (value, None, False, [], {}):
            raise ConfigError(f"{path}: {key} {found[key]} isn't known to Muster, expected {json.dumps(value)}")
    try:
        return AdapterSpec(**given, target_modules=targets), found.get("base_model_name_or_path")
    except ValidationError as error:
        problem = error.errors()[0]
        raise ConfigError(f"{path}: {'.'.join(map(str, problem['loc']))}: {problem['msg']}") from error


def base_folder(folder: Path, place: str | None) -> Path:
    """Return the directory of the base model. Raises ConfigError where there is none."""
    places = [] if place is None else [Path(place), folder / place]
    if (found := next((one for one in (*places, folder / "base") if one.is_dir()), None)) is not None:
        return found
    raise ConfigError(
        f"{folder} has adapters of the model {place}, which is no directory here: download it, and set"
        f" base_model_name_or_path in {ADAPTER_CONFIG} to its path"
    )


def open_adapter_weights(folder: Path, spec: ModelSpec) -> TensorSource:
    """Return the adapters' parameters by Muster's names. Raises MusterError where some are missing or damaged."""
    if not (folder / ADAPTER_WEIGHTS).is_file():
        raise MusterError(f"{folder} lacks {ADAPTER_WEIGHTS}")
    stored = SafetensorsFiles([folder / ADAPTER_WEIGHTS])
    names = peft_names(spec)
    shapes = dict(parameter_shapes(spec))
    check_shapes(stored, {theirs: shapes[name] for name, theirs in names.items()}, folder / ADAPTER_WEIGHTS)
    return RenamedTensors(stored, names)


def peft_names(spec: ModelSpec, model_type: str | None = None) -> dict[str, str]:
    """Return the name that each adapter parameter has in PEFT.

    Raises InfeasibleError where the family's tensors aren't single linear layers, such as a fused projection.
    """
    base = spec.model_copy(update={"adapter": None})
    links = {}
    for link in weight_map(base, model_type):
        links.setdefault(link.name, []).append(link)
    names = {}
    for name, _ in parameter_shapes(spec):
        if not is_adapter(name):
            continue
        module, place = adapted_module(name)
        (link, *others) = links[f"{module}.weight"]
        if others or link.transposed or link.hf_box != link.box:
            raise InfeasibleError(
                f"{module} is a part of {link.hf_name} in a Hugging Face directory of this model, which has no adapter"
                " of its own there: convert to hf, which merges the adapters"
            )
        leaf = place if place == MAGNITUDE else f"{place}.weight"  # PEFT drops the last part of this one
        names[name] = f"{_PREFIX}{link.hf_name.removesuffix('.weight')}.{leaf}"
    return names


def adapter_config(spec: ModelSpec, base: str | None, model_type: str | None = None) -> dict[str, Any]:
    """Return PEFT's configuration of a model's adapters."""
    adapter = spec.adapter
    assert adapter is not None
    modules = {name.partition(".lora_")[0].rpartition(".")[2] for name in peft_names(spec, model_type).values()}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": adapter.r,
        "lora_alpha": adapter.lora_alpha,
        "lora_dropout": adapter.lora_dropout,
        "use_rslora": adapter.use_rslora,
        "use_dora": adapter.kind == "dora",
        "target_modules": sorted(modules),
        "init_lora_weights": True,
        "inference_mode": True,
        **{key: value for key, value in _ABSENT.items() if key in ("bias", "fan_in_fan_out")},
    }


def write_adapter_config(folder: Path, config: Mapping[str, Any]) -> None:
    """Write PEFT's configuration. Raises OSError."""
    write_json(folder / ADAPTER_CONFIG, config)
