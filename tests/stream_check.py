"""A checker of streams: an operator that reads or writes what another stream may still write or read is found.

Each stream has a vector clock, which waits for events and streams merge (Lamport, 1978; Mattern, 1989; as in PyTorch's
CUDA stream sanitizer). A collective runs in a stream of its own, as NCCL's do: it begins after the stream that
launched it, and only `wait()` makes another stream go on after its end.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from tests.fake_gpu import NAME, Event, Module, Stream, Watch, caller, merge


@dataclass(frozen=True)
class Access:
    """An operator's use of a storage."""

    stream: int
    number: int
    """Number of the operator in its stream."""
    operator: str
    begin: int
    end: int
    """Bytes of the storage that it uses: those before `begin` and from `end` on it leaves alone."""

    def is_over(self, stream: Stream) -> bool:
        """Return True if what the stream runs next comes after it."""
        return stream.known.get(self.stream, 0) >= self.number

    def meets(self, other: "Access") -> bool:
        """Return True if another operator uses some of the same bytes."""
        is_same = (self.stream, self.number) == (other.stream, other.number)
        return not is_same and self.begin < other.end and other.begin < self.end


@dataclass
class Uses:
    """Uses of a storage since it was last written."""

    storage: Any
    """Kept, so that no other gets its identity."""
    written: list[Access] = field(default_factory=list)
    """The last write of each part: ranks may receive slices of a tensor from several others at a time."""
    read: list[Access] = field(default_factory=list)
    """Reads since then."""


class TrackedWork(dist.Work):
    """A collective under way: `wait()` lets the current stream wait for it, not the host."""

    def __init__(self, end: Event) -> None:
        super().__init__()
        self.end = end

    def wait(self, *args: object, **options: object) -> bool:
        merge(Module.current_stream().known, self.end.known)
        return True


class StreamCheck(Watch):
    """A watch that also follows the streams; `races` are the pairs of operators that nothing orders."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.races: list[str] = []
        self._uses: dict[int, Uses] = {}
        self._comm_streams: dict[object, Stream] = {}
        self._launched: list[Stream] = []

    def __enter__(self) -> "StreamCheck":
        self._patches = patched_groups(self)
        self._patches.__enter__()
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._patches.__exit__(None, None, None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        name = func.overloadpacket.__name__
        if func.namespace == "c10d":
            self._see_collective(name, args)
        elif not getattr(func, "is_view", False) and func.namespace != "prim":
            reads, writes = [], [x for x in tree_leaves(result) if isinstance(x, Tensor)]
            given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False))
            for argument in func._schema.arguments:
                value = (given | (kwargs or {})).get(argument.name)
                tensors = [x for x in tree_leaves(value) if isinstance(x, Tensor)]
                is_written = argument.alias_info is not None and argument.alias_info.is_write
                (writes if is_written else reads).extend(tensors)
            self._use(Module.current_stream(), name, reads, writes)
        return result

    def _see_collective(self, name: str, args: Any) -> None:
        tensors = [[x for x in tree_leaves(arg) if isinstance(x, Tensor)] for arg in args]
        first, others = tensors[0], [x for found in tensors[1:] for x in found]
        reads, writes = (first, []) if name == "send" else (others, first)
        key = (name, args[2]) if name in ("send", "recv_") else self.calls[-1].ranks
        stream = self._comm_streams.setdefault(key, Stream())
        merge(stream.known, Module.current_stream().known)
        self._use(stream, name, reads, writes)
        self._launched.append(stream)

    def _use(self, stream: Stream, name: str, reads: list[Tensor], writes: list[Tensor]) -> None:
        number, where = stream.launch(), f"{name} in {caller()}"
        for tensor, is_write in [*((x, False) for x in reads), *((x, True) for x in writes)]:
            if tensor.device.type not in (NAME, "meta"):  # what is made of a storage without memory is on `meta`
                continue
            storage = tensor.untyped_storage()
            uses = self._uses.setdefault(storage._cdata, Uses(storage))
            begin, end = _bytes_of(tensor)
            access = Access(stream.id, number, where, begin, end)
            for other in (*uses.written, *(uses.read if is_write else ())):
                if other.meets(access) and not other.is_over(stream):
                    self.races.append(f"{where} after {other.operator}")
            if is_write:
                uses.written = [*(one for one in uses.written if one.begin < begin or one.end > end), access]
                uses.read = [one for one in uses.read if one.begin < begin or one.end > end]
            else:
                uses.read = [
                    *(one for one in uses.read if one.stream != stream.id or (one.begin, one.end) != (begin, end)),
                    access,
                ]

    def take_work(self) -> TrackedWork:
        """Return the work of the collectives launched since the last call."""
        end = Event()
        for stream in self._launched:
            merge(end.known, stream.known)
        self._launched = []
        return TrackedWork(end)


def _bytes_of(tensor: Tensor) -> tuple[int, int]:
    """Return the first byte of its storage that a tensor may use, and the one behind the last."""
    begin, size = tensor.storage_offset(), tensor.element_size()
    last = sum((count - 1) * stride for count, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin * size, (begin + last + 1) * size if tensor.numel() else begin * size


@contextmanager
def patched_groups(check: StreamCheck) -> Iterator[None]:
    """Let groups return works that the checker follows."""

    def tracked(original: Any) -> Any:
        def call(group: Any, *args: Any, **options: Any) -> Any:
            work = original(group, *args, **options)
            return check.take_work() if isinstance(work, dist.Work) else work

        return call

    methods = {
        name: tracked(value)
        for name, value in vars(dist.ProcessGroup).items()
        if callable(value) and not name.startswith("__") and name not in ("boxed", "unbox", "_start_coalescing")
    }
    with patch.multiple(dist.ProcessGroup, **methods):
        yield
