"""Dispatch of tokens by all-gather, and of results by reduce-scatter.

Suffixes: N tokens, P expert-parallel ranks, R pairs of a token and an expert, D hidden width.
"""

from typing import Any

import torch
from torch import Tensor

from muster.model.experts import ComputeRows, compute_here
from muster.model.routing import Routing
from muster.parallel.axis import ExpertAxis
from muster.parallel.ep_slicing import local_pairs
from muster.spec.expert_kinds import ExpertDispatch


class _Gather(torch.autograd.Function):
    """Rows of all ranks; their gradients are summed over the ranks, each of which gets those of its own rows."""

    @staticmethod
    def forward(ctx: Any, axis: ExpertAxis, x: Tensor) -> Tensor:
        ctx.axis = axis
        return axis.all_gather(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        return None, ctx.axis.reduce_scatter(grads[0])


class _ReduceScatter(torch.autograd.Function):
    """Sum over the ranks of their parts of the results, of which each gets its own tokens, as a tensor (B, S, D)."""

    @staticmethod
    def forward(ctx: Any, axis: ExpertAxis, y_PND: Tensor, shape: torch.Size) -> Tensor:
        ctx.axis = axis
        y_BSD = y_PND.new_empty(shape)  # no view, since the residual is added to it in place
        axis.reduce_scatter(y_PND.flatten(0, 1), out=y_BSD.view(-1, shape[-1]))
        return y_BSD

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor, None]:
        return None, ctx.axis.all_gather(grads[0].flatten(0, 1)).unflatten(0, (ctx.axis.size, -1)), None


class AllGather:
    """Every rank gets the tokens of all ranks and computes those of its experts; the results are reduce-scattered. It
    sends less than an all-to-all where tokens have many experts, k ≥ P (MegaScale-MoE, arXiv:2505.11432 §3.2)."""

    def __init__(self, axis: ExpertAxis, dispatch: ExpertDispatch) -> None:
        self.axis = axis

    def __call__(self, experts: ComputeRows, x_BSD: Tensor, routing: Routing) -> Tensor:
        axis, x_ND = self.axis, x_BSD.flatten(0, 1)
        weight, expert = _Gather.apply(axis, routing.weight), axis.all_gather(routing.expert)
        token_R = None
        if routing.token_R is not None:
            first_P1 = torch.arange(axis.size, device=expert.device).unsqueeze(1) * len(x_ND)
            token_R = (axis.all_gather(routing.token_R).unflatten(0, (axis.size, -1)) + first_P1).flatten()
        own = local_pairs(Routing(weight, expert, routing.num_experts, token_R), axis)  # type: ignore[arg-type]
        x_PND: Any = _Gather.apply(axis, x_ND)
        x_PND = compute_here(experts, x_PND.unflatten(0, (axis.size, -1)), own)
        return _ReduceScatter.apply(axis, x_PND, x_BSD.shape)  # type: ignore[return-value]
