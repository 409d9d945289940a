"""Initial weights from a directory of any format; each rank reads only its own shards."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from muster.checkpoint.adapters import weights_for
from muster.checkpoint.local_shard import LocalShard
from muster.checkpoint.model_directory import ModelDirectory, open_directory
from muster.checkpoint.tensors import TensorMeta, TensorSource, split_into_boxes
from muster.layout.tensor_layout import Box, slices_within
from muster.spec.adapters import is_adapter
from muster.spec.errors import ConfigError
from muster.spec.low_rank import is_low_rank
from muster.spec.model import DROPOUT_RATES, ModelSpec

IRRELEVANT_FIELDS = {
    "name",
    "init_std",
    "scaled_residual",
    "max_positions",
    "mtp_loss_scaling_factor",
    *DROPOUT_RATES,
} | {
    f"moe.{name}"
    for name in ("aux_loss_coef", "aux_loss_scope", "router_z_loss_coef", "router_bias_update_rate", "capacity_factor")
}
"""Fields of a ModelSpec that don't affect the meaning of weights."""


def check_initial_weights(path: Path, spec: ModelSpec) -> ModelDirectory:
    """Open the directory at `path` and check that it has the weights of the model.

    Raises ConfigError if they are those of another model, MusterError if the directory is damaged.
    """
    directory = open_directory(path)
    if (found := directory.model) is not None:
        theirs, ours = _by_path(found.model_dump(mode="json")), _by_path(spec.model_dump(mode="json"))
        free = IRRELEVANT_FIELDS - ({"max_positions"} if spec.position == "learned" else set())
        changed = [key for key in theirs | ours if theirs.get(key) != ours.get(key) and key not in free]
        if changed := [key for key in changed if key.partition(".")[0] not in ("adapter", "low_rank", "residual")]:
            differences = "; ".join(f"{key} is {theirs.get(key)} there, {ours.get(key)} in the run" for key in changed)
            hint = f"give --model hf:{path}" if directory.format == "hf" else "give the model of that directory"
            raise ConfigError(f"train.init_from: {path} holds another model ({differences}): {hint}")
    weights_for(_unless_other(directory, spec), spec)
    return directory


def function_note(found: ModelSpec | None, spec: ModelSpec) -> str | None:
    """Return a sentence where a model that begins with the weights of another one is another function of them."""
    if found is None or found.residual == spec.residual:
        return None
    return (
        f"residual is {found.residual} there and {spec.residual} here: the weights are the same, but the model computes"
        " something else with them until it has been trained on"
    )


def _by_path(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of nested mappings by their paths, such as `moe.num_experts`."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= _by_path(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return found


def load_initial_weights(path: Path, spec: ModelSpec, shards: Iterable[LocalShard], island: int = 0) -> None:
    """Fill the parameters among `shards` with the weights at `path`, converted to their dtypes. Adapters that weren't
    there, and factors of low-rank layers by a random solver, keep their values; the run's weights are merged with those
    that it doesn't have. Of a checkpoint of several paths they are those of the path that `island` trained.

    Raises as `open_directory` and `model_weights` do.
    """
    directory = replace(_unless_other(open_directory(path), spec), island=island)
    weights = weights_for(directory, spec)
    for shard in shards:
        group, _, name = shard.name.partition("/")
        is_new = name not in weights.metas and (is_adapter(name) or is_low_rank(name))
        if group == "model" and not is_new:
            for box, into in shard.box_views():
                _fill_box(weights, name, box, into)


def _fill_box(weights: TensorSource, name: str, box: Box, into: Tensor) -> None:
    for inner in split_into_boxes(TensorMeta(box.size, weights.metas[name].dtype)):
        part = Box(tuple(a + b for a, b in zip(box.start, inner.start, strict=True)), inner.size)
        into[slices_within(part, box)].copy_(weights.read(name, part))


def _unless_other(directory: ModelDirectory, spec: ModelSpec) -> ModelDirectory:
    """Return the directory with the run's model where it describes none."""
    return directory if directory.model is not None else replace(directory, model=spec)
