"""A GPU in name only: tensors with a shape, a dtype and a GPU's device but no memory, and no other ranks.

PyTorch's PrivateUse1 device, whose streams and events this module has, under FakeTensorMode, with PyTorch's fake
process group. A dispatch mode sees every operator: what the host waits for, tensors on another device, the order of
communication.
"""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# The fake group, which is registered with devices of its own: before another is added to them.
import torch.testing._internal.distributed.fake_pg
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

import muster
from muster.parallel.tensor_parallel_ops import IMPLEMENTATIONS

NAME = "fakegpu"
PACKAGE = f"{Path(muster.__file__).parent}/"

Known = dict[int, int]
"""Vector clock: for each stream, the number of its operations that are over before whatever comes next."""


def merge(into: Known, other: Known) -> None:
    """Let what comes next wait for what `other` knows, too."""
    for stream, number in other.items():
        into[stream] = max(into.get(stream, 0), number)


HOST: Known = {}
"""Operations that the host has waited for: all that it launches comes after them."""


class Stream:
    """A stream of the device, which remembers what it has waited for."""

    _ids = count()

    def __init__(self, *args: object, **options: object) -> None:
        self.id = next(Stream._ids)
        self.known: Known = {}

    def launch(self) -> int:
        """Add an operation; return its number in the stream."""
        merge(self.known, HOST)
        self.known[self.id] = self.known.get(self.id, 0) + 1
        return self.known[self.id]

    def wait_stream(self, other: "Stream") -> None:
        merge(self.known, other.known)

    def wait_event(self, event: "Event") -> None:
        merge(self.known, event.known)

    def synchronize(self) -> None:
        merge(HOST, self.known)

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = event or Event()
        event.record(self)
        return event


class Event:
    """An event of the device, which is over at once for the host, and for a stream where it waits for it."""

    def __init__(self, enable_timing: bool = False, **options: object) -> None:
        self.known: Known = {}

    def record(self, stream: Stream | None = None) -> None:
        self.known = dict((stream or Module.current_stream()).known)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or Module.current_stream()).wait_event(self)

    def synchronize(self) -> None:
        merge(HOST, self.known)

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: "Event") -> float:
        return 1.0


class Module:
    """What `torch.cuda` is for CUDA."""

    Stream, Event = Stream, Event
    _current = Stream()

    @staticmethod
    def current_stream(device: object = None) -> Stream:
        return Module._current

    default_stream = current_stream

    @staticmethod
    @contextmanager
    def stream(stream: Stream) -> Iterator[None]:
        Module._current, before = stream, Module._current
        try:
            yield
        finally:
            Module._current = before

    @staticmethod
    @contextmanager
    def device(index: object) -> Iterator[None]:
        yield

    @staticmethod
    def current_device() -> int:
        return 0

    @staticmethod
    def device_count() -> int:
        return 8

    @staticmethod
    def is_available() -> bool:
        return True

    is_initialized = is_available

    @staticmethod
    def set_device(index: object) -> None: ...

    @staticmethod
    def _is_in_bad_fork() -> bool:
        return False

    @staticmethod
    def manual_seed_all(seed: int) -> None: ...

    @staticmethod
    def get_rng_state(device: object = None) -> torch.Tensor:
        return torch.zeros(0, dtype=torch.uint8)

    @staticmethod
    def set_rng_state(state: torch.Tensor, device: object = None) -> None: ...

    @staticmethod
    def synchronize(device: object = None) -> None:
        raise AssertionError("a step waits for the whole device")

    @staticmethod
    def get_device_capability(device: object = None) -> tuple[int, int]:
        return 9, 0

    @staticmethod
    def get_amp_supported_dtype() -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


_setup_privateuseone_for_python_backend(NAME, backend_module=Module)
dist.Backend.backend_capability["fake"] = [*dist.Backend.backend_capability.get("fake", []), NAME]
DEVICE = torch.device(NAME, 0)


@dataclass(frozen=True)
class Call:
    """A collective or a transfer, as one rank starts it."""

    name: str
    ranks: tuple[int, ...]
    """World ranks of the group; sender and receiver of a transfer."""
    numel: int

    @property
    def is_transfer(self) -> bool:
        """True for a message from one rank to another."""
        return self.name in ("send", "recv_")


