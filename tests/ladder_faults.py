"""Faults of a ladder over tensor-parallel ranks, and links so slow that nothing arrives before it is waited for."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from muster.model.ladder import LadderState
from muster.parallel import ladder
from muster.parallel.axis import PendingTensor, TensorAxis


@contextmanager
def late_sums() -> Iterator[None]:
    """An all-reduce begins where it is waited for; no fault."""

    def all_reduce(self: TensorAxis, x: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> PendingTensor:
        sums: list[Tensor] = []

        def finish() -> Tensor:
            if not sums:
                dist.all_reduce(x, op, group=self.group)
                sums.append(x)
            return x

        return PendingTensor([], finish)

    with patch.object(TensorAxis, "all_reduce", all_reduce):
        yield


@contextmanager
def missing_wait() -> Iterator[None]:
    """The output of a sub-layer is added to the stream before it has arrived."""
    with late_sums(), patch.object(ladder, "_wait", lambda arrival: None):
        yield


def _adds(times: int) -> Callable[[], Any]:
    @contextmanager
    def fault() -> Iterator[None]:
        @torch.no_grad()
        def fill(x_BSD: Tensor, before: LadderState) -> None:
            if before.pending_BSD is not None:
                ladder._wait(before.arrival)
                torch.add(before.x_BSD, before.pending_BSD, alpha=times, out=x_BSD.detach())

        with patch.object(ladder.ParallelLadder, "_fill", staticmethod(fill)):
            yield

    return fault


@contextmanager
def lost_term() -> Iterator[None]:
    """The gradient that a sub-layer has of its input never reaches the stream."""
    backward = ladder._Stream.backward

    def faulty(ctx: Any, *grads: Tensor) -> Any:
        ctx.terms.under_way.clear()
        return backward(ctx, *grads)

    with patch.object(ladder._Stream, "backward", staticmethod(faulty)):
        yield


LADDER_FAULTS: dict[str, Callable[[], Any]] = {
    "late sums": late_sums,
    "missing wait": missing_wait,
    "pending output twice": _adds(2),
    "pending output lost": _adds(0),
    "lost term": lost_term,
}
