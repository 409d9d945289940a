"""Parameters of a stage that lie in host memory or on disk, under `fully_shard` (ZeRO-Infinity, Rajbhandari et al.
2021, arXiv:2104.07857).

Each group of parameters that is gathered at once, a layer or what lies outside of layers, has its master weights in
host memory, or on disk, where it has a copy in the compute dtype for passes, too. A pass brings the copy of a group to
the device while the group before it computes; it is freed as soon as it is gathered. Gradients leave as they are
reduced, and are summed where they go. The host's optimizer updates master weights in place.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn

from muster.layout.host_updates import layer_of
from muster.parallel.allocation_meter import as_host_memory, host_memory
from muster.parallel.file_store import FileSlot, FileStore
from muster.parallel.fsdp import fsdp_groups
from muster.parallel.offload import HostLink
from muster.spec.layer_strategy import Tier

_Wait = Callable[[], None]


def _nothing() -> None: ...


def _stay() -> _Wait:
    return _nothing


class OffloadedGroup:
    """One group's parameters in host memory or on disk. `owner` has what all groups of a stage share."""

    def __init__(self, owner: "ParamOffload", group: Any, names: Sequence[str], tier: Tier) -> None:
        self.names = tuple(names)
        self.on_disk = tier == "disk"
        self.group = group  # of a private type
        self._owner = owner
        self.values: dict[str, Tensor] = {}
        """Master weights; without memory while they are on disk."""
        self._is_here = True
        """True if the master weights have memory."""
        self._is_changed = True
        """True if passes' copies aren't made of the master weights as they are now."""
        self._copies: list[Tensor] = []
        """Copies for passes in host memory; where the dtypes are the same, the master weights."""
        self._slot: FileSlot | None = None
        self._master_slot: FileSlot | None = None
        """Place of the master weights where passes read another dtype."""
        self._staged: list[Tensor] = []
        self._loaded: list[Tensor] = []
        self._emptied: list[Tensor] = []
        """Tensors without memory that `fully_shard` has in their place."""
        self._arrived: _Wait | None = None
        """Waits for a load that has begun."""
        self.gradients: dict[str, Tensor] = {}
        """Sums of gradients in host memory."""
        self.gradient_norms: dict[str, Tensor] = {}
        """Norms of the sums on disk."""
        self._gradient_slot: FileSlot | None = None
        self._late_update: _Wait | None = None
        """Update of the step before, which the group's next use waits for, or makes."""
        self._lock = Lock()

    # ------------------------------------------------------------------------------------------------------------------
    # Values

    def materialize(self) -> None:
        """Give the master weights memory of the host, and take that of the device back."""
        self._emptied = [param._sharded_param_data for param in self.group.fsdp_params]
        for name, param in zip(self.names, self.group.fsdp_params, strict=True):
            self.values[name] = self._owner.empty_on_host(param.sharded_size, param.orig_dtype)
            param._sharded_param_data.untyped_storage().resize_(0)

    def bring(self, reads: bool = True) -> _Wait:
        """Start to bring the master weights into memory, where the caller may change them; `reads`: False to leave
        them without values. The returned function waits for the end."""
        if reads:
            self.catch_up()
        self._late_update = None
        was_here, self._is_here, self._is_changed = self._is_here, True, True
        if was_here:
            return _nothing
        slot = self._master_slot or self._slot
        assert slot is not None

        def fill() -> None:  # in the files' thread, so that memory is taken and freed in the order of its work
            for name, param in zip(self.names, self.group.fsdp_params, strict=True):
                self.values[name].data = self._owner.empty_on_host(param.sharded_size, param.orig_dtype)
            if reads:
                slot.read(list(self.values.values()))

        return self._owner.files.submit(fill)

    @host_memory()
    def keep(self) -> _Wait:
        """Start to make passes' copies of changed master weights, and to put those of the disk there; the returned
        function waits for the end, and frees what is on disk."""
        if not self._is_here:
            return _nothing
        values, dtype = list(self.values.values()), self._owner.compute_dtype
        is_same = all(value.dtype == dtype for value in values)
        if not self.on_disk:
            if self._is_changed:
                self._copies = values if is_same else self._converted(values)
            self._is_changed = False
            return _nothing
        self._owner.before_emptying()
        write = self._prepare_write(values, [value.to(dtype) for value in values]) if self._is_changed else _nothing
        self._is_changed = self._is_here = False

        def leave() -> None:
            write()
            for value in values:
                value.data, value.grad = _without_memory(value), None

        return self._owner.files.submit(leave)

    def begin_update(self, factor: float) -> list[_Wait]:
        """Start to read what is on disk of master weights and gradients, which are multiplied by a factor; the returned
        functions wait for the end."""
        waits = []
        if not self._is_here:
            waits.append(self.bring())
            self._is_changed = False
        return [*waits, self._bring_gradients(factor)]

    def defer(self, update: _Wait) -> None:
        """Leave an update to the time before the group's next use; `update` makes it and calls `note_update`."""
        assert self._late_update is None, "a step's passes use each group"
        self._late_update = update

    def defer_nothing(self) -> None:
        """Drop an update that was deferred."""
        self._late_update = None

    def catch_up(self) -> None:
        """Make the update that was deferred, unless it has been made; another thread may be doing so."""
        with self._lock:
            update, self._late_update = self._late_update, None
            if update is not None:
                update()

    def note_update(self) -> None:
        """Let passes see that the master weights have changed."""
        self._is_changed = True
        if not self.on_disk:
            self.keep()()

    def _converted(self, values: Sequence[Tensor]) -> list[Tensor]:
        owner = self._owner
        made = self._copies or [owner.empty_on_host(value.shape, owner.compute_dtype) for value in values]
        for copy, value in zip(made, values, strict=True):
            copy.copy_(value)
        return made

    def _prepare_write(self, values: Sequence[Tensor], copies: Sequence[Tensor]) -> _Wait:
        files = self._owner.files
        if self._slot is None:
            self._slot = files.take(sum(copy.nbytes for copy in copies))
            if copies[0].dtype != values[0].dtype:
                self._master_slot = files.take(sum(value.nbytes for value in values))
        slot, masters = self._slot, self._master_slot

        def write() -> None:
            slot.write(copies)
            if masters is not None:
                masters.write(values)

        return write

    # ------------------------------------------------------------------------------------------------------------------
    # Passes

    def start_load(self) -> None:
        """Start to bring passes' copies to the device, or from the disk into host memory."""
        if self._arrived is not None or self.group.is_unsharded:
            return
        self.catch_up()
        if self._is_changed or (self.on_disk and self._is_here):
            self.keep()()
        if not self.on_disk:
            with self._gather_stream():
                self._arrived = self._copy_to_device(self._copies)
            return
        owner, dtype, slot = self._owner, self._owner.compute_dtype, self._slot
        assert slot is not None
        sizes = [param.sharded_size.numel() * dtype.itemsize for param in self.group.fsdp_params]
        self._staged = [owner.link.pool.acquire(size) for size in sizes]
        staged = self._staged
        self._arrived = owner.files.submit(lambda: slot.read(staged))

    def _copy_to_device(self, copies: Sequence[Tensor], host_waits: bool = False) -> _Wait:
        owner = self._owner
        sizes = [param._sharded_param_data.numel() for param in self.group.fsdp_params]
        flat = torch.empty(sum(sizes), dtype=owner.compute_dtype, device=owner.device)
        self._loaded = list(flat.split(sizes))
        pairs = [(loaded[: copy.numel()], copy.flatten()) for loaded, copy in zip(self._loaded, copies, strict=True)]
        return owner.link.copy(pairs, host_waits)

    def fill(self) -> None:
        """Let the group be gathered from copies on the device."""
        self.start_load()
        assert self._arrived is not None
        with self._gather_stream():
            self._arrived()
            self._arrived = None
            if self.on_disk:
                copies = [staged.view(self._owner.compute_dtype) for staged in self._staged]
                self._copy_to_device(copies, host_waits=True)()
                for staged in self._staged:
                    self._owner.link.pool.release(staged)
                self._staged = []
        for param, loaded in zip(self.group.fsdp_params, self._loaded, strict=True):
            param._sharded_param_data = loaded

    def clear(self) -> None:
        """Free the copies on the device."""
        for param, emptied in zip(self.group.fsdp_params, self._emptied, strict=True):
            param._sharded_param_data = emptied
        self._loaded = []

    def _gather_stream(self) -> AbstractContextManager:
        """Return the stream on which the group is gathered, as the current one."""
        device = self._owner.device
        if device.type == "cpu" or is_single(self.group):
            return nullcontext()
        return torch.get_device_module(device).stream(self.group.comm_ctx.all_gather_copy_in_stream)

    # ------------------------------------------------------------------------------------------------------------------
    # Gradients

    def take_gradients(self) -> Callable[[], _Wait]:
        """Start to bring the gradients that a backward has reduced to host memory.

        The returned function waits for that and adds them to their sums; the function that it returns waits for the end
        of this on disk.
        """
        params = zip(self.names, self.group.fsdp_params, strict=True)
        new = {
            name: param.sharded_param.grad.to_local() for name, param in params if param.sharded_param.grad is not None
        }
        if not new:
            return _stay
        for param in self.group.fsdp_params:
            param.sharded_param.grad = None
        owner = self._owner
        buffers = {name: owner.link.pool.acquire(gradient.nbytes) for name, gradient in new.items()}
        arrived = {name: _as(buffers[name], gradient) for name, gradient in new.items()}
        device = owner.device
        is_cpu = device.type == "cpu"
        stream = (
            nullcontext()
            if is_cpu
            else torch.get_device_module(device).stream(self.group.comm_ctx.reduce_scatter_stream)
        )
        with stream:
            copied = owner.link.copy([(arrived[name], new[name]) for name in new], host_waits=True)

        @host_memory()
        def add() -> _Wait:
            copied()
            new.clear()
            on_disk = {name for name in arrived if self._is_summed_on_disk(name)}
            for name in arrived.keys() - on_disk:
                self._add(name, arrived[name])
                owner.link.pool.release(buffers[name])
            if not on_disk:
                return _nothing
            return self._add_on_disk({name: (buffers[name], arrived[name]) for name in arrived if name in on_disk})

        return add

    def _is_summed_on_disk(self, name: str) -> bool:
        return self.on_disk and layer_of(name) is not None and name not in self._owner.kept_gradients

    def _add(self, name: str, gradient: Tensor) -> None:
        if name in self.gradients:
            self.gradients[name] += gradient
        else:
            self.gradients[name] = self._owner.empty_on_host(gradient.shape, gradient.dtype).copy_(gradient)

    def _add_on_disk(self, arrived: Mapping[str, tuple[Tensor, Tensor]]) -> _Wait:
        """Start to add gradients, each in a buffer, to the sums on disk; the returned function waits for the end."""
        pool, files = self._owner.link.pool, self._owner.files
        buffers, sums = [list(one) for one in zip(*arrived.values(), strict=True)]
        slot = self._gradient_slot
        if slot is None:
            slot = self._gradient_slot = files.take(sum(gradient.nbytes for gradient in sums))
        earlier: list[Tensor] = []
        if self.gradient_norms:
            more = [pool.acquire(buffer.numel()) for buffer in buffers]
            earlier = [_as(buffer, gradient) for buffer, gradient in zip(more, sums, strict=True)]
            buffers += more

        def add() -> None:
            if earlier:
                slot.read(earlier)
                torch._foreach_add_(sums, earlier)
            slot.write(sums)

        added = files.submit(add)
        self.gradient_norms = dict(zip(arrived, sums, strict=True))

        def finish() -> None:
            added()
            # Not on the files' thread, which may have another number of threads, and so another order of additions.
            self.gradient_norms = {
                name: torch.linalg.vector_norm(total) for name, total in zip(arrived, sums, strict=True)
            }
            for buffer in buffers:
                pool.release(buffer)

        return finish

    @host_memory()
    def read_sums(self) -> dict[str, Tensor]:
        """Return the sums of gradients on disk by name, in new memory."""
        sums = {name: as_host_memory(torch.empty_like(self.values[name])) for name in self.gradient_norms}
        if sums:
            assert self._gradient_slot is not None
            self._owner.files.submit(partial(self._gradient_slot.read, list(sums.values())))()
        return sums

    @host_memory()
    def _bring_gradients(self, factor: float) -> _Wait:
        """Start to read the sums of gradients on disk; the returned function waits for the end, multiplies them by a
        factor and attaches them to the master weights."""
        if not self.gradient_norms:
            return _nothing
        slot = self._gradient_slot
        assert slot is not None
        found: dict[str, Tensor] = {}
        names = list(self.gradient_norms)

        def fill() -> None:
            found.update({name: as_host_memory(torch.empty_like(self.values[name])) for name in names})
            slot.read(list(found.values()))

        read = self._owner.files.submit(fill)

        def attach() -> None:
            read()
            if factor != 1:
                torch._foreach_mul_(list(found.values()), factor)
            for name, gradient in found.items():
                self.values[name].grad = gradient

        return attach


