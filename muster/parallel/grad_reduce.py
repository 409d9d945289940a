"""Reduce-scatters of gradients in the place of `fully_shard`'s own (`FSDPModule.set_custom_reduce_scatter`)."""

import torch
import torch.distributed as dist
from torch import Tensor

from muster.parallel.axis import PendingTensor, reduce_scatter_tensor


class DeferrableReduceScatter:
    """The reduce-scatter of one stage's gradients, whose calls return before its end while there is a list `pending`.

    A GPU needs none: calls of NCCL return at once, and what follows in their stream runs after them.
    """

    def __init__(self) -> None:
        self.pending: list[PendingTensor] | None = None
        """Reductions under way, for which a later call waits; None: each call waits for its own."""

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
            raise ValueError(f"gradients are summed, and `pending` says who waits; got {op}, async_op {async_op}")
        started = self._start(output_tensor, input_tensor, group)
        if self.pending is None:
            started.wait()
        else:
            self.pending.append(started)

    def _start(self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup) -> PendingTensor:
        work = reduce_scatter_tensor(output_tensor, input_tensor, op=dist.ReduceOp.SUM, group=group, async_op=True)
        return PendingTensor([work], lambda _sent=input_tensor: output_tensor)


class AllToAllReduceScatter(DeferrableReduceScatter):
    """Reduce-scatter of gradients that travel in bfloat16 and are summed in float32 (MegaScale-MoE, arXiv:2505.11432).

    A ring's reduce-scatter in bfloat16 rounds a partial sum at every hop. Here each rank rounds its gradients once,
    sends every other rank that rank's part, and sums what it receives in the dtype of master weights: half the bytes of
    a reduce-scatter in float32.
    """

    def _start(self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup) -> PendingTensor:
        sent = input_tensor.to(torch.bfloat16)
        received = torch.empty_like(sent)
        work = dist.all_to_all_single(received, sent, group=group, async_op=True)

        def sum_received(_sent: Tensor = sent) -> Tensor:
            sum_in_rank_order(received.view(group.size(), -1), output_tensor)
            return output_tensor

        return PendingTensor([work], sum_received)


def sum_in_rank_order(parts_PN: Tensor, out_N: Tensor) -> None:
    """Write the sum of the ranks' parts, in `out_N`'s dtype."""
    if parts_PN.is_cuda:
        torch.sum(parts_PN, 0, dtype=out_N.dtype, out=out_N)
        return
    out_N.copy_(parts_PN[0])  # a CPU's `torch.sum` would make a copy of all parts in the wider dtype
    for part_N in parts_PN[1:]:
        out_N.add_(part_N)
