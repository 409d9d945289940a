"""Updates by the host within a step's last backward: which layers' gradients are complete (Fuyou, Liao et al. 2024,
arXiv:2403.06504).

The rank's own thread tells as soon as the last backward has reduced a group of gradients; a thread of the host's cores
waits for those of a layer, and updates it while the layers before it are still computed.
"""

from collections.abc import Callable, Collection, Sequence
from functools import partial
from threading import Condition
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from muster.parallel.fsdp import LastBackward, fsdp_groups, local_tensor
from muster.schedule.host_update import PARTS_AHEAD

if TYPE_CHECKING:
    from muster.parallel.stage import DecoderStage

MAX_HELD = PARTS_AHEAD + 1
"""Parts whose complete gradients wait in host memory for their updates while a backward goes on."""


class BackwardUpdates:
    """Parts of a stage's parameters, the layers, that the host may update within the last backward of a step.

    A part is complete once all groups with any of its parameters are. Any of the methods that wait raises what `fail`
    was given.
    """

    def __init__(self, parts: Sequence[Collection[str]]) -> None:
        """`parts`: names of the parameters of each."""
        self._parts = [frozenset(names) for names in parts]
        self._groups: list[frozenset[str]] = []
        self.is_active = False
        """True in a step with such updates."""
        self.names = frozenset[str]()
        """Parameters that the step under way updates within its last backward."""
        self._changed = Condition()
        self._missing: list[set[int]] = []
        """Groups that each part waits for."""
        self._ready: list[list[Callable[[], object]]] = []
        self._num_held = 0
        """Parts that are complete and not yet updated."""
        self._error: BaseException | None = None

    def add_group(self, names: Collection[str]) -> int:
        """Return the number of a group of parameters whose gradients are complete together."""
        self._groups.append(frozenset(names))
        return len(self._groups) - 1

    def has(self, part: int) -> bool:
        """Return True if the step under way updates a part within its last backward."""
        return self.is_active and part < len(self._parts)

    def begin_step(self) -> None:
        """Begin a step with such updates."""
        self._missing = [{n for n, own in enumerate(self._groups) if own & names} for names in self._parts]
        self._ready = [[] for _ in self._parts]
        self._num_held, self._error, self.is_active = 0, None, True
        self.names = frozenset[str]().union(*self._parts)

    def end_step(self) -> None:
        """End a step, whose updates are made."""
        self.is_active, self.names = False, frozenset()

    def note_complete(self, group: int, ready: Callable[[], object] | None = None) -> None:
        """Tell that the gradients of a group are complete, once `ready` returns."""
        with self._changed:
            for part, missing in enumerate(self._missing):
                if group in missing:
                    missing.remove(group)
                    self._ready[part] += [] if ready is None else [ready]
                    self._num_held += not missing
            self._changed.notify_all()

    def note_backward_over(self) -> None:
        """Tell that no group gets any more gradients."""
        for group in range(len(self._groups) if self.is_active else 0):
            self.note_complete(group)

    def note_updated(self) -> None:
        """Tell that a part is updated, and its gradients no longer needed."""
        with self._changed:
            self._num_held -= 1
            self._changed.notify_all()

    def wait_complete(self, part: int) -> None:
        """Wait until the gradients of a part are complete."""
        self._wait(lambda: not self._missing[part])
        for ready in self._ready[part]:
            ready()

    def wait_for_room(self) -> None:
        """Wait until host memory has room for the gradients of one more part."""
        self._wait(lambda: self._num_held <= MAX_HELD)

    def fail(self, error: BaseException) -> None:
        """Let whoever waits raise an error."""
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def _wait(self, is_over: Callable[[], bool]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or is_over())
            if self._error is not None:
                raise self._error


def watch_gradients(stage: "DecoderStage", parts: Sequence[Collection[str]]) -> None:
    """Let a step's last backward tell of the complete gradients of each of these parts of a stage, by the names of
    their parameters, so that the host may update them within it.

    Groups off the device tell once their sums are in host memory, others once they are reduced (under z1, too, group by
    group), and where one rank holds the stage whole each parameter once its gradient is added up.
    """
    stage.backward_updates = updates = BackwardUpdates(parts)
    last, parameters, groups = stage.last_backward, stage.parameters, fsdp_groups(stage.module)
    last.reduces_beside |= stage.zero == "z1"
    stage.param_offload.watch(updates, last)
    names = {id(parameter): name for name, parameter in stage.module.named_parameters()}
    for group in groups:
        own = [names[id(param.sharded_param)] for param in group.fsdp_params]
        if own and stage.param_offload.group_of(own) is None:
            note = partial(_note_reduced, group, own, parameters, last, updates, updates.add_group(own))
            group.post_backward = partial(_then, group.post_backward, note)
    for name, parameter in stage.module.named_parameters() if not groups else ():
        if parameter.requires_grad:
            note = partial(_note_added, name, parameters, last, updates, updates.add_group([name]))
            parameter.register_post_accumulate_grad_hook(note)


def _then(call: Callable[..., None], after: Callable[[], None], *args: object) -> None:
    call(*args)
    after()


def _note_reduced(
    group: Any,  # of a private type
    names: Sequence[str],
    parameters: dict[str, Tensor],
    last: LastBackward,
    updates: BackwardUpdates,
    number: int,
) -> None:
    if not last.is_under_way or not updates.is_active:
        return
    for name, param in zip(names, group.fsdp_params, strict=True):
        if param.sharded_param.grad is not None:
            parameters[name].grad = local_tensor(param.sharded_param.grad)
    if parameters[names[0]].device.type == "cpu":
        updates.note_complete(number)
        return
    streams = group.comm_ctx.reduce_scatter_stream, group.comm_ctx.all_reduce_stream
    events = [stream.record_event() for stream in streams]
    updates.note_complete(number, lambda: [event.synchronize() for event in events])


def _note_added(
    name: str,
    parameters: dict[str, Tensor],
    last: LastBackward,
    updates: BackwardUpdates,
    number: int,
    parameter: Tensor,
) -> None:
    if not last.is_under_way or not updates.is_active:
        return
    if parameter.grad is not None:  # master weights have taken it otherwise
        parameters[name].grad = parameter.grad
    device = parameter.device
    event = None if device.type == "cpu" else torch.get_device_module(device).current_stream(device).record_event()
    updates.note_complete(number, None if event is None else event.synchronize)
