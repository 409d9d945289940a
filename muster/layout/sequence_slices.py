"""Slices of sequences for the pipeline: contiguous runs of positions of equal work.

Under a causal mask a later position sees more keys, so that slices of equal work grow shorter from the first to the
last. Runtime, costs and tests cut by the same function.
"""

from bisect import bisect_left
from collections import Counter
from functools import lru_cache
from math import prod

from muster.spec.model import ModelSpec, layer_parameter_shapes
from muster.spec.plan import Plan


def sequence_slices(model: ModelSpec, plan: Plan, length: int) -> tuple[range, ...]:
    """Return the positions of each of a plan's slices of a sequence of `length`, in order.

    Cuts lie where the work of a forward up to them is nearest to equal shares, on multiples of the ranks that share
    positions under sequence parallelism; every slice has some positions.
    """
    if plan.sequence_slices == 1:
        return (range(length),)
    return _cut(_work_of(model), length, plan.sequence_slices, plan.slice_unit)


def num_offloaded_layers(num_layers: int, positions: int, next_positions: int) -> int:
    """Return how many of a stage's layers that may offload, the first ones, offload a slice of sequences.

    A slice of a layer's activations A_i leaves while the next slice runs. The share of it that leaves, α_i, keeps the
    bytes on the device constant: M_i = M_(i-1) + A_i - α_(i-1) A_(i-1) (SPPO, arXiv:2503.10377, sequence-aware
    offloading), so α_i = A_(i+1) / A_i. A_i is in proportion to the slice's positions, and the last slice, whose
    backward comes next, stays. The share is rounded up to whole layers. Keys and values, which later slices read,
    aren't among a layer's saved activations, and stay: the second level of that paper.
    """
    return min(num_layers, -(-num_layers * next_positions // positions))


def forward_work(model: ModelSpec, positions: int) -> float:
    """Return the matmul FLOPs of the layers' forward over the first positions of a sequence: 2 per weight and position,
    4 per head dimension and visible pair of query and key (arXiv:2307.08691 §4.1)."""
    return _work(_work_of(model), positions)


_Work = tuple[float, float, tuple[tuple[int | None, int], ...]]
"""FLOPs of a position, FLOPs of a visible pair in one layer, (window, layers with it)."""


@lru_cache(maxsize=16)
def _work_of(model: ModelSpec) -> _Work:
    layers = range(model.num_layers)
    numel = sum(prod(shape) for layer in layers for _, shape in layer_parameter_shapes(model, layer) if len(shape) > 1)
    windows = Counter(model.attention_window(layer) for layer in layers)
    return 2.0 * numel, 4.0 * model.num_heads * model.head_dim, tuple(windows.items())


def _work(work: _Work, end: int) -> float:
    position, pair, windows = work
    return position * end + pair * sum(count * _visible_pairs(end, window) for window, count in windows)


def _visible_pairs(end: int, window: int | None) -> float:
    """Return the pairs of a query among the first positions and a key that it sees: itself and those before it, as far
    as the window reaches."""
    seen = end if window is None else min(end, window)
    return seen * (seen + 1) / 2 + seen * (end - seen)


@lru_cache(maxsize=1024)
def _cut(work: _Work, length: int, count: int, unit: int) -> tuple[range, ...]:
    total = _work(work, length)
    ends = [0]
    for part in range(1, count):
        share = total * part / count
        after = bisect_left(range(length // unit + 1), share, key=lambda units: _work(work, units * unit))
        nearest = min((after - 1, after), key=lambda units: abs(_work(work, units * unit) - share)) * unit
        ends.append(min(max(nearest, ends[-1] + unit), length - (count - part) * unit))
    return tuple(range(start, end) for start, end in zip(ends, [*ends[1:], length], strict=True))
