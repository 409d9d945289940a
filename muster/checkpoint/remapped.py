"""Tensors under other names and shapes: each assembled from boxes of stored tensors of another program."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from muster.checkpoint.tensors import TensorMeta, TensorSource, allocate
from muster.layout.tensor_layout import Box, intersect, slices_within
from muster.spec.errors import MusterError


@dataclass(frozen=True, slots=True)
class BoxMapping:
    """Correspondence of a box of a target tensor and a box of a stored one, in the same order or transposed.

    A box with more dimensions than the other has additional leading ones of size 1.
    """

    target: str
    target_box: Box
    source: str
    source_box: Box
    transposed: bool = False
    """True if the boxes, apart from leading dimensions of size 1, are matrices that are transposes of each other."""
    source_step: int = 1
    """Distance, in the stored tensor, of neighbours in the last dimension of its box, whose size counts its elements
    alone."""
    target_step: int = 1
    """The same of the target."""

    def overlap(self, box: Box) -> tuple[Box, tuple[slice, ...]] | None:
        """Return the part of the mapping's elements that lie in `box` of the target, counted from the first of them,
        and their place in `box`; None where there are none."""
        if self.target_step == 1:
            if (common := intersect(box, self.target_box)) is None:
                return None
            start = tuple(a - b for a, b in zip(common.start, self.target_box.start, strict=True))
            return Box(start, common.size), slices_within(common, box)
        step, first = self.target_step, self.target_box.start[-1]
        begin = max(0, -(-(box.start[-1] - first) // step))
        end = min(self.target_box.size[-1], -(-(box.start[-1] + box.size[-1] - first) // step))
        rows = replace(self, target_box=Box(self.target_box.start[:-1], self.target_box.size[:-1]), target_step=1)
        others = rows.overlap(Box(box.start[:-1], box.size[:-1]))
        if others is None or end <= begin:
            return None
        inner, places = others
        place = slice(first + begin * step - box.start[-1], first + (end - 1) * step + 1 - box.start[-1], step)
        return Box((*inner.start, begin), (*inner.size, end - begin)), (*places, place)

    def source_part(self, part: Box) -> Box:
        """Return the stored box that holds a part of the mapping's elements, and others between them where they lie
        apart."""
        start, size, dims = part.start, part.size, len(self.source_box.size)
        if self.transposed:
            start, size = (*start[:-2], *start[:-3:-1]), (*size[:-2], *size[:-3:-1])
        start, size = _pad_dims(start, dims, 0), _pad_dims(size, dims, 1)
        if self.source_step > 1:
            start = (*start[:-1], start[-1] * self.source_step)
            size = (*size[:-1], (size[-1] - 1) * self.source_step + 1)
        return Box(tuple(a + b for a, b in zip(self.source_box.start, start, strict=True)), size)


def _pad_dims(values: tuple[int, ...], dims: int, filler: int) -> tuple[int, ...]:
    """Return the values for `dims` dimensions, dropping leading ones or adding `filler` in front."""
    return ((filler,) * (dims - len(values)) + values)[-dims:] if dims else ()


class RemappedTensors:
    """Tensors assembled from boxes of stored ones (a `TensorSource`), converted where dtypes differ.

    Raises MusterError if the mappings don't cover each element of each tensor.
    """

    def __init__(self, stored: TensorSource, metas: Mapping[str, TensorMeta], mappings: Iterable[BoxMapping]) -> None:
        self.metas, self._stored = metas, stored
        self._mappings: dict[str, list[BoxMapping]] = {name: [] for name in metas}
        for mapping in mappings:
            self._mappings[mapping.target].append(mapping)
        for name, meta in metas.items():
            if sum(mapping.target_box.numel for mapping in self._mappings[name]) != meta.numel:
                raise MusterError(f"the weight map doesn't cover all of {name}")

    def read(self, name: str, box: Box) -> Tensor:
        out = allocate(box.size, self.metas[name].dtype)
        for mapping in self._mappings[name]:
            if (overlap := mapping.overlap(box)) is not None:
                inner, place = overlap
                part = self._stored.read(mapping.source, mapping.source_part(inner))
                if mapping.source_step > 1:
                    part = part[..., :: mapping.source_step]
                if mapping.transposed:
                    part = part.reshape(part.shape[-2:]).t()
                out[place] = part.reshape(inner.size)
        return out


class RenamedTensors:
    """Stored tensors under other names, given as new name → stored name (a `TensorSource`)."""

    def __init__(self, stored: TensorSource, names: Mapping[str, str]) -> None:
        self._stored, self._names = stored, names
        self.metas: Mapping[str, TensorMeta] = {wanted: stored.metas[name] for wanted, name in names.items()}

    def read(self, name: str, box: Box) -> Tensor:
        return self._stored.read(self._names[name], box)


class MeanTensors:
    """Means of stored tensors of the same shape, given as name → stored names (a `TensorSource`)."""

    def __init__(self, stored: TensorSource, names: Mapping[str, Sequence[str]]) -> None:
        self._stored, self._names = stored, names
        self.metas: Mapping[str, TensorMeta] = {wanted: stored.metas[own[0]] for wanted, own in names.items()}

    def read(self, name: str, box: Box) -> Tensor:
        first, *others = self._names[name]
        total = self._stored.read(first, box)
        for other in others:
            total += self._stored.read(other, box)
        return total.div_(len(others) + 1) if others else total


class JoinedTensors:
    """Tensors of several sources without a name in common (a `TensorSource`)."""

    def __init__(self, sources: Sequence[TensorSource]) -> None:
        self._of_name = {name: source for source in sources for name in source.metas}
        self.metas: Mapping[str, TensorMeta] = {name: source.metas[name] for name, source in self._of_name.items()}

    def read(self, name: str, box: Box) -> Tensor:
        return self._of_name[name].read(name, box)


def check_shapes(stored: TensorSource, shapes: Mapping[str, tuple[int, ...]], where: object) -> None:
    """Raise MusterError if needed tensors are missing or have another shape."""
    if missing := [name for name in shapes if name not in stored.metas]:
        raise MusterError(f"{where} lacks {abbreviate_names(missing)} of the {len(shapes)} tensors of its model")
    for name, shape in shapes.items():
        if (found := stored.metas[name].shape) != shape:
            raise MusterError(f"{name} has shape {list(found)} in {where}, but its model has {list(shape)}")


def abbreviate_names(names: Sequence[str]) -> str:
    """Return the first of several names and the number of others."""
    return f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else names[0]
