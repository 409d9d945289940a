"""Parameters and gradients of a stage at run time, sharded over the data-parallel ranks that share them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, UnshardHandle

from muster.model.decoder import Decoder
from muster.model.dtypes import DTYPES
from muster.parallel.axis import PendingTensor, TensorAxis
from muster.parallel.backward_updates import BackwardUpdates
from muster.parallel.file_store import FileStore
from muster.parallel.fsdp import (
    LastBackward,
    apply_fsdp,
    attach_local_gradients,
    drop_partial_reductions,
    local_parameters,
    materialize,
    reshard,
    unshard,
)
from muster.parallel.param_offload import ParamOffload
from muster.parallel.pending_reduction import PendingReduction
from muster.parallel.tensor_parallel import all_reduce_replicated_grads
from muster.parallel.world import World
from muster.spec.layer_strategy import ZeroLevel
from muster.spec.plan import Plan

if TYPE_CHECKING:
    from muster.parallel.cuda_graphs import PassGraphs


class ShardedStage:
    """Module of a stage with this rank's shards of its parameters, and the communication that gathers these and reduces
    their gradients."""

    module: Decoder
    world: World
    tp_axis: TensorAxis | None
    parameters: dict[str, Tensor]
    """This rank's shard of each parameter."""
    param_offload: ParamOffload
    param_offload_type = ParamOffload
    overlapping_devices = frozenset({"cuda"})
    """Types of devices whose collectives run beside passes."""
    pass_graphs: "PassGraphs | None" = None
    """Graphs that passes are replayed from once they are captured."""
    _replicated: dict[str, int]
    """Copies that tensor-parallel ranks hold, each of other data, by the parameters that have such."""

    def shard(self, zero: ZeroLevel, plan: Plan, index: int) -> None:
        """Shard the module over its data-parallel ranks."""
        apply_fsdp(self.module, self.world, zero, plan)
        # A rank that shares its parameters with no other reduces in its backwards: see `apply_fsdp`.
        self.zero: ZeroLevel = zero if self.world.groups.data_mesh() is not None else "z2"
        has_replicas = zero != "z1" and plan.mesh(index).dp_replicate > 1
        completes = (has_replicas or plan.grad_shard_size is not None) and plan.reduces_replicas_once
        self.last_backward = LastBackward(self.module, completes, self.zero == "z1" and self.overlaps_data_parallel)
        self._gathers_ahead: list[UnshardHandle] = []
        self.backward_updates = BackwardUpdates(())
        """Layers that the host updates within a step's last backward, where any are."""

    def allocate_parameters(self, plan: Plan, files: FileStore | None) -> dict[str, Tensor]:
        """Give the parameters memory, where the plan has them, and return them by name."""
        self.param_offload = self.param_offload_type(self.world.device, DTYPES[plan.precision], files)
        if plan.offloads_params:
            self.param_offload.attach(self.module, plan.param_tier)
        self._materialize()
        return local_parameters(self.module, plan.schedule_entry.is_asynchronous) | self.param_offload.materialize()

    def _materialize(self) -> None:
        materialize(self.module, self.world.device, [one.group for one in self.param_offload.groups])

    @property
    def overlaps_data_parallel(self) -> bool:
        """True if z1's gather and reduction run beside the first forward and the last backward of a step."""
        return self.world.device.type in self.overlapping_devices and self.world.plan.overlaps_data_parallel

    @property
    def device_parameter_bytes(self) -> int:
        """Bytes of the parameters on the device, without copies for a pass."""
        away = self.param_offload.values()
        return sum(local.nbytes for name, local in self.parameters.items() if name not in away)

    def unshard_bucket(self, layers: range) -> None:
        """Start to gather a bucket's updated parameters for the next step, whose UNSHARD waits: those of the layers at
        these places in the stage, or without any those outside of layers."""
        part = list(self.module.blocks())[layers.start] if layers else self.module
        handle = part.unshard(async_op=True)  # type: ignore[operator]
        if handle is not None:
            self._gathers_ahead.append(handle)

    @property
    def is_gathered_ahead(self) -> bool:
        """True while parameters of the next step are gathered, or under way."""
        return bool(self._gathers_ahead)

    def unshard(self) -> None:
        self._gathers_ahead.clear()
        unshard(self.module, waits=not self.overlaps_data_parallel)

    def reshard(self) -> None:
        for gather in self._gathers_ahead:
            gather.wait()
        self._gathers_ahead.clear()
        reshard(self.module)

    def reduce_gradients(self) -> PendingReduction | PendingTensor | None:
        """Start to reduce the gradients over the data-parallel ranks; None where a single rank has them."""
        if not isinstance(self.module, FSDPModule):
            self.attach_local_gradients()
            return self.sum_over_replicas([local.grad for local in self.parameters.values() if local.grad is not None])
        return PendingReduction(self.module, self.world.plan, self.world.device.type in self.overlapping_devices)

    def sum_over_replicas(self, gradients: Sequence[Tensor]) -> PendingTensor | None:
        """Start to sum gradients, in place, over the ranks that hold the same whole weights; None for one rank."""
        group = self.world.groups.replicas
        if group is None:
            return None
        works = [dist.all_reduce(gradient, group=group, async_op=True) for gradient in gradients]
        return PendingTensor(works, lambda: torch.empty(0))

    def all_reduce_replicated_grads(self) -> None:
        """All-reduce, over the tensor-parallel ranks, the gradients of parameters of which several hold a copy and each
        has seen only a part of the data."""
        if self.tp_axis is not None:
            self.attach_local_gradients()
            pending = all_reduce_replicated_grads(self.tp_axis, self.parameters, self._replicated, self.world.device)
            if pending is not None:
                pending.wait()

    def start_replicated_grads(self) -> PendingTensor | None:
        """Start that beside passes, in a group of its own, for the gradients that the parameters have; None where there
        is nothing to sum."""
        if self.tp_axis is None:
            return None
        group = self.world.groups.tp_beside
        assert group is not None
        axis = replace(self.tp_axis, group=group, turns=None)
        return all_reduce_replicated_grads(axis, self.parameters, self._replicated, self.world.device)

    def attach_local_gradients(self) -> None:
        """Set `.grad` of each local parameter to this rank's shard of the reduced gradient, but for those that the host
        updates within the last backward."""
        taken = self.backward_updates.names
        attach_local_gradients(self.module, {name: own for name, own in self.parameters.items() if name not in taken})
        self.param_offload.attach_gradients()

    def zero_grad(self) -> None:
        """Drop the step's gradients; where graphs add to them, set them to zero."""
        self.last_backward.begin_step()
        drop_partial_reductions(self.module)
        self.param_offload.drop_gradients()
        if self.pass_graphs is not None and self.pass_graphs.keeps_gradients:
            held = [*self.module.parameters(), *self.parameters.values()]
            torch._foreach_zero_([tensor.grad for tensor in held if tensor.grad is not None])
            return
        self.module.zero_grad(set_to_none=True)
        for local in self.parameters.values():
            local.grad = None
