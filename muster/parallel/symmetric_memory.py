"""Asynchronous tensor parallelism through symmetric memory: matmuls of chunks while others are copied between GPUs.

PyTorch's operators `fused_all_gather_matmul` and `fused_matmul_reduce_scatter` (torch.distributed._symmetric_memory) do
what the rings of `muster.parallel.tensor_parallel` do, with copies out of other ranks' memory in place of kernels that
send. They need GPUs of one node that reach each other's memory; elsewhere the rings run.
"""

import importlib
import socket
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from muster.parallel.axis import TensorAxis, TpOverlap

POSITIONS = 1
"""Dim of a hidden state (B, S, D) along which ranks gather and scatter."""


def overlap_of(group: dist.ProcessGroup, device: torch.device) -> TpOverlap:
    """Return how the ranks of a tensor-parallel group overlap collectives with matmuls; all of them must call it."""
    if has_fused_operators(device) and (device.type != "cuda" or _reaches_peers(group, device)):
        return "symmetric_memory"
    return "ring"


def has_fused_operators(device: torch.device) -> bool:
    """Return True if PyTorch has kernels of the fused operators for a device."""
    try:
        importlib.import_module("torch.distributed._symmetric_memory")  # declares them
    except ImportError:
        return False
    if device.type == "cuda" and torch.version.cuda is None:
        return False
    key = torch._C._dispatch_key_for_device(device.type)
    names = ("symm_mem::fused_all_gather_matmul", "symm_mem::fused_matmul_reduce_scatter")
    return all(torch._C._dispatch_has_kernel_for_dispatch_key(name, key) for name in names)


def _reaches_peers(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return True if every GPU of a group reads every other's memory, as each rank says of itself."""
    ranks = group.size()
    places: list[tuple[str, int | None]] = [("", None)] * ranks
    dist.all_gather_object(places, (socket.gethostname(), device.index), group=group)
    own = reaches_all(places, group.rank(), torch.cuda.can_device_access_peer)
    found = [own] * ranks
    dist.all_gather_object(found, own, group=group)
    return all(found)


def reaches_all(places: Sequence[tuple[str, int | None]], own: int, can_access: Callable[[int, int], bool]) -> bool:
    """Return True if the GPU of the rank `own` reaches those of all other ranks, given by host and index; a process
    that sees no GPU but its own can't know, since others have the same index."""
    host, index = places[own]
    others = [place for rank, place in enumerate(places) if rank != own]
    return all(
        other_host == host and index is not None and other is not None and other != index and can_access(index, other)
        for other_host, other in others
    )


def all_gather_linears(
    axis: TensorAxis, x_BsD: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]
) -> tuple[Tensor, ...]:
    """Linear layers of the whole sequence, of which this rank has a shard."""
    _, outputs = torch.ops.symm_mem.fused_all_gather_matmul(
        x_BsD, [weight.t() for weight in weights], POSITIONS, axis.group.group_name, return_A=False
    )
    # They were computed with positions first, and are views, into which autograd would let nothing be written later.
    outputs = [output_BSO.contiguous().data for output_BSO in outputs]
    for output_BSO, bias in zip(outputs, biases, strict=True):
        if bias is not None:
            output_BSO.add_(bias)
    return tuple(outputs)


def row_forward(axis: TensorAxis, x: Tensor, weight: Tensor) -> Tensor:
    """Return this rank's shard of a row-parallel linear layer's output."""
    return torch.ops.symm_mem.fused_matmul_reduce_scatter(x, weight.t(), "sum", POSITIONS, axis.group.group_name)


def row_backward(axis: TensorAxis, weight: Tensor, grad_BsD: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradient of a row-parallel linear layer's input, and that of its whole output."""
    grad_BSD, (grad_x,) = torch.ops.symm_mem.fused_all_gather_matmul(
        grad_BsD.contiguous(), [weight], POSITIONS, axis.group.group_name
    )
    return grad_x.contiguous(), grad_BSD.contiguous()
