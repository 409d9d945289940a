"""Slices of sequences as units of a pipeline (SPPO, arXiv:2503.10377; Seq1F1B, arXiv:2406.03488).

A slice attends to the keys and values of the slices before it, which stay on the stage. So on every stage the forwards
of a micro-batch's slices run from the first to the last. The gradient of a slice's keys and values is complete once all
later slices have added to it, so backwards run from the last to the first.
"""

from collections.abc import Iterator


def forward_units(num_micro_batches: int, num_slices: int) -> Iterator[tuple[int, int]]:
    """Yield (micro-batch, slice) in the order of a stage's forwards."""
    return ((index, part) for index in range(num_micro_batches) for part in range(num_slices))


def backward_units(num_micro_batches: int, num_slices: int) -> Iterator[tuple[int, int]]:
    """Yield (micro-batch, slice) in the order of a stage's backwards."""
    return ((index, part) for index in range(num_micro_batches) for part in reversed(range(num_slices)))
