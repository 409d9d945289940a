"""Sharded data parallelism of a stage: PyTorch's fully_shard, whose communication the Program's instructions trigger.

z1 and z2 keep a stage's parameters gathered from UNSHARD until the optimizer step; z1 reduces its gradients once per
step, on GPUs beside its last backward, z2 within every backward. z3 gathers each block within each pass and reduces
within every backward, both over fewer ranks where the plan has `shard_levels`; with `max_active_stages` it does as z1,
for units of passes instead of the step (UNSHARD, RESHARD).
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from muster.layout.tensor_layout import is_expert, state_shard_dim
from muster.model.decoder import Decoder
from muster.model.dtypes import DTYPES
from muster.model.experts import Experts
from muster.parallel.grad_reduce import AllToAllReduceScatter, DeferrableReduceScatter
from muster.parallel.master_weights import MasterWeights, master_weights
from muster.parallel.shard_levels import LeveledCollectives, leveled_collectives
from muster.parallel.world import World
from muster.spec.layer_strategy import ZeroLevel
from muster.spec.mesh import Mesh
from muster.spec.plan import Plan, Precision


def master_dtype(precision: Precision) -> torch.dtype:
    """Return the dtype of master weights, gradients and optimizer state: fp32, or fp64 for an fp64 model."""
    return torch.float64 if precision == "fp64" else torch.float32


def apply_fsdp(module: Decoder, world: World, zero: ZeroLevel, plan: Plan) -> bool:
    """Shard the stage over its data-parallel ranks; return False if there was nothing to do.

    Buckets of the plan's `bucket_layers` blocks are gathered and reduced together. Where expert parallelism leaves a
    rank some of the experts, these are groups of their own, sharded over the ranks that have the same ones.

    A stage that one rank holds whole isn't sharded; where that rank computes in less than fp32 it has `MasterWeights`.
    """
    mesh, compute_dtype = world.groups.data_mesh(), DTYPES[plan.precision]
    if mesh is None and compute_dtype != master_dtype(plan.precision):
        module.master_weights = MasterWeights(module, compute_dtype)  # type: ignore[assignment]
    if mesh is None:
        return False
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=master_dtype(plan.precision))
    blocks: list[nn.Module] = [*module.blocks()]
    place = _expert_placement(module, plan.mesh(world.at.pp))
    if (expert_mesh := world.groups.expert_data_mesh()) is not None:
        for part in module.modules():
            if isinstance(part, Experts):
                fully_shard(
                    part,
                    mesh=expert_mesh,
                    reshard_after_forward=zero == "z3",
                    mp_policy=policy,
                    shard_placement_fn=place,
                )
    size = plan.bucket_layers
    buckets = [blocks[start : start + size] for start in range(0, len(blocks), size)]
    for bucket in buckets:
        fully_shard(bucket, mesh=mesh, reshard_after_forward=zero == "z3", mp_policy=policy, shard_placement_fn=place)
    fully_shard(module, mesh=mesh, reshard_after_forward=None if zero == "z3" else False, mp_policy=policy)
    reduce_scatter = None
    if plan.grad_reduce_dtype == "bf16":
        reduce_scatter = AllToAllReduceScatter()
    elif zero == "z1" and world.device.type == "cpu":
        reduce_scatter = DeferrableReduceScatter()
    module.reduce_scatter = reduce_scatter  # type: ignore[assignment]
    for part in fsdp_modules(module):
        # The loss is already divided by the global number of labels: gradients are summed, never averaged.
        if mesh.size() > 1:  # alone, a division by 1 would take a copy
            part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)
        if reduce_scatter is not None:
            part.set_custom_reduce_scatter(reduce_scatter)  # type: ignore[arg-type]
        if zero != "z3":
            part.set_reshard_after_backward(False, recurse=False)
        # A GPU overlaps the all-gather on its own stream; a CPU only if the call doesn't wait.
        part._set_unshard_async_op(world.device.type == "cpu")
    if (levels := world.groups.shard_levels) is not None:
        module.leveled_collectives = LeveledCollectives(levels, plan)  # type: ignore[assignment]
        for part in {id(_state(part)): part for part in fsdp_modules(module)}.values():  # one of each bucket
            module.leveled_collectives.attach(part)
    if zero == "z3":
        _set_prefetch([bucket[0] for bucket in buckets], plan.prefetch_buckets)
        for bucket in buckets:
            _set_expert_prefetch(
                [part for block in bucket for part in fsdp_modules(block) if isinstance(part, Experts)]
            )
    if zero == "z1":
        module.set_requires_gradient_sync(False)  # type: ignore[operator]
        module.set_is_last_backward(False)  # type: ignore[operator]
    return True


def _expert_placement(module: Decoder, mesh: Mesh) -> Callable[[nn.Parameter], Shard | None]:
    """Return the function that says along which dimension a parameter is sharded, as its layout does."""
    dims = {
        parameter: state_shard_dim(name, tuple(parameter.shape), mesh.expert_state_shards)
        for name, parameter in module.named_parameters()
        if is_expert(name)
    }
    return lambda parameter: Shard(dims.get(parameter, 0))


def _set_prefetch(
    buckets: list, num_buckets: int
) -> None:  # of a block of each, which fully_shard has made an FSDPModule
    """Let each bucket start the all-gather of the next `num_buckets` ones as soon as it is gathered itself.

    In the backward the first bucket names itself, which gathers nothing: without a name PyTorch takes what ran before
    in the forward, that is, something of another micro-batch, which may be gathered in vain.
    """
    for index, bucket in enumerate(buckets):
        bucket.set_modules_to_forward_prefetch(buckets[index + 1 : index + 1 + num_buckets])
        bucket.set_modules_to_backward_prefetch(buckets[max(0, index - num_buckets) : index][::-1] or [bucket])


def _set_expert_prefetch(experts: list) -> None:  # of one bucket, which fully_shard has made FSDPModules
    """Let the experts of a layer start the all-gather of those before in their bucket, in the backward; the first name
    themselves, as the first bucket does."""
    for index, part in enumerate(experts):
        part.set_modules_to_backward_prefetch(experts[max(0, index - 1) : index] or [part])


def materialize(module: Decoder, device: torch.device, empty_groups: Collection[Any] = ()) -> None:
    """Allocate the (uninitialised) memory of a stage that was built on the meta device, in its final place; of
    `empty_groups`, of a private type, only as much as `fully_shard` needs to pad them."""
    padded = {id(one.sharded_param): one.padded_sharded_param_size for own in empty_groups for one in own.fsdp_params}

    def allocate(tensor: Tensor) -> Tensor:
        made = torch.empty_like(tensor, device=device)
        if (size := padded.get(id(tensor))) is not None and (local := local_tensor(made)).shape == size:
            local.untyped_storage().resize_(0)
        return made

    module._apply(allocate)
    if (masters := master_weights(module)) is not None:
        masters.materialize(device)
    if isinstance(module, FSDPModule):
        # fully_shard moves unevenly sharded parameters to padded memory when it first runs: it must come before
        # anyone keeps a reference to the local tensors.
        _state(module)._lazy_init()


def local_parameters(module: nn.Module, versioned: bool = False) -> dict[str, Tensor]:
    """Return this rank's shard of each parameter, or its master weights, by name, as leaf tensors that share their
    memory.

    `versioned`: autograd takes no change of them for one of what passes have saved, since a version that passes need
    keeps its memory (`WeightVersions`).
    """
    if (masters := master_weights(module)) is not None:
        if versioned:
            masters.keeps_copies = True
            masters.refresh()
            masters.free()  # the memory stays, its values are out of date
        return masters.by_name
    local = {name: local_tensor(parameter) for name, parameter in module.named_parameters()}
    return {name: tensor.data for name, tensor in local.items()} if versioned else local


def attach_local_gradients(module: nn.Module, local: dict[str, Tensor]) -> None:
    """Set `.grad` of these local parameters to this rank's shard of the reduced gradient.

    Gathered parameters are dropped first: only sharded ones have reduced gradients. Gradients of master weights are
    there already; their copies are dropped, but where these stay in memory: passes may go on with them before the
    update, and what they hold need not be the masters' values (`WeightVersions`).
    """
    if (masters := master_weights(module)) is not None and masters.keeps_copies:
        return
    reshard(module)
    if masters is not None:
        return
    for name, parameter in module.named_parameters():
        if name not in local:
            continue
        local[name].grad = None if parameter.grad is None else local_tensor(parameter.grad)


def unshard(module: nn.Module, waits: bool = True) -> None:
    """All-gather the stage's parameters from its data-parallel ranks, or neighbours' copies of them; where it doesn't
    wait for them, the first pass does, group by group."""
    if (leveled := leveled_collectives(module)) is not None and leveled.keeps_copies:
        leveled.make_copies()
        return
    if (masters := master_weights(module)) is not None:
        masters.refresh()
    handles = [part.unshard(async_op=True) for part in fsdp_modules(module)]
    for handle in handles if waits else ():
        if handle is not None:
            handle.wait()


def reshard(module: nn.Module) -> None:
    """Drop the gathered parameters, since the optimizer changes the sharded ones."""
    if (masters := master_weights(module)) is not None:
        masters.free()
    if (leveled := leveled_collectives(module)) is not None:
        leveled.drop_copies()
    for part in fsdp_modules(module):
        part.reshard()


def reduce_in_next_backward(module: nn.Module) -> None:
    """Let the next backward start to reduce-scatter the gradients that each rank has accumulated, each group once it is
    complete; `PendingReduction` waits for the end (z1)."""
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(True)


@contextmanager
def no_gradient_sync(module: nn.Module, zero: ZeroLevel) -> Iterator[None]:
    """Keep the gradients of backwards in this context unreduced at any ZeRO level; z1's always are."""
    if not isinstance(module, FSDPModule) or zero == "z1":
        yield
        return
    module.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        module.set_requires_gradient_sync(True)


