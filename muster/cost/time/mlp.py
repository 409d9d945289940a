"""Times of an MLP, and of the matmuls of experts, which are MLPs of their own rows."""

from muster.cost.time.sublayer import LayerContext, SublayerCost, add_adapters, add_tp_entry, add_tp_exit

CLAMPED_SWIGLU_PASSES, CLAMPED_SWIGLU_KERNELS = (16, 44), 12
"""Passes over the inner activations (forward, backward), and kernels, of a clamped SwiGLU, operation by operation
(`muster.model.kernels.clamped_swiglu`)."""


def add_mlp(at: LayerContext, part: SublayerCost, inner: float) -> None:
    """Add an MLP of inner width `inner`, with the collectives of tensor parallelism around it."""
    add_tp_entry(at, part, 1 + at.model.gated)
    inner, hidden = inner / at.tp.size, at.model.hidden_size
    add_mlp_matmuls(at, part, at.tokens, inner)
    add_adapters(at, part, {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)})
    add_tp_exit(at, part)


def add_mlp_matmuls(at: LayerContext, part: SublayerCost, tokens: float, inner: float, experts: float = 1) -> None:
    """Add the up (and gate) projection, the activation and the down projection."""
    gated = at.model.gated
    part.add_linear(at, tokens, (1 + gated) * inner, at.model.hidden_size, experts, 1 + gated)
    numbers = tokens * inner * at.element_bytes
    forward, backward = (3, 5) if gated else (2, 3)
    extra, kernels = (1.0, 1) if at.framework.fused_elementwise else (5 / 3, 2)
    if at.model.swiglu_limit is not None and not at.framework.fused_swiglu_clamp:
        (forward, backward), extra, kernels = CLAMPED_SWIGLU_PASSES, 1.0, CLAMPED_SWIGLU_KERNELS
    part.add_elementwise(at, forward * extra * numbers, backward * extra * numbers, kernels)
    part.add_linear(at, tokens, at.model.hidden_size, inner, experts)
