"""Rectangular parts of tensors."""

from dataclasses import dataclass
from math import prod


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangular part of a tensor: start and size by dimension."""

    start: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.size)

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(a, a + n) for a, n in zip(self.start, self.size, strict=True))
