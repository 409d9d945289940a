"""Our parameters as Hugging Face tensors, and the way back, by the weight maps of `families`."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from muster.checkpoint.families import Link, hf_shapes, is_derived, links_of
from muster.checkpoint.linked import LinkedTensors, Origin, check_shapes, some
from muster.checkpoint.tensors import Kind, Tensors, empty
from muster.spec.errors import MusterError
from muster.spec.layout import Box
from muster.spec.model import ModelSpec, parameters


def from_hf(stored: Tensors, spec: ModelSpec, place: Path) -> Tensors:
    """The parameters of the model, of the tensors of a Hugging Face directory at `place`.

    Raises InfeasibleError where no family is known for the model, MusterError where tensors are missing, of another
    shape, or more than the model has.
    """
    links = links_of(spec)
    shapes = hf_shapes(links)
    names = {name: _spelled(name, stored.kinds) for name in shapes}
    check_shapes(stored, {names[name]: shape for name, shape in shapes.items()}, place)
    known = set(names.values())
    if unknown := [name for name in stored.kinds if name not in known and not is_derived(spec, name)]:
        raise MusterError(f"{place} holds {some(unknown)}, which a model of its configuration doesn't have")
    return from_links(stored, spec, (replace(link, hf_name=names[link.hf_name]) for link in links))


def from_links(stored: Tensors, spec: ModelSpec, links: Iterable[Link]) -> Tensors:
    """The parameters of the model, of foreign tensors; each has the dtype of the tensor that it lies in."""
    links = list(links)
    dtypes = {link.name: stored.kinds[link.hf_name].dtype for link in links}
    kinds = {name: Kind(shape, dtypes[name]) for name, shape in parameters(spec)}
    origins = (Origin(link.name, link.box, link.hf_name, link.hf_box, link.transposed) for link in links)
    return LinkedTensors(stored, kinds, origins)


def to_hf(weights: Tensors, spec: ModelSpec) -> Tensors:
    """The tensors of a Hugging Face directory, of the parameters of the model.

    Raises InfeasibleError where no family is known for the model.
    """
    links = links_of(spec)
    dtypes = {link.hf_name: weights.kinds[link.name].dtype for link in links}
    kinds = {name: Kind(shape, dtypes[name]) for name, shape in hf_shapes(links).items()}
    origins = (Origin(link.hf_name, link.hf_box, link.name, link.box, link.transposed) for link in links)
    return LinkedTensors(weights, kinds, origins)


class CastTensors:
    """Tensors whose floating-point numbers are converted to one dtype (`Tensors`): those whose names begin so."""

    def __init__(self, tensors: Tensors, dtype: torch.dtype, only: str = "") -> None:
        self._tensors = tensors
        self.kinds: Mapping[str, Kind] = {
            name: Kind(kind.shape, dtype if kind.dtype.is_floating_point and name.startswith(only) else kind.dtype)
            for name, kind in tensors.kinds.items()
        }

    def read(self, name: str, box: Box) -> Tensor:
        return empty(box.size, self.kinds[name].dtype).copy_(self._tensors.read(name, box))


def _spelled(name: str, stored: Mapping[str, Kind]) -> str:
    """The name as a directory has it: one that was saved without its head leaves out the first part."""
    bare = name.partition(".")[2]
    return bare if name not in stored and bare in stored else name
