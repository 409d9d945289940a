"""Our parameters as Hugging Face tensors, and the way back, by the weight maps of `families`."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from muster.checkpoint.remapped import BoxMapping, RemappedTensors, abbreviate_names, check_shapes
from muster.checkpoint.tensors import TensorMeta, TensorSource, allocate
from muster.interop.families.weight_link import WeightLink
from muster.interop.weight_map import hf_shapes, is_derived_tensor, weight_map
from muster.layout.tensor_layout import Box
from muster.spec.errors import MusterError
from muster.spec.model import ModelSpec, parameter_shapes


def from_hf(stored: TensorSource, spec: ModelSpec, folder: Path) -> TensorSource:
    """The parameters of the model, of the tensors of a Hugging Face directory at `place`.

    Raises InfeasibleError where no family is known for the model, MusterError where tensors are missing, of another
    shape, or more than the model has.
    """
    links = weight_map(spec)
    shapes = hf_shapes(links)
    names = {name: _stored_name(name, stored.metas) for name in shapes}
    check_shapes(stored, {names[name]: shape for name, shape in shapes.items()}, folder)
    known = set(names.values())
    if unknown := [name for name in stored.metas if name not in known and not is_derived_tensor(spec, name)]:
        raise MusterError(
            f"{folder} holds {abbreviate_names(unknown)}, which a model of its configuration doesn't have"
        )
    return from_weight_map(stored, spec, (replace(link, hf_name=names[link.hf_name]) for link in links))


def from_weight_map(stored: TensorSource, spec: ModelSpec, links: Iterable[WeightLink]) -> TensorSource:
    """The parameters of the model, of foreign tensors; each has the dtype of the tensor that it lies in."""
    links = list(links)
    dtypes = {link.name: stored.metas[link.hf_name].dtype for link in links}
    kinds = {name: TensorMeta(shape, dtypes[name]) for name, shape in parameter_shapes(spec)}
    origins = (BoxMapping(link.name, link.box, link.hf_name, link.hf_box, link.transposed) for link in links)
    return RemappedTensors(stored, kinds, origins)


def to_hf(weights: TensorSource, spec: ModelSpec) -> TensorSource:
    """The tensors of a Hugging Face directory, of the parameters of the model.

    Raises InfeasibleError where no family is known for the model.
    """
    links = weight_map(spec)
    dtypes = {link.hf_name: weights.metas[link.name].dtype for link in links}
    kinds = {name: TensorMeta(shape, dtypes[name]) for name, shape in hf_shapes(links).items()}
    origins = (BoxMapping(link.hf_name, link.hf_box, link.name, link.box, link.transposed) for link in links)
    return RemappedTensors(weights, kinds, origins)


class CastTensors:
    """Tensors whose floating-point numbers are converted to one dtype (`Tensors`): those whose names begin so."""

    def __init__(self, tensors: TensorSource, dtype: torch.dtype, prefix: str = "") -> None:
        self._tensors = tensors
        self.metas: Mapping[str, TensorMeta] = {
            name: TensorMeta(
                kind.shape, dtype if kind.dtype.is_floating_point and name.startswith(prefix) else kind.dtype
            )
            for name, kind in tensors.metas.items()
        }

    def read(self, name: str, box: Box) -> Tensor:
        return allocate(box.size, self.metas[name].dtype).copy_(self._tensors.read(name, box))


def _stored_name(name: str, stored: Mapping[str, TensorMeta]) -> str:
    """The name as a directory has it: one that was saved without its head leaves out the first part."""
    bare = name.partition(".")[2]
    return bare if name not in stored and bare in stored else name
