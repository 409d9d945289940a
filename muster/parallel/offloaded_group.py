"""One group of parameters off the device (`muster.parallel.param_offload`), which `fully_shard` gathers at once."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from muster.layout.host_updates import layer_of
from muster.parallel.allocation_meter import as_host_memory, host_memory
from muster.parallel.file_store import FileSlot
from muster.spec.layer_strategy import Tier

if TYPE_CHECKING:
    from muster.parallel.param_offload import ParamOffload

_Wait = Callable[[], None]


def no_wait() -> None:
    """Wait for nothing."""


def nothing_leaves() -> _Wait:
    """Leave nothing to wait for."""
    return no_wait


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
        """Norms of the sums on disk, and of those that an update within the backward takes."""
        self._gradient_slot: FileSlot | None = None
        self.number = 0
        """Number of the group among those that tell of their gradients."""
        self._is_here_for_update = False
        """True if the master weights are in memory while passes still read their copies on disk."""
        self._held: list[Tensor] = []
        """Buffers of gradients that are complete."""
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
        return no_wait if was_here else self._start_read(reads)

    def bring_in_backward(self) -> _Wait:
        """Start to bring the master weights on disk into memory for an update within the backward, in another thread
        than that of the passes, which may still read their copies; the returned function waits for the end."""
        assert not self._is_here, "passes put what a checkpoint has brought into memory back to the disk"
        self._is_here_for_update = self._is_here = True
        return self._start_read(reads=True)

    def _start_read(self, reads: bool) -> _Wait:
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
            return no_wait
        values, dtype = list(self.values.values()), self._owner.compute_dtype
        is_same = all(value.dtype == dtype for value in values)
        if not self.on_disk:
            if self._is_changed:
                self._copies = values if is_same else self._converted(values)
            self._is_changed = False
            return no_wait
        self._owner.before_emptying()
        write = self._prepare_write(values, [value.to(dtype) for value in values]) if self._is_changed else no_wait
        self._is_changed = self._is_here = self._is_here_for_update = False

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
        if self._is_changed or (self.on_disk and self._is_here and not self._is_here_for_update):
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
        updates = self._owner.backward_updates
        completes = self._owner.completes_gradients and updates is not None and not updates.names.isdisjoint(self.names)
        if not new:
            return partial(self._note_complete, no_wait) if completes else nothing_leaves
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
            added = no_wait
            if on_disk:
                own = {name: (buffers[name], arrived[name]) for name in arrived if name in on_disk}
                added = self._add_on_disk(own, stays=completes)
            return self._note_complete(added) if completes else added

        return add

    def _is_summed_on_disk(self, name: str) -> bool:
        return self.on_disk and layer_of(name) is not None and name not in self._owner.kept_gradients

    def _add(self, name: str, gradient: Tensor) -> None:
        if name in self.gradients:
            self.gradients[name] += gradient
        else:
            self.gradients[name] = self._owner.empty_on_host(gradient.shape, gradient.dtype).copy_(gradient)

    def _note_complete(self, added: _Wait) -> _Wait:
        """Return a function that waits for `added`, and tells that the sums in host memory are complete."""
        owner = self._owner
        assert owner.backward_updates is not None
        updates = owner.backward_updates

        def note() -> None:
            added()
            if not self.on_disk:
                self.gradient_norms = {name: torch.linalg.vector_norm(one) for name, one in self.gradients.items()}
            updates.note_complete(self.number)
            if self.on_disk:
                updates.wait_for_room()

        return note

    @host_memory()
    def attach_complete(self) -> None:
        """Set `.grad` of each master weight to its complete sum, for an update within the backward."""
        for name, total in self.gradients.items():
            self.values[name].grad = total

    def drop_complete(self) -> None:
        """Drop these sums, after the update."""
        for value in self.values.values():
            value.grad = None
        self.gradients.clear()
        for buffer in self._held:
            self._owner.link.pool.release(buffer)
        self._held.clear()

    def _add_on_disk(self, arrived: Mapping[str, tuple[Tensor, Tensor]], stays: bool) -> _Wait:
        """Start to add gradients, each in a buffer, to the sums on disk, or those to them where they stay in host
        memory; the returned function waits for the end."""
        pool, files = self._owner.link.pool, self._owner.files
        buffers, sums = [list(one) for one in zip(*arrived.values(), strict=True)]
        slot = self._gradient_slot
        if slot is None and not stays:
            slot = self._gradient_slot = files.take(sum(gradient.nbytes for gradient in sums))
        earlier, freed = list[Tensor](), [] if stays else list(buffers)
        if self.gradient_norms:
            more = [pool.acquire(buffer.numel()) for buffer in buffers]
            earlier = [_as(buffer, gradient) for buffer, gradient in zip(more, sums, strict=True)]
            freed += more

        def add() -> None:
            if earlier:
                assert slot is not None
                slot.read(earlier)
                torch._foreach_add_(sums, earlier)
            if not stays:
                assert slot is not None
                slot.write(sums)

        added = files.submit(add)
        self.gradient_norms = dict(zip(arrived, sums, strict=True))

        def finish() -> None:
            added()
            # Not on the files' thread, which may have another number of threads, and so another order of additions.
            self.gradient_norms = {
                name: torch.linalg.vector_norm(total) for name, total in zip(arrived, sums, strict=True)
            }
            if stays:
                self.gradients, self._held = dict(zip(arrived, sums, strict=True)), buffers
            for buffer in freed:
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
            return no_wait
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


def is_single(group: Any) -> bool:  # of a private type
    """Return True if one rank holds a group whole, which `fully_shard` then doesn't gather ahead."""
    return group._all_gather_process_group.size() == 1


@host_memory()
def _without_memory(like: Tensor) -> Tensor:
    """Return a tensor of the same shape without memory."""
    made = torch.empty_like(like)
    made.untyped_storage().resize_(0)
    return as_host_memory(made)


def _as(buffer: Tensor, like: Tensor) -> Tensor:
    return buffer.view(like.dtype).view(like.shape)
