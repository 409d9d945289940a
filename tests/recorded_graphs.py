"""Graphs of a device in name only: operators are recorded at their addresses, and replayed without the host's code.

As with a CUDA graph, whatever the host computed while it captured stays as it was: numbers, branches, and tensors that
aren't those of the capture. A capture changes no tensor that was there before.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from muster.parallel import cuda_graphs
from muster.parallel.cuda_graphs import PassGraphs
from muster.train import trainer


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple, dict, Any]] = []
        self.before: dict[int, tuple[Tensor, Tensor]] = {}
        """Tensors from before the capture that it wrote into, each with what it held."""
        self._made: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        given = {one.name: value for one, value in zip(func._schema.arguments, args, strict=False)} | kwargs
        is_written = {one.name for one in func._schema.arguments if one.alias_info and one.alias_info.is_write}
        written = [value for name, value in given.items() if name in is_written]
        for tensor in tree_leaves(written):
            if isinstance(tensor, Tensor) and _place(tensor) not in self._made and _place(tensor) not in self.before:
                self.before[_place(tensor)] = (tensor, tensor.clone())
        out = func(*args, **kwargs)
        is_view = any(one.alias_info is not None and not one.alias_info.is_write for one in func._schema.returns)
        if not is_view:
            self.calls.append((func, args, kwargs, out))
            for tensor in tree_leaves(out):
                if isinstance(tensor, Tensor) and _place(tensor) not in self.before:
                    self._made.add(_place(tensor))
        return out


class RecordedGraph:
    """A graph of operators on a CPU."""

    def capture(self, run: Callable[[], None]) -> None:
        recorder = _Recorder()
        with recorder:
            run()
        for tensor, held in recorder.before.values():
            tensor.detach().copy_(held)
        self._calls = recorder.calls

    def replay(self) -> None:
        for func, args, kwargs, out in self._calls:
            found = func(*args, **kwargs)
            for place, value in zip(tree_leaves(out), tree_leaves(found), strict=True):
                if isinstance(place, Tensor) and place is not value and place.numel():
                    place.detach().copy_(value)


@contextmanager
def recorded_graphs() -> Iterator[None]:
    """Let trainers capture and replay on a CPU."""
    with (
        patch.object(cuda_graphs, "device_graphs", lambda: (RecordedGraph(), RecordedGraph())),
        patch.object(trainer, "has_cuda_graphs", lambda device: True),
    ):
        yield


@contextmanager
def one_pair_for_all() -> Iterator[None]:
    """All micro-batches in flight are captured in the same memory."""
    forward = PassGraphs.forward

    def faulty(self: PassGraphs, micro_batch: int, x: Tensor | None) -> Tensor:
        self._free = [0]
        return forward(self, micro_batch, x)

    with recorded_graphs(), patch.object(PassGraphs, "forward", faulty):
        yield


@contextmanager
def stale_inputs() -> Iterator[None]:
    """Replays read the hidden states of the capture."""
    fill = cuda_graphs._fill

    def faulty(place: Tensor | None, value: Tensor | None) -> None:
        fill(place, None if value is not None and value.is_floating_point() else value)

    with recorded_graphs(), patch.object(cuda_graphs, "_fill", faulty):
        yield
