"""Conversion between Muster's parameters and Hugging Face tensors, by the weight maps of `muster.interop.families`."""

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


def from_hf(stored: TensorSource, spec: ModelSpec, folder: Path, model_type: str | None = None) -> TensorSource:
    """Return the parameters of the model, read from the tensors of a Hugging Face directory at `folder`, whose
    configuration has this model_type.

    Raises InfeasibleError if no family is known for the model, MusterError if tensors are missing, of another shape, or
    unknown to the model.
    """
    # A ladder has the names and shapes of the model that it began as.
    links = weight_map(spec.model_copy(update={"residual": "standard"}), model_type)
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
    """Return the parameters of the model, assembled from foreign tensors, with the dtypes of those."""
    links = list(links)
    dtypes = {link.name: stored.metas[link.hf_name].dtype for link in links}
    metas = {name: TensorMeta(shape, dtypes[name]) for name, shape in parameter_shapes(spec)}
    origins = (
        BoxMapping(link.name, link.box, link.hf_name, link.hf_box, link.transposed, source_step=link.hf_step)
        for link in links
    )
    return RemappedTensors(stored, metas, origins)


def to_hf(weights: TensorSource, spec: ModelSpec, model_type: str | None = None) -> TensorSource:
    """Return the tensors of a Hugging Face directory, assembled from the parameters of the model; if possible of this
    model_type.

    Raises InfeasibleError if no family is known for the model.
    """
    links = weight_map(spec, model_type)
    dtypes = {link.hf_name: weights.metas[link.name].dtype for link in links}
    metas = {name: TensorMeta(shape, dtypes[name]) for name, shape in hf_shapes(links).items()}
    origins = (
        BoxMapping(link.hf_name, link.hf_box, link.name, link.box, link.transposed, target_step=link.hf_step)
        for link in links
    )
    return RemappedTensors(weights, metas, origins)


class CastTensors:
    """Tensors of which those with names that begin with `prefix` are cast to `dtype`, if they are floating-point."""

    def __init__(self, tensors: TensorSource, dtype: torch.dtype, prefix: str = "") -> None:
        self._tensors = tensors
        self.metas: Mapping[str, TensorMeta] = {
            name: TensorMeta(
                meta.shape, dtype if meta.dtype.is_floating_point and name.startswith(prefix) else meta.dtype
            )
            for name, meta in tensors.metas.items()
        }

    def read(self, name: str, box: Box) -> Tensor:
        return allocate(box.size, self.metas[name].dtype).copy_(self._tensors.read(name, box))


def _stored_name(name: str, stored: Mapping[str, TensorMeta]) -> str:
    """Return the name in a directory: a model saved without its head lacks the first part of each name."""
    bare = name.partition(".")[2]
    return bare if name not in stored and bare in stored else name