class ParamOffload:
    """Parameters of one stage off the device."""

    link_type = HostLink

    def __init__(self, device: torch.device, compute_dtype: torch.dtype, store: FileStore | None = None) -> None:
        """`store`: the rank's file, opened by the first write where none is given."""
        self.device, self.compute_dtype, self.store = device, compute_dtype, store
        self.link = self.link_type(device)
        self.groups: list[OffloadedGroup] = []
        """In the order of a forward."""
        self.before_emptying: _Wait = _nothing
        """Waits until a checkpoint has copied the master weights that were brought into memory for it."""
        self.kept_gradients: frozenset[str] = frozenset()
        """Parameters whose gradients stay in host memory, since other ranks' are added to them."""
        self.gradient_factor = 1.0
        """Factor of the sums of gradients on disk, which is applied when they are read."""
        self._leaving: Callable[[], _Wait] = _stay
        """Waits until the last gradients have left the device, and starts to add those on disk."""
        self._added: _Wait = _nothing
        """Waits until those before them are on disk."""

    def attach(self, module: nn.Module, tier_of: Callable[[int | None], Tier]) -> None:
        """Take the groups of a sharded module whose layers lie in a tier off the device."""
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        for group in fsdp_groups(module):
            own = [names[id(param.sharded_param)] for param in group.fsdp_params]
            if not own or (tier := tier_of(layer_of(own[0]))) == "none":
                continue
            offloaded = OffloadedGroup(self, group, own, tier)
            self.groups.append(offloaded)
            group.unshard = partial(self._unshard, offloaded, group.unshard)
            group.wait_for_unshard = partial(self._wait_for_unshard, offloaded, group.wait_for_unshard)
            group.post_backward = partial(self._post_backward, offloaded, group.post_backward)
        self.groups.sort(key=lambda one: -1 if (layer := layer_of(one.names[0])) is None else layer)

    def materialize(self) -> dict[str, Tensor]:
        """Give the master weights memory of the host, and return them by name."""
        for group in self.groups:
            group.materialize()
        return self.values()

    @property
    def files(self) -> FileStore:
        """The rank's file."""
        if self.store is None:
            self.store = param_store(None)
        return self.store

    @host_memory()
    def empty_on_host(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return memory of the host, pinned for a GPU."""
        is_pinned = self.device.type != "cpu"
        return as_host_memory(torch.empty(shape, dtype=dtype, device=self.link.host_device, pin_memory=is_pinned))

    def values(self) -> dict[str, Tensor]:
        """Return the master weights by name; those on disk have memory after `bring` alone."""
        return {name: value for group in self.groups for name, value in group.values.items()}

    def bring(self) -> None:
        """Bring all master weights into memory, where the caller may change them."""
        for wait in [group.bring() for group in self.groups]:
            wait()

    def forget_updates(self) -> None:
        """Drop updates that were deferred, of a step that doesn't count."""
        for group in self.groups:
            group.defer_nothing()

    def refill(self, parameters: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        """Yield parameters that the caller gives other values, one group after another, so that host memory needn't
        hold all that is on disk; last those on the device."""
        left = dict(parameters)
        for group in self.groups:
            group.bring(reads=False)()
            yield {name: left.pop(name) for name in group.names}
            group.keep()()
        yield left

    def group_of(self, names: Sequence[str]) -> OffloadedGroup | None:
        """Return the group with some parameters; None where they are on the device."""
        return next((group for group in self.groups if not set(group.names).isdisjoint(names)), None)

    # ------------------------------------------------------------------------------------------------------------------
    # Passes

    def begin_pass(self, backward: bool) -> None:
        """Start to load what a pass gathers first."""
        for group in self._in_order(backward):
            if not group.group.is_unsharded:
                group.start_load()
                return

    def _in_order(self, backward: bool) -> Iterator[OffloadedGroup]:
        """Yield the groups in the order in which a pass gathers them: what lies outside of layers first."""
        layers = [group for group in self.groups if layer_of(group.names[0]) is not None]
        yield from (group for group in self.groups if layer_of(group.names[0]) is None)
        yield from reversed(layers) if backward else layers

    def _load_next(self, own: OffloadedGroup) -> None:
        backward = own.group._training_state.name == "PRE_BACKWARD"
        order = list(self._in_order(backward))
        for group in order[order.index(own) + 1 :][:1]:
            group.start_load()

    def _unshard(self, own: OffloadedGroup, unshard: Callable[[bool], None], async_op: bool = False) -> None:
        group = own.group
        if group.is_unsharded or group._all_gather_result is not None:
            unshard(async_op)
        elif is_single(group):  # which `wait_for_unshard` copies
            own.start_load()
            unshard(async_op)
        else:
            own.fill()
            unshard(async_op)
            own.clear()
            self._load_next(own)

    def _wait_for_unshard(self, own: OffloadedGroup, wait: _Wait) -> None:
        if own.group._all_gather_result is None or not is_single(own.group):
            wait()
            return
        own.fill()
        wait()
        own.clear()
        self._load_next(own)

    # ------------------------------------------------------------------------------------------------------------------
    # Gradients

    def _post_backward(self, own: OffloadedGroup, post_backward: Callable[..., None], *unused: object) -> None:
        self._leave()
        post_backward(*unused)
        self._leaving = own.take_gradients()

    def _leave(self) -> None:
        self._added()
        leaving, self._leaving = self._leaving, _stay
        self._added = leaving()

    def finish_gradients(self) -> None:
        """Wait until all gradients that backwards have reduced are added to their sums."""
        self._leave()
        self._leave()

    def attach_gradients(self) -> None:
        """Set `.grad` of each master weight to its sum, where this is in memory."""
        self.finish_gradients()
        for group in self.groups:
            for name, value in group.values.items():
                value.grad = group.gradients.get(name)

    def drop_gradients(self) -> None:
        """Drop the sums."""
        self.finish_gradients()
        self.gradient_factor = 1.0
        for group in self.groups:
            group.gradients.clear()
            group.gradient_norms = {}

    def read_sums(self) -> dict[str, Tensor]:
        """Return the sums on disk by name, in new memory."""
        return {name: total for group in self.groups for name, total in group.read_sums().items()}

    def gradient_norms(self) -> dict[str, Tensor]:
        """Return the norms of the sums on disk by name."""
        return {name: norm for group in self.groups for name, norm in group.gradient_norms.items()}


def is_single(group: Any) -> bool:  # of a private type
    """Return True if one rank holds a group whole, which `fully_shard` then doesn't gather ahead."""
    return group._all_gather_process_group.size() == 1


def param_store(folder: Path | None) -> FileStore:
    """Open a rank's file for parameters; see `FileStore`."""
    return FileStore(folder, "the parameters", "oparamd")


@host_memory()
def _without_memory(like: Tensor) -> Tensor:
    """Return a tensor of the same shape without memory."""
    made = torch.empty_like(like)
    made.untyped_storage().resize_(0)
    return as_host_memory(made)


def _as(buffer: Tensor, like: Tensor) -> Tensor:
    return buffer.view(like.dtype).view(like.shape)
