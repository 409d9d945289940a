"""Training that begins with the weights of a directory of any kind; each rank reads only what it holds."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from muster.checkpoint.directory import Directory, open_directory, weights_of
from muster.checkpoint.piece import Piece
from muster.checkpoint.tensors import Kind, Tensors, chunks
from muster.spec.errors import ConfigError
from muster.spec.layout import Box, within
from muster.spec.model import ModelSpec

SAYS_NOTHING = {"name", "init_std", "scaled_residual", "max_positions"}
"""Fields of a ModelSpec that change nothing about what weights mean."""


def check_initial(path: Path, spec: ModelSpec) -> Directory:
    """What lies at `path`, when it has the weights of the model.

    Raises ConfigError when it has those of another one, MusterError when it is damaged.
    """
    directory = open_directory(path)
    if (found := directory.model) is not None:
        theirs, ours = found.model_dump(mode="json"), spec.model_dump(mode="json")
        free = SAYS_NOTHING - ({"max_positions"} if spec.position == "learned" else set())
        if changed := [key for key in ours if theirs[key] != ours[key] and key not in free]:
            said = "; ".join(f"{key} is {theirs[key]} there, {ours[key]} in the run" for key in changed)
            hint = f"give --model hf:{path}" if directory.format == "hf" else "give the model of that directory"
            raise ConfigError(f"train.init_from: {path} holds another model ({said}): {hint}")
    weights_of(_as(directory, spec))
    return directory


def load_initial(path: Path, spec: ModelSpec, pieces: Iterable[Piece]) -> None:
    """Fills the parameters among `pieces` with the weights at `path`, converted to their dtypes; raises as reading
    does."""
    weights = weights_of(_as(open_directory(path), spec))
    for piece in pieces:
        group, _, name = piece.name.partition("/")
        if group == "model":
            for box, into in piece.parts():
                _fill(weights, name, box, into)


def _fill(weights: Tensors, name: str, box: Box, into: Tensor) -> None:
    for inner in chunks(Kind(box.size, weights.kinds[name].dtype)):
        part = Box(tuple(a + b for a, b in zip(box.start, inner.start, strict=True)), inner.size)
        into[within(part, box)].copy_(weights.read(name, part))


def _as(directory: Directory, spec: ModelSpec) -> Directory:
    return replace(directory, model=spec)
