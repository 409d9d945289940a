"""Initial weights from a directory of any format; each rank reads only its own shards."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from muster.checkpoint.local_shard import LocalShard
from muster.checkpoint.model_directory import ModelDirectory, model_weights, open_directory
from muster.checkpoint.tensors import TensorMeta, TensorSource, split_into_boxes
from muster.layout.tensor_layout import Box, slices_within
from muster.spec.errors import ConfigError
from muster.spec.model import DROPOUT_RATES, ModelSpec

IRRELEVANT_FIELDS = {"name", "init_std", "scaled_residual", "max_positions", *DROPOUT_RATES}
"""Fields of a ModelSpec that don't affect the meaning of weights."""


def check_initial_weights(path: Path, spec: ModelSpec) -> ModelDirectory:
    """Open the directory at `path` and check that it has the weights of the model.

    Raises ConfigError if they are those of another model, MusterError if the directory is damaged.
    """
    directory = open_directory(path)
    if (found := directory.model) is not None:
        theirs, ours = found.model_dump(mode="json"), spec.model_dump(mode="json")
        free = IRRELEVANT_FIELDS - ({"max_positions"} if spec.position == "learned" else set())
        if changed := [key for key in ours if theirs[key] != ours[key] and key not in free]:
            differences = "; ".join(f"{key} is {theirs[key]} there, {ours[key]} in the run" for key in changed)
            hint = f"give --model hf:{path}" if directory.format == "hf" else "give the model of that directory"
            raise ConfigError(f"train.init_from: {path} holds another model ({differences}): {hint}")
    model_weights(_with_model(directory, spec))
    return directory


def load_initial_weights(path: Path, spec: ModelSpec, shards: Iterable[LocalShard]) -> None:
    """Fill the parameters among `shards` with the weights at `path`, converted to their dtypes.

    Raises as `open_directory` and `model_weights` do.
    """
    weights = model_weights(_with_model(open_directory(path), spec))
    for shard in shards:
        group, _, name = shard.name.partition("/")
        if group == "model":
            for box, into in shard.box_views():
                _fill_box(weights, name, box, into)


def _fill_box(weights: TensorSource, name: str, box: Box, into: Tensor) -> None:
    for inner in split_into_boxes(TensorMeta(box.size, weights.metas[name].dtype)):
        part = Box(tuple(a + b for a, b in zip(box.start, inner.start, strict=True)), inner.size)
        into[slices_within(part, box)].copy_(weights.read(name, part))


def _with_model(directory: ModelDirectory, spec: ModelSpec) -> ModelDirectory:
    return replace(directory, model=spec)
