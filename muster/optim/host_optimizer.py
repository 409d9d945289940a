"""Optimizer whose state lies in host memory for some of the parameters, which the host's cores then update.

The parameters are updated in parts (`muster.schedule.host_update`). Gradients and parameters of a part are copied into
buffers in host memory, updated there by an optimizer of the part's own, and the parameters copied back: the same
kernels over the same tensors as without offload, so that the results are the same on a CPU, bit for bit. Other parts
the device updates where their parameters are: it is their state that is copied there, and back.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from muster.config.optim_config import OptimConfig
from muster.layout.tensor_layout import TensorLayout
from muster.optim.base import Optimizer
from muster.optim.build import build_optimizer
from muster.optim.state_store import StateStore, StoredPart
from muster.parallel.allocation_meter import as_device_memory, host_memory
from muster.parallel.offload import HostLink
from muster.parallel.world import World

PartKey = tuple[int, int]
"""Stage and number of a part of its parameters."""


PENDING_GRADIENT = "pending_grad"
"""Name of a gradient that waits for its update, among the state of its parameter."""


class PendingUpdate(NamedTuple):
    """An update with gradients that wait in host memory until the next step."""

    learning_rate: float
    step_count: int
    """Steps of the optimizer before it."""


class HostPart:
    """One part of a rank's parameters, and its optimizer in host memory."""

    @host_memory()
    def __init__(
        self,
        params: Mapping[str, Tensor],
        build: Callable[[Mapping[str, Tensor]], Optimizer],
        link: HostLink,
        is_home: bool = False,
    ):
        """Build the part's optimizer; `is_home`: the parameters themselves lie in host memory when they are updated."""
        self.params = params
        self._link = link
        self._hosted: Mapping[str, Tensor] = params
        """Parameters in host memory, which have memory only while they are updated."""
        if not is_home:
            self._hosted = {name: torch.empty_like(param, device=link.host_device) for name, param in params.items()}
        self.optimizer = build(self._hosted)
        self._is_home = is_home
        self.stored: StoredPart | None = None
        """State on disk between updates; None where it stays in host memory."""
        self._buffers: list[Tensor] = []
        self._free()

    def fetch(self, in_backward: bool = False) -> Callable[[], None]:
        """Start to copy gradients and parameters to the host; the returned function waits for the end. `in_backward`:
        see `HostLink.copy`."""
        pairs = []
        for name, param in self.params.items():
            if param.grad is not None:
                hosted = self._hosted[name]
                hosted.data, hosted.grad = self._buffer(param), self._buffer(param)
                pairs += [(hosted.data, param.detach()), (hosted.grad, param.grad)]
        return self._link.copy(pairs, host_waits=True, after_device=not in_backward)

    def scale_gradients(self, factor: float) -> None:
        """Multiply the gradients in host memory."""
        found = [hosted.grad for hosted in self._hosted.values() if hosted.grad is not None]
        if factor != 1 and found:
            torch._foreach_mul_(found, factor)

    @host_memory()
    def update(self, lr: float) -> None:
        """Take one step of the part's optimizer over the parameters in host memory that have a gradient."""
        self.optimizer.step(lr)
        if self.stored is not None:
            self.stored.is_changed = True

    def pending_gradients(self) -> dict[str, Tensor]:
        """Return the gradients in host memory that wait for an update, by parameter."""
        return {name: hosted.grad for name, hosted in self._hosted.items() if hosted.grad is not None}

    def expect_gradients(self, names: Collection[str]) -> None:
        """Make room for gradients of these parameters that wait for an update, which a checkpoint then fills."""
        self._free()
        for name, param in ((name, param) for name, param in self.params.items() if name in names):
            hosted = self._hosted[name]
            hosted.data, hosted.grad = self._buffer(param), self._buffer(param)

    def take_parameters(self) -> None:
        """Copy the parameters beside gradients that a checkpoint has filled."""
        pairs = [(self._hosted[name].data, self.params[name].detach()) for name in self.pending_gradients()]
        self._link.copy(pairs, host_waits=True)()

    def give_back(self, in_backward: bool = False) -> Callable[[], None]:
        """Start to copy the parameters back; the returned function waits for the end and frees the buffers.
        `in_backward`: see `HostLink.copy`."""
        pairs = [
            (param.detach(), self._hosted[name].data)
            for name, param in self.params.items()
            if self._hosted[name].grad is not None
        ]
        wait = self._link.copy(pairs, host_waits=in_backward, after_device=not in_backward)

        def finish() -> None:
            wait()
            self._free()

        return finish

    def _buffer(self, like: Tensor) -> Tensor:
        buffer = self._link.pool.acquire(like.nbytes)
        self._buffers.append(buffer)
        return buffer.view(like.dtype).view(like.shape)

    def _free(self) -> None:
        for hosted in () if self._is_home else self._hosted.values():
            hosted.data, hosted.grad = hosted.new_empty(0), None
        for buffer in self._buffers:
            self._link.pool.release(buffer)
        self._buffers.clear()


