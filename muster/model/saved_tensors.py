"""Observation of the tensors that autograd saves for the backward: the measured side of activation memory."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_OBSERVERS: list[Callable[[Tensor], None]] = []


@contextmanager
def observe_saved_tensors(observer: Callable[[Tensor], None]) -> Iterator[None]:
    """Call `observer` with each tensor that autograd saves in this context.

    PyTorch calls only the innermost of nested hooks; here each observer sees all tensors.
    """

    def pack(tensor: Tensor) -> Tensor:
        for observe in _OBSERVERS:
            observe(tensor)
        return tensor

    _OBSERVERS.append(observer)
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield
    finally:
        _OBSERVERS.remove(observer)


def count_saved_bytes(fn: Callable[[], object], params: Iterable[Tensor]) -> int:
    """Return the bytes that autograd saves while the graph of fn's result lives: distinct storages without those of
    `params`.

    `params` is read after `fn` has run, so a generator yields parameters that were gathered meanwhile; a storage that
    was freed again (such as a resharded parameter's) counts nothing. `fn` runs a forward pass.
    """
    saved: dict[int, torch.UntypedStorage] = {}

    def see(tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        saved[storage._cdata] = storage

    with observe_saved_tensors(see):
        result = fn()
    for param in params:
        saved.pop(param.untyped_storage()._cdata, None)
    total = sum(storage.nbytes() for storage in saved.values())
    del result  # the graph had to live until here, or freed storages would have been reused and counted once

    return total
