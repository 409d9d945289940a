"""What the numbers of tensors on disk are like, and how far two tensors are apart, a chunk at a time."""

import math
from dataclasses import dataclass

import torch

from muster.checkpoint.tensors import TensorSource, split_into_boxes
from muster.spec.errors import MusterError


@dataclass(frozen=True, slots=True)
class Statistics:
    """Of the finite numbers of a tensor (NaN where there are none), and how many are not."""

    count: int
    not_finite: int
    zeros: int
    smallest: float
    largest: float
    mean: float
    std: float
    """Of the numbers themselves, not an estimate for more of them."""


def statistics(tensors: TensorSource, name: str) -> Statistics:
    """Of one tensor. Sums are taken in float64."""
    count = finite = zeros = 0
    total = squares = 0.0
    smallest, largest = math.inf, -math.inf
    for box in split_into_boxes(tensors.metas[name], limit_bytes=1 << 20):
        numbers = tensors.read(name, box).flatten().double()
        count += numbers.numel()
        numbers = numbers[numbers.isfinite()]
        if numbers.numel():
            finite += numbers.numel()
            zeros += int((numbers == 0).sum())
            total += float(numbers.sum())
            squares += float(numbers.square().sum())
            smallest, largest = min(smallest, float(numbers.min())), max(largest, float(numbers.max()))
    if not finite:
        return Statistics(count, count, 0, math.nan, math.nan, math.nan, math.nan)
    mean = total / finite
    std = math.sqrt(max(squares / finite - mean * mean, 0.0))
    return Statistics(count, count - finite, zeros, smallest, largest, mean, std)


@dataclass(frozen=True, slots=True)
class Distance:
    """How far two tensors of one shape are apart."""

    name: str
    equal: bool
    """All numbers are, NaN where NaN is; dtypes may differ."""
    max_abs: float
    """The largest difference of two numbers."""
    relative: float
    """The root of the mean square of the differences over that of the first tensor's numbers."""


def distance(a: TensorSource, b: TensorSource, name: str) -> Distance:
    """Of the tensor `name` in a and in b. Raises MusterError where their shapes differ."""
    kind, other = a.metas[name], b.metas[name]
    if kind.shape != other.shape:
        raise MusterError(f"{name} has shape {list(kind.shape)} in one and {list(other.shape)} in the other")
    equal, far, squares, own = True, 0.0, 0.0, 0.0
    for box in split_into_boxes(kind, limit_bytes=1 << 20):
        x, y = a.read(name, box).double(), b.read(name, box).double()
        if torch.equal(x, y) or bool(((x == y) | (x.isnan() & y.isnan())).all()):
            own += float(x.square().sum())
            continue
        apart, equal = (x - y).abs_(), False
        far = max(far, float(apart.max())) if not apart.isnan().any() else math.nan
        squares, own = squares + float(apart.square().sum()), own + float(x.square().sum())
    relative = 0.0 if equal else math.sqrt(squares / own) if own else math.inf
    return Distance(name, equal, far, relative)
