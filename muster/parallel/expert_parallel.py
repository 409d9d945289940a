"""Expert parallelism: each rank has some of a layer's experts, and tokens travel to them and back.

The model knows of it at one seam, `MoeMlp.dispatch`, which gets a rank's rows sorted by expert. A dispatcher is one
class and one line in `DISPATCHERS`; what it sends stands in `muster.cost.expert_traffic`, from which costs and counts
of bytes are made. Suffixes: P expert-parallel ranks, E experts, e experts of this rank, R rows sent, r rows received.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from muster.model.experts import ComputeRows, Dispatch, MoeMlp
from muster.model.grouped_matmul import Segments, host_counts
from muster.parallel.axis import ExpertAxis


class _Exchange(torch.autograd.Function):
    """All-to-all of rows; the gradients travel back. Saves nothing but the numbers of rows."""

    @staticmethod
    def forward(ctx: Any, axis: ExpertAxis, x_RD: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        ctx.axis, ctx.sent, ctx.received = axis, sent, received
        return axis.all_to_all(x_RD, sent, received)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor, None, None]:
        return None, ctx.axis.all_to_all(grads[0], ctx.received, ctx.sent), None, None


class _Reorder(torch.autograd.Function):
    """Rows in another order; saves the inverse order."""

    @staticmethod
    def forward(ctx: Any, x_rD: Tensor, order_r: Tensor, inverse_r: Tensor) -> Tensor:
        ctx.save_for_backward(inverse_r)
        return x_rD.index_select(0, order_r)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (inverse_r,) = ctx.saved_tensors
        return grads[0].index_select(0, inverse_r), None, None


class AllToAll:
    """Rows go to the ranks of their experts, are sorted by expert there, computed, and come back in their order
    (arXiv:2006.16668 §3.2). Two all-to-alls of rows each way, after one of the numbers of rows."""

    def __init__(self, axis: ExpertAxis) -> None:
        self.axis = axis

    def __call__(self, experts: ComputeRows, x_RD: Tensor, counts_E: Tensor) -> Tensor:
        ranks = self.axis.size
        sent_Pe = counts_E.view(ranks, -1)
        received_Pe = self.axis.all_to_all(sent_Pe, [1] * ranks, [1] * ranks)
        sent, received = (host_counts(counts.sum(1), len(x_RD)) for counts in (sent_Pe, received_Pe))
        order_r, inverse_r = _by_expert(received_Pe, sum(received))
        segments = Segments(received_Pe.sum(0), sum(received))
        y_rD = _Exchange.apply(self.axis, x_RD, sent, received)  # one name for all, so that none keeps what was read
        y_rD = _Reorder.apply(y_rD, order_r, inverse_r)
        y_rD = experts(y_rD, segments)  # type: ignore[arg-type]
        y_rD = _Reorder.apply(y_rD, inverse_r, order_r)
        return _Exchange.apply(self.axis, y_rD, received, sent)  # type: ignore[return-value]


def _by_expert(received_Pe: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Return the order that sorts rows by expert which arrive by source rank and, from each, by expert; and the way
    back. An expert's rows keep the order of their sources, so that results don't depend on arrival."""
    ranks, experts = received_Pe.shape
    expert_C = torch.arange(experts, device=received_Pe.device).repeat(ranks)
    expert_r = expert_C.repeat_interleave(received_Pe.flatten(), output_size=num_rows)
    order_r = expert_r.argsort(stable=True)
    inverse_r = torch.empty_like(order_r)
    inverse_r[order_r] = torch.arange(num_rows, device=order_r.device)
    return order_r, inverse_r


Dispatcher = Literal["a2a"]
DISPATCHERS: dict[Dispatcher, Callable[[ExpertAxis], Dispatch]] = {"a2a": AllToAll}
"""Dispatchers that the runtime has."""


def apply_expert_parallel(module: nn.Module, axis: ExpertAxis | None, kind: Dispatcher = "a2a") -> None:
    """Leave a stage on the meta device this rank's experts alone, and let its tokens go to those of all ranks; without
    an axis it has all of them."""
    if axis is None:
        return
    dispatch = DISPATCHERS[kind](axis)
    for part in module.modules():
        if isinstance(part, MoeMlp):
            part.dispatch = dispatch  # type: ignore[method-assign]
            for linear in part.experts.children():
                weight = linear.weight
                shape = (len(weight) // axis.size, *weight.shape[1:])
                linear.weight = nn.Parameter(weight.new_empty(shape), weight.requires_grad)
