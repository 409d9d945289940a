"""Observation of the tensors that autograd saves for the backward: the measured side of activation memory."""

from collections.abc import Callable, Iterable, Iterator, Sequence
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
    """Return the bytes that autograd saves while the graph of fn's result lives, without those of `params`. `fn` runs a
    forward pass."""
    return count_saved_bytes_of_each([fn], params)[0]


def count_saved_bytes_of_each(
    forwards: Sequence[Callable[[], object]], params: Iterable[Tensor], backward: Callable[[], object] = lambda: None
) -> list[int]:
    """Return the bytes that autograd saves in each of some forwards while the graphs of their results live: distinct
    storages without those of `params`.

    `params` is read after the forwards and `backward` have run, so a generator yields parameters that were gathered
    meanwhile; a storage that was freed again (such as a resharded parameter's) counts nothing.
    """
    found: list[dict[int, torch.UntypedStorage]] = []
    results = []
    for forward in forwards:
        saved: dict[int, torch.UntypedStorage] = {}

        def see(tensor: Tensor, saved: dict[int, torch.UntypedStorage] = saved) -> None:
            storage = tensor.untyped_storage()
            saved[storage._cdata] = storage

        with observe_saved_tensors(see):
            results.append(forward())
        found.append(saved)
    backward()
    others = {param.untyped_storage()._cdata for param in params}
    totals = [sum(one.nbytes() for place, one in saved.items() if place not in others) for saved in found]
    del results  # the graphs had to live until here, or freed storages would have been reused and counted once

    return totals
