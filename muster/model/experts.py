"""Mixture of experts in the place of the MLP, as single-device code: router, dispatch, experts, combination.

Tokens are permuted so that each expert's lie together, and every expert computes all of its tokens, however many they
are (dropless; MegaBlocks, arXiv:2211.15841). Suffixes: N tokens, k experts per token, R = N · k rows, D hidden width, E
experts, I inner width.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from muster.model.grouped_matmul import Segments, StackedLinear, grouped_linears
from muster.model.kernels import activate, gated_activation
from muster.model.routing import Router, RouterState
from muster.spec.model import ModelSpec

Recomputable = Callable[..., Any]
"""The hook for recompute of `muster.model.decoder`."""
ComputeRows = Callable[[Tensor, Segments], Tensor]
"""Experts of rows (R, D) that are sorted by expert."""
Dispatch = Callable[[ComputeRows, Tensor, Tensor], Tensor]
"""Gets experts, rows sorted by expert and the number of rows of each; returns the results of these rows."""


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
        torch.bmm(weight_Nk.to(y_RD.dtype).unsqueeze(1), rows_NkD, out=y_BSD.view(len(weight_Nk), 1, -1))
        return y_BSD

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        rows_NkD, weight_Nk, order_R = ctx.saved_tensors
        grad_ND = grads[0].flatten(0, 1)
        grad_weight_Nk = torch.bmm(rows_NkD, grad_ND.unsqueeze(-1)).squeeze(-1)
        grad_RD = grad_ND.index_select(0, order_R // weight_Nk.shape[1])
        factor_R = weight_Nk.flatten().index_select(0, order_R).to(grad_RD.dtype)
        return grad_RD.mul_(factor_R.unsqueeze(1)), grad_weight_Nk.to(weight_Nk.dtype), None, None, None


def local_linears(x: Tensor, *linears: nn.Linear) -> tuple[Tensor, ...]:
    """Apply several linear layers to one tensor."""
    return tuple(linear(x) for linear in linears)


def compute_here(experts: ComputeRows, x_RD: Tensor, counts_E: Tensor) -> Tensor:
    """Let this process's experts compute all rows, sorted by expert; a dispatcher of expert parallelism replaces this
    function."""
    return experts(x_RD, Segments(counts_E, len(x_RD)))


def unchanged(x_BSD: Tensor) -> Tensor:
    """Return the hidden state as it enters or leaves the experts; tensor parallelism replaces this function."""
    return x_BSD


class Experts(nn.Module):
    """The matrices of a layer's experts, stacked (experts, output, input): gate and up, or up alone, and down.

    Two functions are attributes so that they can be replaced: `grouped_linears`, by deferred weight gradients, and
    `recomputable` as in `Attention`.
    """

    grouped_linears = staticmethod(grouped_linears)

    def __init__(self, spec: ModelSpec, recomputable: Recomputable) -> None:
        super().__init__()
        assert spec.moe is not None
        sizes = spec.moe.num_experts, spec.hidden_size, spec.moe.expert_size
        self.recomputable = recomputable
        self.gate = StackedLinear(*sizes) if spec.gated else None
        self.up = StackedLinear(*sizes)
        self.down = StackedLinear(sizes[0], sizes[2], sizes[1])
        self._activate = partial(gated_activation if spec.gated else activate, kind=spec.activation)

    def forward(self, x_RD: Tensor, segments: Segments) -> Tensor:
        """Compute rows that are sorted by expert; `segments` are those of the experts whose matrices are here."""
        linears = (self.up,) if self.gate is None else (self.gate, self.up)
        inner = self.grouped_linears(x_RD, segments, *linears)
        return self.recomputable(self._activate, inner, self._down, segments)

    def _down(self, x_RI: Tensor, segments: Segments) -> Tensor:
        return self.grouped_linears(x_RI, segments, self.down)[0]


class SharedExpert(nn.Module):
    """Experts that every token passes through, as one MLP of their joint width."""

    def __init__(self, spec: ModelSpec, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(spec.hidden_size, width, bias=False) if spec.gated else None
        self.up = nn.Linear(spec.hidden_size, width, bias=False)
        self.down = nn.Linear(width, spec.hidden_size, bias=False)


class MoeMlp(nn.Module):
    """Router, routed experts and shared experts of one layer.

    Five functions are attributes so that they can be replaced: `enter` and `leave`, where the hidden state comes and
    where partial sums go, by tensor parallelism; `dispatch`, which takes rows to their experts and back, by expert
    parallelism; `local_linears`, by deferred weight gradients; `recomputable` as in `Attention`.
    """

    enter: Callable[[Tensor], Tensor] = staticmethod(unchanged)
    leave: Callable[[Tensor], Tensor] = staticmethod(unchanged)
    dispatch: Dispatch = staticmethod(compute_here)
    local_linears = staticmethod(local_linears)

    def __init__(self, spec: ModelSpec, state: RouterState, recomputable: Recomputable) -> None:
        super().__init__()
        moe = spec.moe
        assert moe is not None
        self.recomputable = recomputable
        self.router = Router(moe, spec.hidden_size, state)
        self.experts = Experts(spec, recomputable)
        self.shared = SharedExpert(spec, moe.shared_size) if moe.shared_size else None
        self.shared_gate = nn.Linear(spec.hidden_size, 1, bias=False) if moe.shared_gate else None
        self._activate = partial(gated_activation if spec.gated else activate, kind=spec.activation)

    def forward(self, x_BSD: Tensor, norm: nn.Module | None) -> Tensor:
        """Return the experts' output (B, S, D), to be added to the residual."""
        if norm is None:
            return self._compute(x_BSD)
        return self.recomputable(norm, (x_BSD,), self._compute)

    def _compute(self, x_BSD: Tensor) -> Tensor:
        x_BSD = self.enter(x_BSD)
        y_BSD = self._routed(x_BSD)
        if self.shared is not None:
            y_BSD = y_BSD + self._shared(x_BSD)
        return self.leave(y_BSD)

    def _routed(self, x_BSD: Tensor) -> Tensor:
        weight_Nk, expert_Nk = self.router(x_BSD)
        # Stable, so that an expert's rows keep the tokens' order whatever else changes.
        order_R = expert_Nk.flatten().argsort(stable=True)
        place_R = torch.empty_like(order_R)
        place_R[order_R] = torch.arange(len(order_R), device=order_R.device)
        counts_E = torch.zeros(self.router.moe.num_experts, dtype=torch.int64, device=order_R.device)
        counts_E.scatter_add_(0, expert_Nk.flatten(), torch.ones_like(order_R))
        rows_RD = _Permute.apply(x_BSD.flatten(0, 1), order_R, place_R, expert_Nk.shape[1])
        made_RD = self.dispatch(self.experts, rows_RD, counts_E)
        del rows_RD
        return _Combine.apply(made_RD, weight_Nk, order_R, place_R, x_BSD.shape)  # type: ignore[return-value]

    def _shared(self, x_BSD: Tensor) -> Tensor:
        own = self.shared
        assert own is not None
        linears = (own.up,) if own.gate is None else (own.gate, own.up)
        inner = self.local_linears(x_BSD, *linears)
        y_BSD = self.recomputable(self._activate, inner, self.local_linears, own.down)[0]
        if self.shared_gate is None:
            return y_BSD
        return y_BSD * self.shared_gate(x_BSD).sigmoid()