class FetchedPart:
    """One part of a rank's parameters that the device updates, and its optimizer, whose state lies in host memory
    between updates.

    The tensors of the state keep their identity and get other memory.
    """

    @host_memory()
    def __init__(
        self, params: Mapping[str, Tensor], build: Callable[[Mapping[str, Tensor]], Optimizer], link: HostLink
    ) -> None:
        self.optimizer = build(params)
        self._link = link
        self._state = [tensor for _, tensor in self.optimizer.state().values()]
        self._in_host_memory: list[Tensor] = []
        for tensor in self._state:
            kept = link.pool.acquire(tensor.nbytes).view(tensor.dtype).view(tensor.shape)
            kept.copy_(tensor)
            tensor.data = kept
            self._in_host_memory.append(kept)

    def fetch_state(self) -> Callable[[], None]:
        """Start to copy the state to the device; the returned function waits for the end."""
        device = self._link.device
        for tensor, kept in zip(self._state, self._in_host_memory, strict=True):
            tensor.data = as_device_memory(torch.empty_like(kept, device=device))
        return self._link.copy(list(zip(self._state, self._in_host_memory, strict=True)), host_waits=True)

    def return_state(self) -> Callable[[], None]:
        """Start to copy the state back; the returned function waits for the end and frees the device's memory."""
        wait = self._link.copy(list(zip(self._in_host_memory, self._state, strict=True)), host_waits=True)

        def finish() -> None:
            wait()
            for tensor, kept in zip(self._state, self._in_host_memory, strict=True):
                tensor.data = kept

        return finish


class HostOptimizer(Optimizer):
    """Optimizer that steps some parameters on the device, and others in parts on the host, or on the device with state
    from there.

    `step` completes a step in which each part has been updated by `update`, or by nothing where there is no gradient.
    """

    def __init__(
        self,
        config: OptimConfig,
        params: Mapping[str, Tensor],
        layouts: Mapping[str, TensorLayout],
        world: World | None,
        parts: Mapping[PartKey, Sequence[str]],
        link: HostLink,
        on_disk: Collection[PartKey] = (),
        store: StateStore | None = None,
        at_home: Collection[PartKey] = (),
        on_device: Collection[PartKey] = (),
    ) -> None:
        """Build the optimizers of the device and of the parts; `on_disk` are those whose state lies in `store` between
        updates, `at_home` those whose parameters are in host memory in an update without being copied, `on_device`
        those that the device updates."""

        def build(own: Mapping[str, Tensor]) -> Optimizer:
            return build_optimizer(config, own, {name: layouts[name] for name in own}, world)

        away = {name for names in parts.values() for name in names}
        self.resident = build({name: param for name, param in params.items() if name not in away})
        own = {key: {name: params[name] for name in names if name in params} for key, names in parts.items()}
        self.parts = {
            key: HostPart(held, build, link, key in at_home) for key, held in own.items() if key not in on_device
        }
        """Parts that the host updates."""
        self.fetched = {key: FetchedPart(held, build, link) for key, held in own.items() if key in on_device}
        """Parts that the device updates."""
        self.store = store
        self.pending: PendingUpdate | None = None
        """Update of the next step, whose gradients are in the parts; None where updates aren't delayed."""
        for key in on_disk:
            part = self.parts[key]
            tensors = [tensor for _, tensor in part.optimizer.state().values()]
            assert store is not None
            part.stored = store.allocate(tensors)
            part.stored.write()()
        super().__init__(params)

    def update(self, key: PartKey, lr: float) -> None:
        """Update one part in host memory, as a part of the step that `step` completes."""
        part = self.parts[key]
        self._follow(part.optimizer)
        part.update(lr)

    def update_on_device(self, key: PartKey, lr: float) -> None:
        """Update one part whose state is on the device, as a part of the step that `step` completes."""
        optimizer = self.fetched[key].optimizer
        self._follow(optimizer)
        optimizer.step(lr)

    def update_pending(self, key: PartKey) -> None:
        """Update one part in host memory with the gradients that wait there, if any do."""
        if self.pending is not None:
            part = self.parts[key]
            if part.stored is not None:  # not read ahead by the step before where that was no delayed one
                part.stored.read()()
            part.optimizer.step_count, part.optimizer.starts = self.pending.step_count, self.starts
            part.update(self.pending.learning_rate)

    def expect_pending(self, pending: PendingUpdate | None, names: Collection[str]) -> None:
        """Make room for the gradients of an update that waits in a checkpoint, with those of these parameters; None:
        none does."""
        self.pending = pending
        for part in self.parts.values():
            part.expect_gradients(() if pending is None else names)

    def take_parameters(self) -> None:
        """Copy the parameters of an update that was in a checkpoint to the host, once all is loaded."""
        for part in self.parts.values():
            part.take_parameters()

    def _update(self, lr: float) -> None:
        self._follow(self.resident)
        self.resident.step(lr)

    def _follow(self, optimizer: Optimizer) -> None:
        optimizer.step_count, optimizer.starts, optimizer.slope = self.step_count, self.starts, self.slope

    def state(self) -> dict[str, tuple[str, Tensor]]:
        """Return the state (see `Optimizer.state`), and the gradients that wait for an update; what is on disk is read,
        and written after the next update."""
        for part in self.parts.values():
            if part.stored is not None:
                part.stored.read()()
                part.stored.is_changed = True  # the caller may fill it
        waiting = {
            f"{name}.{PENDING_GRADIENT}": (name, gradient)
            for part in self.parts.values()
            for name, gradient in part.pending_gradients().items()
        }
        return {key: entry for optimizer in self._optimizers for key, entry in optimizer.state().items()} | waiting

    @property
    def _optimizers(self) -> list[Optimizer]:
        parts = (*self.parts.values(), *self.fetched.values())
        return [self.resident, *(part.optimizer for part in parts)]

    def state_layouts(self) -> dict[str, TensorLayout]:
        return {key: layout for optimizer in self._optimizers for key, layout in optimizer.state_layouts().items()}

    def device_state_bytes(self) -> int:
        return self.resident.device_state_bytes()