class LastBackward:
    """Reductions of a stage that only a step's last backward makes, or that of a unit of passes.

    With `completes` it all-reduces over the replicas, or reduces to all ranks' shards, under z2 and z3, what it and
    those before it have reduced to shards and added up. With `reduces_beside` it reduce-scatters, under z1, each group
    of gradients once it is complete.
    """

    def __init__(self, module: nn.Module, completes: bool, reduces_beside: bool) -> None:
        self._module, self._completes, self.reduces_beside = module, completes, reduces_beside
        self.backwards_per_step: int | None = None
        """None: not known, as while single passes are timed; then each completes, and none reduces under z1."""
        self.ends_of_units: frozenset[int] = frozenset()
        """Numbers, from 1, of a step's backwards that are the last of a unit, which count as last under z1."""
        self._count = 0
        self.is_under_way = False
        """True from the begin of a step's last backward on."""

    def begin_step(self) -> None:
        """Count from the step's first backward on."""
        self._count, self.is_under_way = 0, False

    def count(self) -> None:
        """Count a backward, which is about to begin."""
        self._count += 1
        total = self.backwards_per_step
        is_last = self.is_under_way = total is not None and self._count % total == 0
        if self._completes and isinstance(self._module, FSDPModule):
            self._module.set_requires_all_reduce(total is None or is_last)
        if self._completes and (leveled := leveled_collectives(self._module)) is not None:
            leveled.set_due(total is None or is_last)
        if self.reduces_beside and (is_last or (total is not None and self._count in self.ends_of_units)):
            reduce_in_next_backward(self._module)


