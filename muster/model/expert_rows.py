"""Rows of (token, expert) pairs, sorted by expert: taken out of the hidden state, and summed into it.

Suffixes: N tokens, k experts per token, R pairs, D hidden width, E experts.
"""

from typing import Any

import torch
from torch import Tensor

from muster.model.grouped_matmul import host_counts
from muster.model.routing import Routing


class _Permute(torch.autograd.Function):
    """Rows of all (token, expert) pairs, sorted by expert; saves the order alone."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, order_R: Tensor, place_R: Tensor, k: int) -> Tensor:
        ctx.k = k
        ctx.save_for_backward(place_R)
        return x_ND.index_select(0, order_R // k)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (place_R,) = ctx.saved_tensors
        return grads[0].index_select(0, place_R).unflatten(0, (-1, ctx.k)).sum(1), None, None, None


class _Combine(torch.autograd.Function):
    """Weighted sum of each token's k rows; saves the rows in the tokens' order, the weights and the order."""

    @staticmethod
    def forward(
        ctx: Any, y_RD: Tensor, weight_Nk: Tensor, order_R: Tensor, place_R: Tensor, shape: torch.Size
    ) -> Tensor:
        rows_NkD = y_RD.index_select(0, place_R).unflatten(0, weight_Nk.shape)
        ctx.save_for_backward(rows_NkD, weight_Nk, order_R)
        y_BSD = y_RD.new_empty(shape)  # no view, since the residual is added to it in place
        torch.bmm(weight_Nk.to(y_RD.dtype).unsqueeze(1), rows_NkD, out=y_BSD.view(len(weight_Nk), 1, shape[-1]))
        return y_BSD

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        rows_NkD, weight_Nk, order_R = ctx.saved_tensors
        grad_ND = grads[0].flatten(0, 1)
        grad_weight_Nk = torch.bmm(rows_NkD, grad_ND.unsqueeze(-1)).squeeze(-1)
        grad_RD = grad_ND.index_select(0, order_R // weight_Nk.shape[1])
        factor_R = weight_Nk.flatten().index_select(0, order_R).to(grad_RD.dtype)
        return grad_RD.mul_(factor_R.unsqueeze(1)), grad_weight_Nk.to(weight_Nk.dtype), None, None, None


class _ScatterSum(torch.autograd.Function):
    """Weighted sum of the rows of each token, of which there may be any number; saves rows, weights and tokens."""

    @staticmethod
    def forward(ctx: Any, y_RD: Tensor, weight_R: Tensor, token_R: Tensor, shape: torch.Size) -> Tensor:
        ctx.save_for_backward(y_RD, weight_R, token_R)
        y_BSD = y_RD.new_zeros(shape)
        y_BSD.view(-1, shape[-1]).index_add_(0, token_R, y_RD * weight_R.to(y_RD.dtype).unsqueeze(1))
        return y_BSD

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        y_RD, weight_R, token_R = ctx.saved_tensors
        grad_RD = grads[0].flatten(0, 1).index_select(0, token_R)
        grad_weight_R = torch.linalg.vecdot(y_RD, grad_RD).to(weight_R.dtype)
        return grad_RD.mul_(weight_R.to(grad_RD.dtype).unsqueeze(1)), grad_weight_R, None, None


def _dropped(routing: Routing) -> int:
    assert routing.num_dropped is not None
    return host_counts(routing.num_dropped.view(1), routing.expected_dropped)[0]


class ExpertRows:
    """The pairs of a routing without those that were dropped, sorted by expert.

    The sort is stable, so that an expert's rows keep the tokens' order whatever else changes.
    """

    def __init__(self, routing: Routing) -> None:
        self._routing = routing
        expert_R = routing.expert.flatten()
        order_R = expert_R.argsort(stable=True)
        # Dropped pairs have the number behind the last expert: they come last.
        counts_F = torch.zeros(routing.num_experts + 1, dtype=torch.int64, device=order_R.device)
        counts_F.scatter_add_(0, expert_R, torch.ones_like(order_R))
        self.counts_E = counts_F[:-1]
        """Rows of each expert."""
        self._place_R: Tensor | None = None
        if routing.token_R is None:
            self._place_R = torch.empty_like(order_R)
            self._place_R[order_R] = torch.arange(len(order_R), device=order_R.device)
        elif routing.num_dropped is not None:
            order_R = order_R[: len(order_R) - _dropped(routing)]
        self._order_R = order_R
        self._token_R = None if routing.token_R is None else routing.token_R.index_select(0, order_R)

    @property
    def num_tokens(self) -> int:
        """Tokens of a routing that has pairs of each."""
        return len(self._routing.expert)

    def permute(self, x_ND: Tensor) -> Tensor:
        """Return the hidden states of the rows (R, D)."""
        if self._token_R is not None:
            return x_ND.index_select(0, self._token_R)
        return _Permute.apply(x_ND, self._order_R, self._place_R, self._routing.expert.shape[1])  # type: ignore[return-value]

    def combine(self, y_RD: Tensor, shape: torch.Size) -> Tensor:
        """Return the weighted sums of each token's rows, as a tensor of this shape (B, S, D)."""
        weight = self._routing.weight
        if self._token_R is None:
            return _Combine.apply(y_RD, weight, self._order_R, self._place_R, shape)  # type: ignore[return-value]
        weight_R = weight.flatten().index_select(0, self._order_R)
        return _ScatterSum.apply(y_RD, weight_R, self._token_R, shape)  # type: ignore[return-value]
