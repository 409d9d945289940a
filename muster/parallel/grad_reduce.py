"""Reduction of gradients that travel in bfloat16 and are summed in float32 (MegaScale-MoE, arXiv:2505.11432).

A ring's reduce-scatter in bfloat16 rounds a partial sum at every hop. Here each rank rounds its gradients once, sends
every other rank that rank's part, and sums what it receives in the dtype of master weights: half the bytes of a
reduce-scatter in float32.
"""

import torch
import torch.distributed as dist
from torch import Tensor


class AllToAllReduceScatter:
    """The reduce-scatter of `fully_shard` (`FSDPModule.set_custom_reduce_scatter`) by such an all-to-all."""

    def allocate(self, size: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a buffer for gradients or for their sum."""
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        """Write this rank's part of the sum over the group of flat gradients. Raises ValueError for another operation
        than a sum."""
        if op != dist.ReduceOp.SUM or async_op:
            raise ValueError(f"gradients are summed by an all-to-all that is waited for, got {op}, async_op {async_op}")
        sent = input_tensor.to(torch.bfloat16)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        sum_in_rank_order(received.view(group.size(), -1), output_tensor)


def sum_in_rank_order(parts_PN: Tensor, out_N: Tensor) -> None:
    """Write the sum of the ranks' parts, in `out_N`'s dtype."""
    if parts_PN.is_cuda:
        torch.sum(parts_PN, 0, dtype=out_N.dtype, out=out_N)
        return
    out_N.copy_(parts_PN[0])  # a CPU's `torch.sum` would make a copy of all parts in the wider dtype
    for part_N in parts_PN[1:]:
        out_N.add_(part_N)
