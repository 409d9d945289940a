"""Mixture of experts in the place of the MLP, as single-device code: router, dispatch, experts, combination.

Tokens are permuted so that each expert's lie together, and every expert computes all of its rows, however many they
are (MegaBlocks, arXiv:2211.15841). Suffixes: R rows, D hidden width, E experts, I inner width.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from torch import Tensor, nn

from muster.model.expert_rows import ExpertRows
from muster.model.grouped_matmul import (
    ChooseKernel,
    Segments,
    Stacked,
    StackedLinear,
    default_kernel,
    grouped_linears,
)
from muster.model.kernels import mlp_activation
from muster.model.routing import Router, RouterState, Routing
from muster.spec.model import ModelSpec

Recomputable = Callable[..., Any]
"""The hook for recompute of `muster.model.decoder`."""
ComputeRows = Callable[[Tensor, Segments], Tensor]
"""Experts of rows (R, D) that are sorted by expert."""
Dispatch = Callable[[ComputeRows, Tensor, Routing], Tensor]
"""Gets experts, hidden states (B, S, D) and the chosen experts; returns the weighted sums of their results."""


def local_linears(x: Tensor, *linears: nn.Linear) -> tuple[Tensor, ...]:
    """Apply several linear layers to one tensor."""
    return tuple(linear(x) for linear in linears)


def compute_here(experts: ComputeRows, x_BSD: Tensor, routing: Routing) -> Tensor:
    """Let this process's experts compute all rows; a dispatcher of expert parallelism replaces this function."""
    rows = ExpertRows(routing)
    y_RD = rows.permute(x_BSD.flatten(0, 1))  # one name for all, so that none keeps what was read
    y_RD = experts(y_RD, Segments(rows.counts_E, len(y_RD)))
    return rows.combine(y_RD, x_BSD.shape)


class StartedDispatch(Protocol):
    """Tokens on their way to experts."""

    def compute(self) -> None:
        """Wait for the rows, let experts compute them, and let the results set out."""

    def finish(self) -> Tensor:
        """Wait for the results and return their weighted sums (B, S, D)."""
        ...


class _WholeDispatch:
    """Tokens whose way can't be divided: they set out when experts are to compute, and come back with the results."""

    def __init__(self, dispatch: Dispatch, experts: ComputeRows, x_BSD: Tensor, routing: Routing) -> None:
        self._dispatch = partial(dispatch, experts, x_BSD, routing)
        self._made: list[Tensor] = []

    def compute(self) -> None:
        self._made = [self._dispatch()]

    def finish(self) -> Tensor:
        return self._made.pop()


def start_dispatch(dispatch: Dispatch, experts: ComputeRows, x_BSD: Tensor, routing: Routing) -> StartedDispatch:
    """Let tokens set out by the dispatcher's `start`, where it has one."""
    start = getattr(dispatch, "start", partial(_WholeDispatch, dispatch))
    return start(experts, x_BSD, routing)


def unchanged(x_BSD: Tensor) -> Tensor:
    """Return the hidden state as it enters or leaves the experts; tensor parallelism replaces this function."""
    return x_BSD


