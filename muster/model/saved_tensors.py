"""Seeing what autograd keeps for the backward pass, and counting it: the measured side of the activation memory."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_OBSERVERS: list[Callable[[Tensor], None]] = []


@contextmanager
def observe_saved_tensors(observer: Callable[[Tensor], None]) -> Iterator[None]:
    """Calls `see` with each tensor that autograd saves meanwhile. Of hooks that are nested, PyTorch calls the innermost
    alone: here each one sees all."""

    def pack(tensor: Tensor) -> Tensor:
        for one in _OBSERVERS:
            one(tensor)
        return tensor

    _OBSERVERS.append(observer)
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield
    finally:
        _OBSERVERS.remove(observer)


def count_saved_bytes(fn: Callable[[], object], params: Iterable[Tensor]) -> int:
    """Bytes that autograd keeps while the graph of fn's result lives: distinct storages, those of `params` left out.

    `params` is read after `fn` has run, so a generator over parameters that were gathered meanwhile sees those; a
    storage that was freed again (as a resharded parameter's is) counts nothing. `fn` runs a forward pass.
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
    del result  # the graph had to live until here, or its tensors would have been freed and their places used again
    return total
