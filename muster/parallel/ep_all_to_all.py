"""Dispatch of tokens by all-to-all.

Suffixes: P expert-parallel ranks, c chunks, E experts, e experts of this rank, r rows received, D hidden width.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from muster.model.expert_rows import ExpertRows
from muster.model.experts import ComputeRows, StartedDispatch, start_dispatch
from muster.model.grouped_matmul import Segments, host_counts
from muster.model.routing import Routing
from muster.parallel.axis import ExpertAxis
from muster.parallel.expert_exchange import Exchange, FinishExchange, Flight, Reorder, StartExchange, block_order
from muster.parallel.lsh_rows import LshRows
from muster.parallel.row_casts import row_cast
from muster.spec.expert_kinds import ExpertDispatch


class AllToAll:
    """Rows go to the ranks of their experts, are sorted by expert there, computed, and come back in their order
    (arXiv:2006.16668 §3.2). Two all-to-alls of rows each way, after one of the numbers of rows.

    With several chunks, each a part of the tokens, all set out at once; while experts compute one, others travel
    (Tutel, arXiv:2206.03382 §4.2). The backward, which runs the same steps from the last to the first, overlaps, too.
    """

    def __init__(self, axis: ExpertAxis, dispatch: ExpertDispatch) -> None:
        self.axis, self.chunks, self.cast = axis, dispatch.chunks, row_cast(dispatch.dtype)
        self.lsh_rate = dispatch.lsh_rate

    def depart(self, rows: ExpertRows, x_ND: Tensor) -> tuple[Any, Tensor, Callable[[Tensor], Tensor]]:
        """Return the rows that travel, their number for each expert, and the way from their results to those of all
        rows."""
        y_RD = rows.permute(x_ND)
        if not self.lsh_rate:
            return y_RD, rows.counts_E, _same
        joined = LshRows(y_RD, rows.counts_E, self.lsh_rate)
        return joined.centroids_KD, joined.counts_E, joined.restore

    def __call__(self, experts: ComputeRows, x_BSD: Tensor, routing: Routing) -> Tensor:
        if self.chunks > 1:
            return self._in_chunks(experts, x_BSD, routing)
        rows, ranks = ExpertRows(routing), self.axis.size
        y_rD, counts_E, restore = self.depart(rows, x_BSD.flatten(0, 1))  # one name, so that none keeps what was read
        sent_Pe = counts_E.view(ranks, -1)
        received_Pe = self.axis.all_to_all(sent_Pe, [1] * ranks, [1] * ranks)
        sent, received = (host_counts(counts.sum(1), len(y_rD)) for counts in (sent_Pe, received_Pe))
        order_r, inverse_r = block_order(received_Pe, (1, 0), sum(received))
        y_rD = Exchange.apply(self.axis, y_rD, sent, received, self.cast)
        y_rD = Reorder.apply(y_rD, order_r, inverse_r)
        y_rD = experts(y_rD, Segments(received_Pe.sum(0), sum(received)))
        y_rD = Reorder.apply(y_rD, inverse_r, order_r)
        y_rD = restore(Exchange.apply(self.axis, y_rD, received, sent))
        return rows.combine(y_rD, x_BSD.shape)

    def start(self, experts: ComputeRows, x_BSD: Tensor, routing: Routing) -> StartedDispatch:
        """Let rows set out, which travel while the caller computes something else; so do their results."""
        if self.chunks > 1:
            return start_dispatch(self.__call__, experts, x_BSD, routing)
        return _Travelling(self, experts, x_BSD, routing)

    def _in_chunks(self, experts: ComputeRows, x_BSD: Tensor, routing: Routing) -> Tensor:
        x_ND, ranks = x_BSD.flatten(0, 1), self.axis.size
        parts = zip(routing.weight.tensor_split(self.chunks), routing.expert.tensor_split(self.chunks), strict=True)
        rows_c = [ExpertRows(Routing(weight, expert, routing.num_experts)) for weight, expert in parts]
        sent_Pce = torch.stack([rows.counts_E.view(ranks, -1) for rows in rows_c], 1)
        received_Pce = self.axis.all_to_all(sent_Pce, [1] * ranks, [1] * ranks)
        flights, travelling = [], []
        for chunk, (rows, x_nD) in enumerate(zip(rows_c, x_ND.tensor_split(self.chunks), strict=True)):
            y_rD: Any = rows.permute(x_nD)
            sent, received = (
                host_counts(counts_Pce[:, chunk].sum(1), len(y_rD)) for counts_Pce in (sent_Pce, received_Pce)
            )
            flights.append(Flight(self.axis, sent, received))
            travelling.append(StartExchange.apply(flights[-1], y_rD, self.cast))
        returning = []
        for chunk, flight in enumerate(flights):
            counts_Pe = received_Pce[:, chunk]
            order_r, inverse_r = block_order(counts_Pe, (1, 0), sum(flight.received))
            y_rD = FinishExchange.apply(flight, travelling[chunk], self.cast)
            travelling[chunk] = None
            y_rD = Reorder.apply(y_rD, order_r, inverse_r)
            y_rD = experts(y_rD, Segments(counts_Pe.sum(0), sum(flight.received)))
            y_rD = Reorder.apply(y_rD, inverse_r, order_r)
            back = Flight(self.axis, flight.received, flight.sent)
            returning.append((back, StartExchange.apply(back, y_rD)))
        made = [
            rows.combine(FinishExchange.apply(*back), torch.Size((1, rows.num_tokens, x_ND.shape[1])))  # type: ignore[arg-type]
            for rows, back in zip(rows_c, returning, strict=True)
        ]
        return _Join.apply(x_BSD.shape, *made)  # type: ignore[return-value]


def _same(y_RD: Tensor) -> Tensor:
    return y_RD


class _Travelling:
    """Rows of all tokens on their way to experts; the backward, which runs the same steps from the last to the first,
    overlaps with the same work of the caller's."""

    def __init__(self, way: AllToAll, experts: ComputeRows, x_BSD: Tensor, routing: Routing) -> None:
        self._way, self._experts, self._shape = way, experts, x_BSD.shape
        self._rows, ranks = ExpertRows(routing), way.axis.size
        y_rD, counts_E, self._restore = way.depart(self._rows, x_BSD.flatten(0, 1))
        sent_Pe = counts_E.view(ranks, -1)
        self._received_Pe = way.axis.all_to_all(sent_Pe, [1] * ranks, [1] * ranks)
        sent, received = (host_counts(counts_Pe.sum(1), len(y_rD)) for counts_Pe in (sent_Pe, self._received_Pe))
        self._flight = Flight(way.axis, sent, received)
        self._travelling: list[Any] = [StartExchange.apply(self._flight, y_rD, way.cast)]

    def compute(self) -> None:
        flight, counts_Pe = self._flight, self._received_Pe
        order_r, inverse_r = block_order(counts_Pe, (1, 0), sum(flight.received))
        y_rD: Any = FinishExchange.apply(flight, self._travelling.pop(), self._way.cast)
        y_rD = Reorder.apply(y_rD, order_r, inverse_r)
        y_rD = self._experts(y_rD, Segments(counts_Pe.sum(0), sum(flight.received)))
        y_rD = Reorder.apply(y_rD, inverse_r, order_r)
        self._flight = Flight(self._way.axis, flight.received, flight.sent)
        self._travelling.append(StartExchange.apply(self._flight, y_rD))

    def finish(self) -> Tensor:
        y_rD: Any = FinishExchange.apply(self._flight, self._travelling.pop())
        return self._rows.combine(self._restore(y_rD), self._shape)


class _Join(torch.autograd.Function):
    """Chunks of tokens (1, n, D) as one tensor (B, S, D), which is no view, as the residual is added to it in place."""

    @staticmethod
    def forward(ctx: Any, shape: torch.Size, *parts: Tensor) -> Tensor:
        ctx.sizes = [part.shape[1] for part in parts]
        y_BSD = parts[0].new_empty(shape)
        torch.cat(parts, 1, out=y_BSD.view(1, -1, shape[-1]))
        return y_BSD

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *grads[0].flatten(0, 1)[None].split(ctx.sizes, 1)
