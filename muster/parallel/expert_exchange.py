"""Exchanges of rows between expert-parallel ranks, with their gradients.

Suffixes: R rows sent, r rows received, D hidden width; others as each function says.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from muster.parallel.axis import ExpertAxis, PendingTensor
from muster.parallel.row_casts import RowCast


class Exchange(torch.autograd.Function):
    """All-to-all of rows; the gradients travel back, and both beside the other pass of a pair. Saves nothing but the
    numbers of rows. With a cast, rows travel in 8 bits, but not their gradients, which are taken as if none were
    rounded."""

    @staticmethod
    def forward(
        ctx: Any,
        axis: ExpertAxis,
        x_RD: Tensor,
        sent: Sequence[int],
        received: Sequence[int],
        cast: RowCast | None = None,
    ) -> Tensor:
        ctx.axis, ctx.sent, ctx.received = axis, sent, received
        if cast is None:
            return axis.exchange(x_RD, sent, received)
        return cast.unpack(axis.exchange(cast.pack(x_RD), sent, received), x_RD.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor, None, None, None]:
        return None, ctx.axis.exchange(grads[0], ctx.received, ctx.sent), None, None, None


class Flight:
    """An exchange under way: in the forward rows, in the backward their gradients."""

    def __init__(self, axis: ExpertAxis, sent: Sequence[int], received: Sequence[int]) -> None:
        self.axis, self.sent, self.received = axis, sent, received
        self.pending: PendingTensor | None = None

    def arrive(self) -> Tensor:
        """Wait for the end and return the rows."""
        assert self.pending is not None
        rows, self.pending = self.pending.wait(), None
        return rows


class StartExchange(torch.autograd.Function):
    """Start an all-to-all of rows, whose result `FinishExchange` waits for; the backward waits for the gradients."""

    @staticmethod
    def forward(ctx: Any, flight: Flight, x_RD: Tensor, cast: RowCast | None = None) -> Tensor:
        ctx.flight = flight
        if cast is None:
            flight.pending = flight.axis.start_all_to_all(x_RD, flight.sent, flight.received)
            return flight.pending.result()
        packed = cast.pack(x_RD)
        flight.pending = flight.axis.start_all_to_all(packed, flight.sent, flight.received)
        return x_RD.new_empty(sum(flight.received), *x_RD.shape[1:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor, None]:
        return None, ctx.flight.arrive(), None  # autograd hands on what it got, which has other rows


class FinishExchange(torch.autograd.Function):
    """Wait for the rows of an all-to-all; the backward starts that of their gradients."""

    @staticmethod
    def forward(ctx: Any, flight: Flight, x_rD: Tensor, cast: RowCast | None = None) -> Tensor:
        ctx.flight = flight
        arrived = flight.arrive()
        return x_rD.view_as(x_rD) if cast is None else cast.unpack(arrived, x_rD.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor, None]:
        flight: Flight = ctx.flight
        flight.pending = flight.axis.start_all_to_all(grads[0], flight.received, flight.sent)
        return None, grads[0], None


class Reorder(torch.autograd.Function):
    """Rows in another order; saves the inverse order."""

    @staticmethod
    def forward(ctx: Any, x_rD: Tensor, order_r: Tensor, inverse_r: Tensor) -> Tensor:
        ctx.save_for_backward(inverse_r)
        return x_rD.index_select(0, order_r)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (inverse_r,) = ctx.saved_tensors
        return grads[0].index_select(0, inverse_r), None, None


def block_order(counts: Tensor, dims: Sequence[int], num_rows: int) -> tuple[Tensor, Tensor]:
    """Return the order of rows that lie in blocks, with `counts` of them, after the blocks' dimensions are permuted as
    `dims` says; and the way back. Rows keep their order within a block.

    Example: from each of 2 sources come rows for 3 experts, counts (2, 3); dims (1, 0) sorts them by expert, and those
    of an expert by source.
    """
    shape = [counts.shape[dim] for dim in dims]
    number = torch.arange(counts.numel(), device=counts.device).view(shape)
    back = [dims.index(dim) for dim in range(counts.ndim)]
    number_r = number.permute(back).flatten().repeat_interleave(counts.flatten(), output_size=num_rows)
    order_r = number_r.argsort(stable=True)
    inverse_r = torch.empty_like(order_r)
    inverse_r[order_r] = torch.arange(num_rows, device=order_r.device)
    return order_r, inverse_r
