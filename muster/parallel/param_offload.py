"""Parameters of a stage that lie in host memory or on disk, under `fully_shard` (ZeRO-Infinity, Rajbhandari et al.
2021, arXiv:2104.07857).

Each group of parameters that is gathered at once, a layer or what lies outside of layers, has its master weights in
host memory, or on disk, where it has a copy in the compute dtype for passes, too. A pass brings the copy of a group to
the device while the group before it computes; it is freed as soon as it is gathered. Gradients leave as they are
reduced, and are summed where they go. The host's optimizer updates master weights in place.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from muster.layout.host_updates import layer_of
from muster.parallel.allocation_meter import as_host_memory, host_memory
from muster.parallel.file_store import FileStore
from muster.parallel.fsdp import LastBackward, fsdp_groups
from muster.parallel.offload import HostLink
from muster.parallel.offloaded_group import OffloadedGroup, is_single, no_wait, nothing_leaves
from muster.spec.layer_strategy import Tier

if TYPE_CHECKING:
    from muster.parallel.backward_updates import BackwardUpdates

_Wait = Callable[[], None]


class ParamOffload:
    """Parameters of one stage off the device."""

    link_type = HostLink

    def __init__(self, device: torch.device, compute_dtype: torch.dtype, store: FileStore | None = None) -> None:
        """`store`: the rank's file, opened by the first write where none is given."""
        self.device, self.compute_dtype, self.store = device, compute_dtype, store
        self.link = self.link_type(device)
        self.groups: list[OffloadedGroup] = []
        """In the order of a forward."""
        self.before_emptying: _Wait = no_wait
        """Waits until a checkpoint has copied the master weights that were brought into memory for it."""
        self.kept_gradients: frozenset[str] = frozenset()
        """Parameters whose gradients stay in host memory, since other ranks' are added to them."""
        self.gradient_factor = 1.0
        """Factor of the sums of gradients on disk, which is applied when they are read."""
        self.backward_updates: BackwardUpdates | None = None
        """Told of groups whose sums are complete, in steps with updates within the last backward."""
        self._last_backward: LastBackward | None = None
        self._leaving: Callable[[], _Wait] = nothing_leaves
        """Waits until the last gradients have left the device, and starts to add those on disk."""
        self._added: _Wait = no_wait
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

    def watch(self, updates: "BackwardUpdates", last: LastBackward) -> None:
        """Let groups tell of the sums that a step's last backward completes."""
        self.backward_updates, self._last_backward = updates, last
        for group in self.groups:
            group.number = updates.add_group(group.names)

    @property
    def completes_gradients(self) -> bool:
        """True in a last backward within which the host updates layers."""
        if self.backward_updates is None or not self.backward_updates.is_active:
            return False
        return self._last_backward is not None and self._last_backward.is_under_way

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
        if self.completes_gradients and self.device.type == "cpu":  # nothing is under way: one layer earlier
            self._leave()

    def _leave(self) -> None:
        self._added()
        leaving, self._leaving = self._leaving, nothing_leaves
        self._added = leaving()

    def finish_gradients(self) -> None:
        """Wait until all gradients that backwards have reduced are added to their sums."""
        self._leave()
        self._leave()

    def attach_gradients(self) -> None:
        """Set `.grad` of each master weight to its sum, where this is in memory."""
        self.finish_gradients()
        taken = frozenset[str]() if self.backward_updates is None else self.backward_updates.names
        for group in self.groups:
            for name, value in group.values.items():
                if name not in taken:
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


def param_store(folder: Path | None) -> FileStore:
    """Open a rank's file for parameters; see `FileStore`."""
    return FileStore(folder, "the parameters", "oparamd")