def drop_partial_reductions(module: nn.Module) -> None:
    """Drop the sums of shards that wait for their last reduction."""
    if (leveled := leveled_collectives(module)) is not None:
        leveled.drop_sums()
    if isinstance(module, FSDPModule):
        for group in _all_groups(module):
            group._partial_reduce_output = None


def finish_backward(module: nn.Module) -> None:
    """Process gradients that no backward made, as the end of a backward would: z2 and z3 reduce them.

    Blocks come first, from the last to the first, so that their gradients are freed before embedding and head, often
    the largest group, are reduced. PyTorch has no public call for this outside a backward; its own pipelining makes
    these same calls.
    """
    if (masters := master_weights(module)) is not None:
        masters.add_gradients()
    if isinstance(module, FSDPModule):
        for _ in process_gradients(module):
            pass
        _state(module)._root_post_backward_final_callback()


def process_gradients(module: FSDPModule) -> Iterator[Any]:  # of a private type
    """Process the groups' gradients as `finish_backward` does, and yield each group; nothing waits for reductions."""
    for state in reversed(_state(module)._state_ctx.all_states):
        for group in _groups(state):
            for parameter in group.fsdp_params:  # gradients from I have the master weights' dtype, those from W not
                parameter.accumulate_unsharded_grad_if_needed()
                parameter.to_accumulated_grad_if_needed()
            group.post_backward()
            yield group


