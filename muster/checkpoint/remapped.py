"""Tensors under other names: each made of boxes of tensors that another program named and shaped."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from muster.checkpoint.tensors import TensorMeta, TensorSource, allocate
from muster.layout.tensor_layout import Box, intersect, slices_within
from muster.spec.errors import MusterError


@dataclass(frozen=True, slots=True)
class BoxMapping:
    """Where the numbers in a box of a wanted tensor come from: a box of a stored one, in the same order or transposed.

    Where one box has more dimensions, it has a length of 1 in each that it has more, in front.
    """

    target: str
    target_box: Box
    source: str
    source_box: Box
    transposed: bool = False
    """But for leading lengths of 1, both boxes have two dimensions, in opposite order."""

    def source_part(self, box: Box) -> Box:
        """Where the numbers of `box`, which lies in the wanted box, are stored."""
        start = tuple(a - b for a, b in zip(box.start, self.target_box.start, strict=True))
        size, dims = box.size, len(self.source_box.size)
        if self.transposed:
            start, size = start[::-1], size[::-1]
        start, size = _pad_dims(start, dims, 0), _pad_dims(size, dims, 1)
        return Box(tuple(a + b for a, b in zip(self.source_box.start, start, strict=True)), size)


def _pad_dims(values: tuple[int, ...], dims: int, filler: int) -> tuple[int, ...]:
    """The values for so many dimensions: leading ones are dropped or added."""
    return ((filler,) * (dims - len(values)) + values)[-dims:] if dims else ()


class RemappedTensors:
    """The tensors `kinds`, made of stored ones (`Tensors`); where dtypes differ, numbers are converted.

    Raises MusterError when the origins don't give each number of each tensor.
    """

    def __init__(self, stored: TensorSource, metas: Mapping[str, TensorMeta], mappings: Iterable[BoxMapping]) -> None:
        self.metas, self._stored = metas, stored
        self._mappings: dict[str, list[BoxMapping]] = {name: [] for name in metas}
        for origin in mappings:
            self._mappings[origin.target].append(origin)
        for name, kind in metas.items():
            if sum(origin.target_box.numel for origin in self._mappings[name]) != kind.numel:
                raise MusterError(f"the map of names doesn't make up all of {name}")

    def read(self, name: str, box: Box) -> Tensor:
        out = allocate(box.size, self.metas[name].dtype)
        for origin in self._mappings[name]:
            if (common := intersect(box, origin.target_box)) is not None:
                found = self._stored.read(origin.source, origin.source_part(common))
                if origin.transposed:
                    found = found.reshape(found.shape[-2:]).t()
                out[slices_within(common, box)] = found.reshape(common.size)
        return out


class RenamedTensors:
    """Some stored tensors as they are, by other names: wanted → stored (`Tensors`)."""

    def __init__(self, stored: TensorSource, names: Mapping[str, str]) -> None:
        self._stored, self._names = stored, names
        self.metas: Mapping[str, TensorMeta] = {wanted: stored.metas[name] for wanted, name in names.items()}

    def read(self, name: str, box: Box) -> Tensor:
        return self._stored.read(self._names[name], box)


def check_shapes(stored: TensorSource, shapes: Mapping[str, tuple[int, ...]], where: object) -> None:
    """Raises MusterError, in one sentence, when tensors that are needed are missing or of another shape."""
    if missing := [name for name in shapes if name not in stored.metas]:
        raise MusterError(f"{where} lacks {abbreviate_names(missing)} of the {len(shapes)} tensors of its model")
    for name, shape in shapes.items():
        if (found := stored.metas[name].shape) != shape:
            raise MusterError(f"{name} has shape {list(found)} in {where}, but its model has {list(shape)}")


def abbreviate_names(names: Sequence[str]) -> str:
    """The first of several names and how many more there are."""
    return f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else names[0]
