"""Tensors under other names: each made of boxes of tensors that another program named and shaped."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from muster.checkpoint.tensors import Kind, Tensors, empty
from muster.spec.errors import MusterError
from muster.spec.layout import Box, overlap, within


@dataclass(frozen=True, slots=True)
class Origin:
    """Where the numbers in a box of a wanted tensor come from: a box of a stored one, in the same order or transposed.

    Where one box has more dimensions, it has a length of 1 in each that it has more, in front.
    """

    wanted: str
    wanted_box: Box
    stored: str
    stored_box: Box
    transposed: bool = False
    """But for leading lengths of 1, both boxes have two dimensions, in opposite order."""

    def part(self, box: Box) -> Box:
        """Where the numbers of `box`, which lies in the wanted box, are stored."""
        start = tuple(a - b for a, b in zip(box.start, self.wanted_box.start, strict=True))
        size, dims = box.size, len(self.stored_box.size)
        if self.transposed:
            start, size = start[::-1], size[::-1]
        start, size = _in_dims(start, dims, 0), _in_dims(size, dims, 1)
        return Box(tuple(a + b for a, b in zip(self.stored_box.start, start, strict=True)), size)


def _in_dims(values: tuple[int, ...], dims: int, filler: int) -> tuple[int, ...]:
    """The values for so many dimensions: leading ones are dropped or added."""
    return ((filler,) * (dims - len(values)) + values)[-dims:] if dims else ()


class LinkedTensors:
    """The tensors `kinds`, made of stored ones (`Tensors`); where dtypes differ, numbers are converted.

    Raises MusterError when the origins don't give each number of each tensor.
    """

    def __init__(self, stored: Tensors, kinds: Mapping[str, Kind], origins: Iterable[Origin]) -> None:
        self.kinds, self._stored = kinds, stored
        self._origins: dict[str, list[Origin]] = {name: [] for name in kinds}
        for origin in origins:
            self._origins[origin.wanted].append(origin)
        for name, kind in kinds.items():
            if sum(origin.wanted_box.numel for origin in self._origins[name]) != kind.numel:
                raise MusterError(f"the map of names doesn't make up all of {name}")

    def read(self, name: str, box: Box) -> Tensor:
        out = empty(box.size, self.kinds[name].dtype)
        for origin in self._origins[name]:
            if (common := overlap(box, origin.wanted_box)) is not None:
                found = self._stored.read(origin.stored, origin.part(common))
                if origin.transposed:
                    found = found.reshape(found.shape[-2:]).t()
                out[within(common, box)] = found.reshape(common.size)
        return out


class RenamedTensors:
    """Some stored tensors as they are, by other names: wanted → stored (`Tensors`)."""

    def __init__(self, stored: Tensors, names: Mapping[str, str]) -> None:
        self._stored, self._names = stored, names
        self.kinds: Mapping[str, Kind] = {wanted: stored.kinds[name] for wanted, name in names.items()}

    def read(self, name: str, box: Box) -> Tensor:
        return self._stored.read(self._names[name], box)


def check_shapes(stored: Tensors, shapes: Mapping[str, tuple[int, ...]], place: object) -> None:
    """Raises MusterError, in one sentence, when tensors that are needed are missing or of another shape."""
    if missing := [name for name in shapes if name not in stored.kinds]:
        raise MusterError(f"{place} lacks {some(missing)} of the {len(shapes)} tensors of its model")
    for name, shape in shapes.items():
        if (found := stored.kinds[name].shape) != shape:
            raise MusterError(f"{name} has shape {list(found)} in {place}, but its model has {list(shape)}")


def some(names: Sequence[str]) -> str:
    """The first of several names and how many more there are."""
    return f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else names[0]
