"""Times of an MLP, and of the matmuls of experts, which are MLPs of their own rows."""

from muster.cost.time.sublayer import LayerContext, SublayerCost, add_adapters, add_tp_entry, add_tp_exit

CLAMPED_SWIGLU_PASSES, CLAMPED_SWIGLU_KERNELS = (16, 44), 12
"""Passes over the inner activations (forward, backward), and kernels, of a clamped SwiGLU, operation by operation
(`muster.model.kernels.clamped_swiglu`)."""
CLAMP_PASSES = (8, 10)
"""Passes over the inner activations (forward, backward) of clamps before a fused SwiGLU: each half is clamped, and both
are put together; the backward masks the gradients of the halves, and puts them together (Megatron-Core,
fusions/fused_bias_geglu.py)."""
FUSED_EPILOGUE_PASSES = (1, 3)
"""Passes over the inner activations (forward, backward) beside those of grouped matmuls that compute the activation:
its result is written, and its inputs are read and their gradients written."""


def add_mlp(at: LayerContext, part: SublayerCost, inner: float) -> None:
    """Add an MLP of inner width `inner`, with the collectives of tensor parallelism around it; those of sub-layers side
    by side have none."""
    if at.model.parallel_sublayers == 1:
        add_tp_entry(at, part, 1 + at.model.gated)
    inner, hidden = inner / at.tp.size, at.model.hidden_size
    add_mlp_matmuls(at, part, at.tokens, inner)
    add_adapters(at, part, {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)})
    if at.model.parallel_sublayers == 1:
        add_tp_exit(at, part)


def add_mlp_matmuls(at: LayerContext, part: SublayerCost, tokens: float, inner: float, experts: float = 1) -> None:
    """Add the up (and gate) projection, the activation and the down projection."""
    gated = at.model.gated
    is_fused = experts > 1 and at.framework.fused_expert_epilogues
    outer, width = "output" if is_fused else "", (1 + gated) * inner
    hidden = at.model.hidden_size
    if experts == 1:
        into: dict[str, tuple[float, float]] = {"gate": (inner, hidden)} if gated else {}
        into["up"] = inner, hidden
        part.add_linears(at, tokens, into, follows_norm=at.model.has_pre_norms)
    else:
        part.add_linear(at, tokens, width, hidden, experts, 1 + gated, outer)
    numbers = tokens * inner * at.element_bytes
    forward, backward = (3, 5) if gated else (2, 3)
    extra, kernels = (1.0, 1) if at.framework.fused_elementwise else (5 / 3, 2)
    if at.model.swiglu_limit is not None and not at.framework.fused_swiglu_clamp:
        (forward, backward), extra, kernels = CLAMPED_SWIGLU_PASSES, 1.0, CLAMPED_SWIGLU_KERNELS
    if is_fused:
        forward, backward = FUSED_EPILOGUE_PASSES
    elif at.model.swiglu_limit is not None and at.framework.expert_bias_apart:
        part.add_elementwise(at, CLAMP_PASSES[0] * numbers, CLAMP_PASSES[1] * numbers, 3)
    part.add_elementwise(at, forward * extra * numbers, backward * extra * numbers, kernels)
    if experts == 1:
        part.add_linears(at, tokens, {"down": (hidden, inner)})
    else:
        part.add_linear(at, tokens, hidden, inner, experts, cast_by_others="input" if is_fused else "")