class Experts(nn.Module):
    """The matrices of a layer's experts, stacked (experts, output, input): gate and up, or up alone, and down.

    Some functions are attributes so that they can be replaced: `grouped_linears`, by deferred weight gradients,
    `choose_kernel`, by what was measured, and `recomputable` as in `Attention`.
    """

    grouped_linears = staticmethod(grouped_linears)
    choose_kernel: ChooseKernel = staticmethod(default_kernel)

    def __init__(self, spec: ModelSpec, recomputable: Recomputable) -> None:
        super().__init__()
        assert spec.moe is not None
        sizes = spec.moe.num_experts, spec.hidden_size, spec.moe.expert_size
        self.recomputable = recomputable
        bias = spec.mlp_bias
        self.gate = StackedLinear(*sizes, bias=bias) if spec.gated else None
        self.up = StackedLinear(*sizes, bias=bias)
        self.down = StackedLinear(sizes[0], sizes[2], sizes[1], bias=bias)
        self._activate = mlp_activation(spec)

    @property
    def linears(self) -> list[StackedLinear]:
        """Gate and up, or up alone, and down."""
        return [one for one in (self.gate, self.up, self.down) if one is not None]

    def forward(
        self, x_RD: Tensor, segments: Segments, compute: "Callable[[Experts, Tensor, Segments], Tensor] | None" = None
    ) -> Tensor:
        """Compute rows that are sorted by expert; `segments` are those of the experts whose matrices are here, unless
        `compute` has others, too, and calls for them what it needs of these."""
        return self.compute(x_RD, segments, self.linears) if compute is None else compute(self, x_RD, segments)

    def compute(self, x_RD: Tensor, segments: Segments, linears: Sequence[Stacked]) -> Tensor:
        """Compute rows by stacked matrices as `linears` has them."""
        segments.choose_kernel = self.choose_kernel
        *entering, down = linears
        inner = self.grouped_linears(x_RD, segments, *entering)
        return self.recomputable(self._activate, inner, self._down, segments, down)

    def _down(self, x_RI: Tensor, segments: Segments, down: Stacked) -> Tensor:
        return self.grouped_linears(x_RI, segments, down)[0]


class SharedExpert(nn.Module):
    """Experts that every token passes through, as one MLP of their joint width."""

    def __init__(self, spec: ModelSpec, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(spec.hidden_size, width, bias=False) if spec.gated else None
        self.up = nn.Linear(spec.hidden_size, width, bias=False)
        self.down = nn.Linear(width, spec.hidden_size, bias=False)


class MoeMlp(nn.Module):
    """Router, routed experts and shared experts of one layer.

    Some functions are attributes so that they can be replaced: `enter` and `leave`, where the hidden state comes and
    where partial sums go, and `shared_ends`, the same of shared experts where theirs are others, by tensor parallelism;
    `dispatch`, which takes rows to their experts and back, by expert parallelism; `local_linears`, by deferred weight
    gradients; `recomputable` as in `Attention`.
    """

    enter: Callable[[Tensor], Tensor] = staticmethod(unchanged)
    leave: Callable[[Tensor], Tensor] = staticmethod(unchanged)
    shared_ends: tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]] | None = None
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
        self._activate = mlp_activation(spec)

    def start(self, x_BSD: Tensor, norm: nn.Module) -> StartedDispatch:
        """Let the hidden states that routed experts read (`moe.shortcut`) set out to them."""
        return self.recomputable(norm, (x_BSD,), self._start)

    def _start(self, x_BSD: Tensor) -> StartedDispatch:
        return start_dispatch(self.dispatch, self.experts, x_BSD, self.router(x_BSD))

    def forward(self, x_BSD: Tensor, norm: nn.Module | None, started: StartedDispatch | None = None) -> Tensor:
        """Return the experts' output (B, S, D), to be added to the residual; `started`: routed experts with tokens of
        their own."""
        if started is not None:
            started.compute()
            assert norm is not None
            shared_BSD = self.recomputable(norm, (x_BSD,), self._shared)
            return started.finish().add_(shared_BSD)
        if norm is None:
            return self._compute(x_BSD)
        return self.recomputable(norm, (x_BSD,), self._compute)

    def _compute(self, x_BSD: Tensor) -> Tensor:
        inside_BSD = self.enter(x_BSD)
        y_BSD = self.dispatch(self.experts, inside_BSD, self.router(inside_BSD))
        if self.shared is None:
            return self.leave(y_BSD)
        if self.shared_ends is None:
            return self.leave(y_BSD + self._shared(inside_BSD))
        enter_shared, leave_shared = self.shared_ends
        shared_BSD = self._shared(enter_shared(x_BSD))  # both before they leave, which recompute then needn't repeat
        return self.leave(y_BSD) + leave_shared(shared_BSD)

    def _shared(self, x_BSD: Tensor) -> Tensor:
        own = self.shared
        assert own is not None
        linears = (own.up,) if own.gate is None else (own.gate, own.up)
        inner = self.local_linears(x_BSD, *linears)
        y_BSD = self.recomputable(self._activate, inner, self.local_linears, own.down)[0]
        if self.shared_gate is None:
            return y_BSD
        return y_BSD * self.shared_gate(x_BSD).sigmoid()
