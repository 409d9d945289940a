"""Sizes of the pieces in which large tensors are processed: logits by the loss, scores by piecewise attention, numbers
that decide on dropout, elements that are made of codes of 4 bits.

On a CPU they stay in a core's cache; elsewhere they are large enough to fill a device.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from muster.cost.memory.kernel_workspace import DEFAULT_KERNEL_WORKSPACE, KERNEL_WORKSPACES, KernelWorkspace

_WORKSPACES = dict(KERNEL_WORKSPACES)


def chunk_elements(kind: Literal["loss", "attention", "dropout", "codes"], device_type: str) -> int:
    """Return the elements of one piece on a type of device."""
    workspace: KernelWorkspace = _WORKSPACES.get(device_type, DEFAULT_KERNEL_WORKSPACE)
    if kind == "dropout":
        return workspace.dropout_chunk_numbers
    if kind == "codes":
        return workspace.dequantized_numbers
    return workspace.loss_chunk_logits if kind == "loss" else workspace.attention_chunk_scores


@contextmanager
def large_chunks() -> Iterator[None]:
    """Compute in this context in pieces as large as on a GPU, on any device."""
    saved = _WORKSPACES.copy()
    _WORKSPACES.clear()
    try:
        yield
    finally:
        _WORKSPACES.update(saved)
