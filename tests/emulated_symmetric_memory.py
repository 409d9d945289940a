"""Emulation of PyTorch's operators of symmetric memory on a CPU: the same arguments and memory layouts, over gloo."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.library import Library

from muster.parallel import tensor_parallel
from muster.parallel.axis import TensorAxis

CALLS: list[str] = []
"""Operators that ran."""


def all_gather_matmul(
    shard: Tensor, matrices: list[Tensor], gather_dim: int, group_name: str, return_A: bool = True
) -> tuple[Tensor | None, list[Tensor]]:
    """`fused_all_gather_matmul`, whose results lie in memory with the gathered dim first."""
    CALLS.append("fused_all_gather_matmul")
    group = _resolve_process_group(group_name)
    own = shard.movedim(gather_dim, 0).contiguous()
    parts = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(parts, own, group=group)
    whole = torch.cat(parts)
    outputs = [(whole.flatten(0, -2) @ matrix).view(*whole.shape[:-1], -1) for matrix in matrices]
    return whole.movedim(0, gather_dim) if return_A else None, [one.movedim(0, gather_dim) for one in outputs]


def matmul_reduce_scatter(x: Tensor, matrix: Tensor, reduce_op: str, scatter_dim: int, group_name: str) -> Tensor:
    """`fused_matmul_reduce_scatter`."""
    CALLS.append("fused_matmul_reduce_scatter")
    assert reduce_op == "sum"
    group = _resolve_process_group(group_name)
    whole = x @ matrix
    dist.all_reduce(whole, group=group)
    return whole.chunk(group.size(), scatter_dim)[group.rank()].clone()


@contextmanager
def symmetric_memory() -> Iterator[None]:
    """Let CPUs have the operators."""
    library = Library("symm_mem", "IMPL")
    library.impl("fused_all_gather_matmul", all_gather_matmul, "CPU")
    library.impl("fused_matmul_reduce_scatter", matmul_reduce_scatter, "CPU")
    try:
        yield
    finally:
        library._destroy()


@contextmanager
def gradients_out_of_order() -> Iterator[None]:
    """The gradients of weights see other ranks' positions in another order than their inputs do."""
    backward = tensor_parallel.row_backward

    def faulty(axis: TensorAxis, weight: Tensor, grad_BsD: Tensor) -> tuple[Tensor, Tensor]:
        grad_x, grad_BSD = backward(axis, weight, grad_BsD)
        return grad_x, grad_BSD.roll(grad_BsD.shape[1], 1)

    with symmetric_memory(), patch.object(tensor_parallel, "row_backward", faulty):
        yield
