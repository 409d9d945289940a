"""Random directions in which zeroth-order training perturbs the parameters (MeZO, S. Malladi et al., arXiv:2305.17333).

The element of a direction z that belongs to a parameter's element is a function of seed, step, the parameter's name
and the element's index in the whole parameter. So every rank draws the part that it holds, passes and updates draw the
same, and nothing is stored from one to the other.

z has mean 0 and variance 1: the sum of the 8 bytes of a hash, less its mean, divided by its standard deviation (excess
kurtosis −0.15, where the normal distribution has 0). Only integers are computed with until one multiplication, so the
bits are those of every device and every way to cut a parameter, which logarithms and cosines wouldn't have.
"""

import hashlib
from collections.abc import Iterator
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from muster.layout.box import Box
from muster.model.chunk_sizes import chunk_elements
from muster.model.host_copies import to_device
from muster.model.split_mix import counted, key_of

_PERTURBATION = 0x7065727475726221
"""Purpose of the draws, apart from those of other purposes with the same seed."""
_BYTES = 8
_MEAN = _BYTES * 255 // 2
_STD = (_BYTES * (256**2 - 1) / 12) ** 0.5
_EVEN_BYTES = 0x00FF00FF00FF00FF
_SUM_OF_LANES = 0x0001000100010001
_TOP_LANE = 48


class Direction(NamedTuple):
    """The direction of one step of a run."""

    seed: int
    step: int
    """Number of the step, from 1."""


class Part(NamedTuple):
    """A part of a whole parameter."""

    name: str
    shape: tuple[int, ...]
    """Shape of the whole parameter."""
    box: Box


def whole_numbers(direction: Direction, part: Part, device: torch.device) -> Tensor:
    """Return z · _STD of a part of a parameter, whole numbers: int16 of the part's size."""
    found = torch.empty(part.box.numel, dtype=torch.int16, device=device)
    for place, numbers in _pieces(direction, part, device):
        found[place] = numbers
    return found.view(part.box.size)


def moved(values: Tensor, numbers: Tensor, length: float) -> Tensor:
    """Return parameters `values` + length · z, of z's `whole_numbers`, in the dtype of the values."""
    wide = torch.promote_types(values.dtype, torch.float32)
    # Two roundings: a fused multiplication and addition would have one, and some kernels fuse part of a tensor.
    return numbers.to(wide).mul_(length / _STD).add_(values).to(values.dtype)


def move_(values: Tensor, direction: Direction, part: Part, length: float) -> None:
    """Add length · z to parameters in place, piece by piece."""
    flat = values.view(-1)
    for place, numbers in _pieces(direction, part, values.device):
        flat[place] += numbers.to(values.dtype).mul_(length / _STD)


def rows_of(direction: Direction, part: Part, rows_N: Tensor) -> Tensor:
    """Return the `whole_numbers` (N, D) of rows of a whole matrix, of which `part` says the name and the shape."""
    width = part.shape[1]
    columns_D = torch.arange(width, device=rows_N.device)
    found_ND = torch.empty(len(rows_N), width, dtype=torch.int16, device=rows_N.device)
    key = to_device(_key(direction, part.name), rows_N.device)
    step = max(1, chunk_elements("dropout", rows_N.device.type) // width)
    for first in range(0, len(rows_N), step):
        some = slice(first, first + step)
        found_ND[some] = _sums(counted(key, rows_N[some, None] * width + columns_D))
    return found_ND


def _key(direction: Direction, name: str) -> Tensor:
    digest = hashlib.sha256(name.encode()).digest()
    of_step = counted(key_of(direction.seed, _PERTURBATION), direction.step)
    return counted(of_step, int.from_bytes(digest[:8], "big"))


def _pieces(direction: Direction, part: Part, device: torch.device) -> Iterator[tuple[slice, Tensor]]:
    """Yield places in the flat part with their whole numbers (int64), in order."""
    box, shape = part.box, part.shape
    strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    cut = max((dim for dim in range(len(shape)) if box.size[dim] < shape[dim]), default=0)
    starts_R = torch.full((1,), box.start[cut] * strides[cut], dtype=torch.int64, device=device)
    for dim in range(cut):
        at = torch.arange(box.start[dim], box.start[dim] + box.size[dim], device=device) * strides[dim]
        starts_R = (starts_R.unsqueeze(-1) + at).flatten()
    run = box.numel // len(starts_R) if box.numel else 0
    key, most = to_device(_key(direction, part.name), device), chunk_elements("dropout", device.type)
    runs, width = max(1, most // max(1, run)), min(run, most)
    for first in range(0, len(starts_R) if run else 0, runs):
        some_R = starts_R[first : first + runs, None]
        for begin in range(0, run, width):
            offsets_W = torch.arange(begin, min(begin + width, run), device=device)
            at = first * run + begin
            numbers = _sums(counted(key, some_R + offsets_W)).flatten()
            yield slice(at, at + numbers.numel()), numbers


def _sums(hashes: Tensor) -> Tensor:
    """Return the sums of the bytes of each int64, less their mean; `hashes` may be overwritten."""
    lanes = (hashes >> 8).bitwise_and_(_EVEN_BYTES).add_(hashes.bitwise_and_(_EVEN_BYTES))
    return lanes.mul_(_SUM_OF_LANES).bitwise_right_shift_(_TOP_LANE).sub_(_MEAN)
