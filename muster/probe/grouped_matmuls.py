"""Measurement of the kernels of experts: grouped matmuls by each kernel that there is, and routing."""

from collections.abc import Callable
from functools import partial
from itertools import product

import torch
from torch import Tensor

from muster.model.experts import MoeMlp, compute_here
from muster.model.grouped_matmul import Segments, grouped_product, grouped_weight_grad, has_grouped_mm
from muster.model.projections import recomputable
from muster.model.routing import RouterState
from muster.probe.timer import KernelTimer
from muster.spec.machine_rates import GroupedKernel, MatmulPass
from muster.spec.model import ModelSpec
from muster.spec.model_components import MoeSpec

NUM_EXPERTS, TOP_K = 8, 2

Points = list[tuple[int, int, int, float]]


def time_grouped_matmuls(
    clock: KernelTimer,
    dtype: torch.dtype,
    expert_rows: tuple[int, ...],
    widths: tuple[int, ...],
    copies: Callable[[int], int],
) -> dict[GroupedKernel, dict[MatmulPass, Points]]:
    """Time the three matmuls of stacked layers of 8 experts with equally many rows, by each kernel; seconds are those
    of one expert. `copies` says how many data sets of so many elements are used in turn."""
    kernels: list[GroupedKernel] = ["segments", "padded"]
    if has_grouped_mm(clock.device, dtype):
        kernels.append("grouped_mm")
    found: dict[GroupedKernel, dict[MatmulPass, Points]] = {
        kernel: {"forward": [], "input": [], "weight": []} for kernel in kernels
    }
    for rows, inner, outer in product(expert_rows, widths, widths):
        calls: dict[tuple[GroupedKernel, MatmulPass], list[Callable[[], object]]] = {}
        for _ in range(copies(NUM_EXPERTS * (rows * (inner + outer) + inner * outer))):
            sizes = NUM_EXPERTS * rows, inner, outer
            for kernel in kernels:
                for kind, call in _calls(kernel, *sizes, dtype, clock.device):
                    calls.setdefault((kernel, kind), []).append(call)
        for (kernel, kind), some in calls.items():
            found[kernel][kind].append((rows, inner, outer, clock.time(some) / NUM_EXPERTS))
    return found


def _calls(
    kernel: GroupedKernel, num_rows: int, inner: int, outer: int, dtype: torch.dtype, device: torch.device
) -> tuple[tuple[MatmulPass, Callable[[], object]], ...]:
    """Return forward, gradient of inputs and gradient of weights of a stacked layer, as the runtime computes them."""
    counts_E = torch.full((NUM_EXPERTS,), num_rows // NUM_EXPERTS, dtype=torch.int64, device=device)
    segments = Segments(counts_E, num_rows)
    segments.is_even = False  # padded by copies, as rows of routed tokens are
    segments.choose_kernel = lambda *_: kernel
    x_RI, grad_RO = (torch.randn(num_rows, width, dtype=dtype, device=device) for width in (inner, outer))
    weight_EOI = torch.randn(NUM_EXPERTS, outer, inner, dtype=dtype, device=device).requires_grad_()
    weights = weight_EOI.detach()
    return (
        ("forward", partial(grouped_product, x_RI, weights.transpose(1, 2), segments)),
        ("input", partial(grouped_product, grad_RO, weights, segments, "input")),
        ("weight", partial(grouped_weight_grad, weight_EOI, x_RI, grad_RO, segments)),
    )


def routing_passes(
    elements: int, width: int, dtype: torch.dtype, device: torch.device
) -> tuple[Callable[[], Tensor], Tensor, Tensor]:
    """Return a forward of router, permutation and combination of so many elements of permuted rows, the gradient of its
    result, and its input."""
    spec = ModelSpec(
        vocab_size=2,
        hidden_size=width,
        num_layers=1,
        num_heads=1,
        intermediate_size=1,
        moe=MoeSpec(num_experts=NUM_EXPERTS, top_k=TOP_K, expert_size=1),
    )
    mlp = MoeMlp(spec, RouterState(), recomputable).to(device=device, dtype=dtype)
    mlp.dispatch = lambda experts, x_BSD, routing: compute_here(lambda x_RD, _: x_RD, x_BSD, routing)
    tokens = max(1, elements // width // TOP_K)
    x_BSD = torch.randn(1, tokens, width, dtype=dtype, device=device, requires_grad=True)
    return lambda: mlp(x_BSD, None), torch.ones_like(x_BSD), x_BSD
