"""The form of weight maps: equal boxes of Hugging Face tensors and of parameters."""

from collections.abc import Iterator
from dataclasses import dataclass

from muster.layout.tensor_layout import Box


@dataclass(frozen=True, slots=True)
class WeightLink:
    """A box of a parameter and a box of a Hugging Face tensor that hold the same elements.

    From Hugging Face: `hf[link.hf_slices]`, transposed (`.mT`) if `transposed`, reshaped to `link.box.size` (which
    only adds or drops dimensions of size 1), is `parameter[link.box.slices]`. The way back is the same in the other
    order.
    """

    name: str
    """Name of the parameter, as in `muster.spec.model.parameter_shapes`."""
    box: Box
    hf_name: str
    hf_box: Box
    transposed: bool = False
    hf_step: int = 1
    """Distance, in the tensor, of neighbours in the last dimension of `hf_box`, whose size counts these alone."""

    @property
    def hf_slices(self) -> tuple[slice, ...]:
        """Slices of the tensor that the elements are in."""
        *others, last = self.hf_box.slices
        return *others, slice(last.start, last.start + (self.hf_box.size[-1] - 1) * self.hf_step + 1, self.hf_step)

    @property
    def hf_end(self) -> tuple[int, ...]:
        """Index behind the last of the elements, in each dimension of the tensor."""
        return tuple(one.stop for one in self.hf_slices)


def link_whole(name: str, hf_name: str, shape: tuple[int, ...], transposed: bool = False) -> WeightLink:
    """Return the link of a parameter of this shape that is all of one tensor, or of its transpose."""
    hf_shape = shape[::-1] if transposed else shape
    return WeightLink(name, _all(shape), hf_name, _all(hf_shape), transposed)


def link_slice(
    name: str, hf_name: str, shape: tuple[int, ...], dim: int, start: int, transposed: bool = False
) -> WeightLink:
    """Return the link of a parameter of this shape that is a run of rows (or columns) of a tensor: along the tensor's
    `dim` from `start`."""
    size = shape[::-1] if transposed else shape
    corner = tuple(start if d == dim else 0 for d in range(len(size)))
    return WeightLink(name, _all(shape), hf_name, Box(corner, size), transposed)


def link_stacked(name: str, hf_names: list[str], shape: tuple[int, ...]) -> Iterator[WeightLink]:
    """Yield the links of a parameter (E, …) each of whose E parts is a tensor (…)."""
    count, *rest = shape
    assert count == len(hf_names)
    for index, hf_name in enumerate(hf_names):
        box = Box((index, *(0 for _ in rest)), (1, *rest))
        yield WeightLink(name, box, hf_name, _all(tuple(rest)))


def _all(shape: tuple[int, ...]) -> Box:
    return Box((0,) * len(shape), shape)
