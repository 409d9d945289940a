"""Statistics of a tensor on disk, and the difference of two, computed a part at a time."""

import math
from dataclasses import dataclass

import torch

from muster.checkpoint.tensors import TensorSource, split_into_boxes
from muster.spec.errors import MusterError


@dataclass(frozen=True, slots=True)
class Statistics:
    """Statistics of a tensor's finite elements (NaN if there are none), and the number of others."""

    count: int
    not_finite: int
    zeros: int
    smallest: float
    largest: float
    mean: float
    std: float
    """Population standard deviation."""


def statistics(tensors: TensorSource, name: str) -> Statistics:
    """Compute the statistics of one tensor, with sums in float64."""
    count = 0
    finite = 0
    zeros = 0
    total = 0.0
    squares = 0.0
    smallest = math.inf
    largest = -math.inf
    for box in split_into_boxes(tensors.metas[name], limit_bytes=1 << 20):
        values = tensors.read(name, box).flatten().double()
        count += values.numel()
        values = values[values.isfinite()]
        if values.numel():
            finite += values.numel()
            zeros += int((values == 0).sum())
            total += float(values.sum())
            squares += float(values.square().sum())
            smallest = min(smallest, float(values.min()))
            largest = max(largest, float(values.max()))
    if not finite:
        return Statistics(count, count, 0, math.nan, math.nan, math.nan, math.nan)
    mean = total / finite
    std = math.sqrt(max(squares / finite - mean * mean, 0.0))
    return Statistics(count, count - finite, zeros, smallest, largest, mean, std)


@dataclass(frozen=True, slots=True)
class Distance:
    """Difference of two tensors of one shape."""

    name: str
    equal: bool
    """True if all elements are equal, NaN counting as equal to NaN; dtypes may differ."""
    max_abs: float
    """Largest absolute difference of two elements."""
    relative: float
    """Root mean square of the differences over the root mean square of the first tensor."""


def distance(a: TensorSource, b: TensorSource, name: str) -> Distance:
    """Compute the difference of the tensor `name` in a and in b. Raises MusterError if their shapes differ."""
    meta, other = a.metas[name], b.metas[name]
    if meta.shape != other.shape:
        raise MusterError(f"{name} has shape {list(meta.shape)} in one and {list(other.shape)} in the other")
    equal = True
    max_abs = 0.0
    difference_squares = 0.0
    squares = 0.0
    for box in split_into_boxes(meta, limit_bytes=1 << 20):
        x = a.read(name, box).double()
        y = b.read(name, box).double()
        squares += float(x.square().sum())
        if torch.equal(x, y) or bool(((x == y) | (x.isnan() & y.isnan())).all()):
            continue
        equal = False
        difference = (x - y).abs_()
        max_abs = max(max_abs, float(difference.max())) if not difference.isnan().any() else math.nan
        difference_squares += float(difference.square().sum())
    relative = 0.0 if equal else math.sqrt(difference_squares / squares) if squares else math.inf
    return Distance(name, equal, max_abs, relative)
