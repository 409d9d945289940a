"""The one form of a weight map: which box of which Hugging Face tensor is which box of which parameter."""

from collections.abc import Iterator
from dataclasses import dataclass

from muster.layout.tensor_layout import Box


@dataclass(frozen=True, slots=True)
class WeightLink:
    """A box of a parameter and a box of a Hugging Face tensor that hold the same numbers.

    From Hugging Face: `hf[link.hf_box.slices]`, transposed (`.t()`) where `transposed` says so, as `link.box.size`
    (`.reshape`, which only adds or drops dimensions of size 1) is `parameter[link.box.slices]`. The way back is the
    same in the other order.
    """

    name: str
    """Of the parameter, as `muster.spec.model.parameters` lists it."""
    box: Box
    hf_name: str
    hf_box: Box
    transposed: bool = False


def link_whole(name: str, hf_name: str, shape: tuple[int, ...], transposed: bool = False) -> WeightLink:
    """A parameter of this shape that is all of one tensor, or of its transpose."""
    hf_shape = shape[::-1] if transposed else shape
    return WeightLink(name, _all(shape), hf_name, _all(hf_shape), transposed)


def link_slice(
    name: str, hf_name: str, shape: tuple[int, ...], dim: int, start: int, transposed: bool = False
) -> WeightLink:
    """A parameter of this shape that is a run of rows (or columns) of a tensor: along the tensor's `dim` from
    `start`."""
    size = shape[::-1] if transposed else shape
    corner = tuple(start if d == dim else 0 for d in range(len(size)))
    return WeightLink(name, _all(shape), hf_name, Box(corner, size), transposed)


def link_stacked(name: str, hf_names: list[str], shape: tuple[int, ...]) -> Iterator[WeightLink]:
    """A parameter (E, …) each of whose E parts is a tensor (…)."""
    count, *rest = shape
    assert count == len(hf_names)
    for index, hf_name in enumerate(hf_names):
        box = Box((index, *(0 for _ in rest)), (1, *rest))
        yield WeightLink(name, box, hf_name, _all(tuple(rest)))


def _all(shape: tuple[int, ...]) -> Box:
    return Box((0,) * len(shape), shape)
