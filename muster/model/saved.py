"""Counting what autograd keeps for the backward pass: the measured side of the activation memory."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor


def count_saved_bytes(fn: Callable[[], object], params: Iterable[Tensor]) -> int:
    """Bytes that autograd keeps while the graph of fn's result lives: distinct storages, those of `params` left out.

    `params` is read after `fn` has run, so a generator over parameters that were gathered meanwhile sees those; a
    storage that was freed again (as a resharded parameter's is) counts nothing. `fn` runs a forward pass.
    """
    saved: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        saved[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = fn()
    for param in params:
        saved.pop(param.untyped_storage()._cdata, None)
    total = sum(storage.nbytes() for storage in saved.values())
    del result  # the graph had to live until here, or its tensors would have been freed and their places used again
    return total
