"""Observation of the tensors that autograd saves for the backward: the measured side of activation memory."""

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

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
    meanwhile; a storage that was emptied since (such as a resharded parameter's) counts nothing. One that `backward`
    has let go counts what it had: nothing here keeps activations that a step frees.
    """
    found: list[list[_SeenStorage]] = []
    results = []
    for forward in forwards:
        by_place: dict[int, _SeenStorage] = {}
        seen: list[_SeenStorage] = []

        def see(tensor: Tensor, by_place: dict[int, _SeenStorage] = by_place, seen: list[_SeenStorage] = seen) -> None:
            storage = tensor.untyped_storage()
            before = by_place.get(storage._cdata)
            if before is None or before.reference() is None:  # another one may lie where one that is gone was
                by_place[storage._cdata] = own = _SeenStorage(weakref.ref(storage), storage.nbytes())
                seen.append(own)

        with observe_saved_tensors(see):
            results.append(forward())
        found.append(seen)
    backward()
    others = {param.untyped_storage()._cdata for param in params}
    totals = [sum(one.bytes_beside(others) for one in seen) for seen in found]
    del results  # without a backward the graphs had to live until here
    return totals


class _SeenStorage(NamedTuple):
    reference: weakref.ref
    num_bytes: int
    """Its size when it was saved."""

    def bytes_beside(self, others: Collection[int]) -> int:
        storage = self.reference()
        if storage is None:
            return self.num_bytes
        return 0 if storage._cdata in others else storage.nbytes()