def wait_for_reductions(module: FSDPModule) -> None:
    """Wait for the reductions that have been started in streams of the device, as the end of a step's last backward
    does."""
    module.set_is_last_backward(True)
    _state(module)._root_post_backward_final_callback()
    module.set_is_last_backward(False)


def fsdp_modules(module: nn.Module) -> Iterator[FSDPModule]:
    """Yield the modules that are gathered as a unit: the blocks (or buckets of them), and the rest."""
    return (part for part in module.modules() if isinstance(part, FSDPModule))


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's part of a parameter or a gradient, which shares its memory."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def _state(module: FSDPModule) -> Any:  # a private type
    return fully_shard.state(module)  # type: ignore[attr-defined]


def _groups(state: Any) -> list[Any]:  # private types, one group per state before torch 2.12
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [state._fsdp_param_group] if state._fsdp_param_group else []
    return list(groups)


def gradient_bytes(module: nn.Module) -> int:
    """Return the bytes of gradients that this rank holds now: sharded ones, and unsharded ones that wait to be
    reduced."""
    if (masters := master_weights(module)) is not None:
        return sum(gradient.nbytes for gradient in masters.gradients())
    if not isinstance(module, FSDPModule):
        return sum(p.grad.nbytes for p in module.parameters() if p.grad is not None)
    partial = [group._partial_reduce_output for group in _all_groups(module)]
    leveled = leveled_collectives(module)
    return (
        (0 if leveled is None else leveled.sum_bytes)
        + sum(_parameter_gradient_bytes(parameter) for group in _all_groups(module) for parameter in group.fsdp_params)
        + sum(output.nbytes for output in partial if output is not None)
    )


def unreduced_gradients(module: nn.Module) -> list[Tensor]:
    """Return the gradients of backwards that wait to be reduced, of `fully_shard`'s or a plain module's parameters."""
    held = (parameter.grad for parameter in module.parameters())
    if isinstance(module, FSDPModule):
        parameters = [parameter for group in _all_groups(module) for parameter in group.fsdp_params]
        held = (one for parameter in parameters for one in _unreduced(parameter))
    return [local_tensor(gradient) for gradient in held if gradient is not None]


def drop_unreduced_gradients(module: nn.Module) -> None:
    """Drop what `unreduced_gradients` returns."""
    if not isinstance(module, FSDPModule):
        module.zero_grad(set_to_none=True)
        return
    for group in _all_groups(module):
        for parameter in group.fsdp_params:
            parameter.unsharded_accumulated_grad = None
            if (unsharded := getattr(parameter, "_unsharded_param", None)) is not None:
                unsharded.grad = None


def _unreduced(parameter: Any) -> list[Tensor | None]:  # of a private type
    unsharded = getattr(parameter, "_unsharded_param", None)
    return [parameter.unsharded_accumulated_grad, None if unsharded is None else unsharded.grad]


def fsdp_groups(module: nn.Module) -> list[Any]:
    """Return the groups, of a private type, in which `fully_shard` gathers a module's parameters."""
    return [group for part in fsdp_modules(module) for group in _groups(_state(part))]


def _all_groups(module: FSDPModule) -> Iterator[Any]:  # of a private type
    return (group for state in _state(module)._state_ctx.all_states for group in _groups(state))


def _parameter_gradient_bytes(parameter: Any) -> int:  # of a private type
    held = [parameter.sharded_param.grad, *_unreduced(parameter)]
    return sum(local_tensor(gradient).nbytes for gradient in held if gradient is not None)
