"""Import of another trainer's configuration as a run file: detection, conversion, missing keys."""

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from muster.config.migrations import SCHEMAS
from muster.config.named_model import load_model
from muster.config.run_config import RunConfig
from muster.config.yaml_reader import read_yaml
from muster.config.yaml_writer import yaml_text
from muster.interop.conversion import ConfigConversion
from muster.interop.deepspeed import read_deepspeed
from muster.interop.megatron import read_megatron
from muster.interop.nanotron import read_nanotron
from muster.interop.torchtitan import read_torchtitan
from muster.spec.config_errors import ConfigSchema, config_error
from muster.spec.dotted_keys import flatten, unflatten
from muster.spec.errors import ConfigError
from muster.spec.legality import plan_violations
from muster.spec.supported import unsupported_features

_PLACEHOLDERS = {"data.source": "python-stdlib", "train.steps": 1, "optim.lr": 1e-3, "model.vocab_size": 257}
_PLACEHOLDERS |= {"train.seq_len": 1, "train.global_batch_size": 1, "data.tokenizer": "tokenizer.json"}
"""Keys that a run needs, with placeholders against which the rest is checked where they are missing."""

_ANY_MODEL = "tiny"
"""Model against which the rest is checked where the file names none."""

_OWN_SECTIONS = {"extends", "parallel", "train", "optim", "plugins"}
"""Sections by which a run file of Muster is told from nanotron's YAML."""


@dataclass(frozen=True, slots=True)
class ImportedConfig:
    """A run file made from another trainer's configuration, and remarks about it."""

    conversion: ConfigConversion
    tree: Mapping[str, Any]
    """The run file."""
    missing: tuple[str, ...]
    """Keys that the other file lacks and a run needs."""
    refused: tuple[str, ...]
    """Reasons why Muster can't run the plan as it is."""

    def yaml(self) -> str:
        """Return the run file as text, each value with the option that it comes from."""
        origins = self.conversion.origins
        return yaml_text(self.tree, lambda key: origins.get(key, "a run file's version"))

    def to_json(self) -> dict[str, Any]:
        """Return the output of `muster import-config --json`."""
        left = [{"option": one.option, "value": one.value, "reason": one.reason} for one in self.conversion.dropped]
        return {
            "version": 1,
            "program": self.conversion.program,
            "run": self.tree,
            "origins": self.conversion.origins,
            "not_carried": left,
            "missing": list(self.missing),
            "refused": list(self.refused),
        }


def import_config(path: Path, nproc: int | None = None, model: str | None = None) -> ImportedConfig:
    """Read a file of Megatron-LM (`.sh`, `.txt`, …), torchtitan (`.toml`), nanotron (`.yaml`) or DeepSpeed (`.json`).

    Raises ConfigError where it can't be read, or contains something that a run file can't express.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"can't read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"can't read {path}: expected a text file") from None
    try:
        carried = _carried(path, text, nproc, model)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    missing = _missing_keys(carried.values)
    tree = {"version": SCHEMAS["run"], **unflatten(_in_order(carried.values))}
    return ImportedConfig(carried, tree, missing, _refused(path, carried, missing))


def _missing_keys(values: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the keys that a run needs and that were not carried over."""
    missing = [key for key in _PLACEHOLDERS if key not in values]
    if "data.blend" in values:
        missing.remove("data.source")
    if not any(key.startswith("model.") for key in values):
        missing[missing.index("model.vocab_size")] = "model"
    return tuple(missing)


def _carried(path: Path, text: str, nproc: int | None, model: str | None) -> ConfigConversion:
    if path.suffix == ".toml":
        try:
            return read_torchtitan(tomllib.loads(text), nproc, load_model, model)
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"no TOML: {error}") from None
    if path.suffix in (".yaml", ".yml"):
        tree = read_yaml(text, "nanotron's file")
        tree = tree if isinstance(tree, Mapping) else {}
        if set(tree) & _OWN_SECTIONS and not set(tree) & {"parallelism", "tokens"}:
            raise ConfigError(f"it is a run file of Muster already: start it with muster train {path}")
        return read_nanotron(tree)
    if path.suffix == ".json":
        try:
            return read_deepspeed(json.loads(text), nproc, load_model, model)
        except json.JSONDecodeError as error:
            raise ConfigError(f"no JSON: {error}") from None
    return read_megatron(text, nproc)


def _in_order(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values in the usual order of run files: the seed, then section by section."""
    sections = ("seed", "model", "parallel", "data", "train", "eval", "optim")
    return dict(sorted(values.items(), key=lambda pair: sections.index(pair[0].partition(".")[0])))


def _refused(path: Path, carried: ConfigConversion, missing: tuple[str, ...]) -> tuple[str, ...]:
    """Apply all checks of a run file. Raises ConfigError for values that it can't have."""
    values = {**carried.values, **{key: _PLACEHOLDERS[key] for key in missing if key != "model"}}
    if "model" in missing:
        values |= {f"model.{key}": value for key, value in flatten(load_model(_ANY_MODEL).model_dump(mode="json"))}
    if "train.global_batch_size" in missing:
        sizes = ("dp_shard", "dp_replicate", "micro_batch_size")
        values["train.global_batch_size"] = prod(values.get(f"parallel.{size}", 1) for size in sizes)
    origins = {key: f"{path}: {origin}" for key, origin in carried.origins.items()}
    try:
        config = RunConfig.model_validate(unflatten(values))
    except ValidationError as error:
        raise config_error(error, ConfigSchema(RunConfig), origins) from None
    plan = config.parallel
    return tuple(
        dict.fromkeys(
            [
                *plan_violations(plan, config.model, config.workload, plan.world_size),
                *unsupported_features(plan, config.model),
            ]
        )
    )