class Watch(TorchDispatchMode):
    """Sees every operator of a step on one rank."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.syncs: list[str] = []
        """Functions of Muster in which the host waited for a result, each as often in a row as it did."""
        self.strays: list[str] = []
        """Operators that mixed tensors of the device and of the host, and the functions that called them."""
        self.calls: list[Call] = []

    def begin_step(self) -> None:
        """Forget what was seen."""
        self.syncs, self.strays, self.calls = [], [], []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "muster":  # an operator of a compiled block, which communicates
            TorchDispatchMode.__enter__(self)  # not that of a watch, which begins to watch
            try:
                return IMPLEMENTATIONS[func.overloadpacket.__name__](*args, **kwargs)
            finally:
                TorchDispatchMode.__exit__(self, None, None, None)
        if func.namespace == "c10d":
            self._see_communication(func.overloadpacket.__name__, args)
            return func(*args, **kwargs)
        if func.namespace == "symm_mem":  # of which a device in name only has no kernels
            return self._see_symmetric_memory(func.overloadpacket.__name__, *args, **kwargs)
        name = str(func)
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        devices = {x.device.type for x in tensors if x.dim() > 0}  # a scalar of the host goes with the launch
        if name == "aten._local_scalar_dense.default" and NAME in {x.device.type for x in tensors}:
            Module.current_stream().synchronize()
            self._see_sync()
            return 1.0
        if waits_for_copy(name, args, kwargs):
            Module.current_stream().synchronize()
            self._see_sync()
        if len(devices) > 1 and name not in _COPIES:
            self.strays.append(f"{name} in {caller()}")
        return func(*args, **kwargs)

    def _see_symmetric_memory(self, name: str, x: Any, matrices: Any, *rest: Any, return_A: bool = True) -> Any:
        """Note a fused operator as the collective that it is, and return results of its shapes."""
        group = dist.distributed_c10d._resolve_process_group(rest[-1])
        ranks, dim = tuple(dist.get_process_group_ranks(group)), rest[-2]
        self.calls.append(Call(name, ranks, x.numel()))
        shape = list(x.shape[:-1])
        if name == "fused_matmul_reduce_scatter":
            shape[dim] //= len(ranks)
            return x.new_empty(*shape, matrices.shape[1])
        shape[dim] *= len(ranks)
        whole = x.new_empty(*shape, x.shape[-1]) if return_A else None
        return whole, [x.new_empty(*shape, matrix.shape[1]) for matrix in matrices]

    def _see_sync(self) -> None:
        """Note a wait; a list is read element by element, in one wait."""
        function = caller()
        if not self.syncs or self.syncs[-1] != function:
            self.syncs.append(function)

    def _see_communication(self, name: str, args: Any) -> None:
        group = next(
            dist.ProcessGroup.unbox(arg)  # type: ignore[attr-defined]
            for arg in args
            if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type())
        )
        numel = sum(x.numel() for x in tree_leaves(args) if isinstance(x, torch.Tensor))
        if name == "gather_":  # only its root has room for the results
            numel = 0
        ranks = tuple(dist.get_process_group_ranks(group))
        if name in ("send", "recv_"):
            other = ranks[args[2]]
            ranks = (self.rank, other) if name == "send" else (other, self.rank)
        self.calls.append(Call(name, ranks, numel))


PINNED: dict[int, Any] = {}
"""Storages in pinned memory of the host, by their identity."""


def pin(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy in pinned memory, as `Tensor.pin_memory` does."""
    pinned = tensor.clone()
    storage = pinned.untyped_storage()
    PINNED[storage._cdata] = storage
    return pinned


def waits_for_copy(name: str, args: Any, kwargs: dict[str, Any]) -> bool:
    """Return True for a copy between device and host for which the host waits: any but a non-blocking one from or to
    pinned memory."""
    if name == "aten._to_copy.default":
        source, target, kind = args[0], None, kwargs.get("device")
        non_blocking = kwargs.get("non_blocking", False)
    elif name == "aten.copy_.default":
        (target, source), kind = args[:2], args[0].device
        non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
    else:
        return False
    if kind is None or {source.device.type, torch.device(kind).type} != {NAME, "cpu"}:
        return False
    host = source if source.device.type == "cpu" else target
    return not (non_blocking and host is not None and host.untyped_storage()._cdata in PINNED)


_COPIES = {"aten.copy_.default", "aten._to_copy.default", "aten._foreach_copy_.default"}


@dataclass(frozen=True)
class Operator:
    """An operator as it ran."""

    name: str
    """Without namespace and overload: `mm`, `_allgather_base_`."""
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    """Shapes and dtypes of its results."""
    operand_shapes: tuple[tuple[int, ...], ...]
    moved_bytes: int
    """Bytes of its operands, which it reads, and of its results, which it writes."""


class OperatorLog(Watch):
    """A watch that keeps all operators, in the order in which the host launched them."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.operators: list[Operator] = []

    def begin_step(self) -> None:
        super().begin_step()
        self.operators = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if func.namespace in ("aten", "c10d") and not func.is_view:
            read = {key: value for key, value in (kwargs or {}).items() if key != "out"}
            operands = [x for x in tree_leaves((args, read)) if isinstance(x, torch.Tensor)]
            results = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
            size = sum(x.numel() * x.element_size() for x in operands + results)
            shapes, operand_shapes = (tuple(tuple(x.shape) for x in tensors) for tensors in (results, operands))
            name, dtypes = func.overloadpacket.__name__, tuple(x.dtype for x in results)
            self.operators.append(Operator(name, shapes, dtypes, operand_shapes, size))
        return result

    def where(self, name: str) -> list[int]:
        """Return the places of the operators with a name."""
        return [at for at, one in enumerate(self.operators) if one.name == name]


def order_problems(watches: Sequence[Watch]) -> list[str]:
    """Return where ranks would not meet: NCCL matches the calls of a group, and the transfers of a pair, by their
    order."""
    problems = []
    own = {watch.rank: watch.calls for watch in watches}
    for ranks, is_transfer in dict.fromkeys((call.ranks, call.is_transfer) for calls in own.values() for call in calls):
        by_rank = [
            [call for call in own[rank] if (call.ranks, call.is_transfer) == (ranks, is_transfer)] for rank in ranks
        ]
        if is_transfer:
            sent, received = ([call.numel for call in calls] for calls in by_rank)
            if sent != received:
                problems.append(f"rank {ranks[0]} sends {sent} to {ranks[1]}, which receives {received}")
        elif any(calls != by_rank[0] for calls in by_rank):
            problems.append(f"ranks {ranks} call {[[call.name for call in calls] for calls in by_rank]}")
    return problems


def caller() -> str:
    """Return the innermost function of Muster that is running, as `file:function`."""
    frame = inspect.currentframe()
    while frame is not None and not frame.f_code.co_filename.startswith(PACKAGE):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_name}" if frame else "?"
