"""Time of the host for a layer whose operators are Python modules: it begins kernels one after another, and where they
are short, the device waits for it."""

from muster.cost.time.pass_cost import PassCost
from muster.cost.time.sublayer import LayerContext, SublayerCost

BACKWARD_SHARE = 1.75
"""Host's time of an operator's backward relative to its forward (experts of Transformer Engine: 2.1 and 1.2 ms,
github:NVIDIA/TransformerEngine issue 2897)."""
EXPERT_HOST_S = (1.2e-3 / 64, 2.1e-3 / 64)
"""Seconds of the host for each local expert, forward and backward (same source: 64 experts on GB200)."""
PLAIN_OPERATOR_HOST_S = 13.5e-6
"""Seconds of the host for an operator of PyTorch alone (a linear layer on a DGX H100, github:NVIDIA/TransformerEngine
issue 2053)."""
BIAS_OPERATORS = (2, 8)
"""Operators, forward and backward, that weight and add the bias of each expert (Megatron-Core, moe/experts.py)."""
ROUTER_OPERATORS = 7
"""Operators of the router and of the norm before it."""
EXCHANGE_OPERATORS = 3
"""Exchanges of rows, of their weights, and of results."""
EXCHANGE_WAITS = 2
"""Times that the host waits in a forward: for the numbers of rows of ranks, and of experts (Megatron-Core,
moe/token_dispatcher.py and moe/experts.py). The device then waits for the next operator."""


def add_host_time(at: LayerContext, attention: SublayerCost, mlp: SublayerCost, has_experts: bool) -> None:
    """Add the host's time of every operator of a layer that isn't replayed from a graph."""
    framework = at.framework
    if not framework.operator_host_s or framework.cuda_graphs:
        return
    operators = mlp.forward.kernels
    if "attention" not in framework.graphed:
        _add(attention, framework.operator_host_s * attention.forward.kernels)
    if has_experts:
        operators -= ROUTER_OPERATORS * ("router" in framework.graphed)
        if at.ep.size > 1:
            operators += EXCHANGE_OPERATORS
            mlp.forward.add_exposed("ep", EXCHANGE_WAITS * framework.operator_host_s)
        _add_experts(at, mlp)
    _add(mlp, framework.operator_host_s * operators)


def with_host_time(at: LayerContext, again: PassCost, part: str = "") -> PassCost:
    """Return the cost of operators that a backward repeats with the host's time for them; `part`: the part of a layer
    that may be replayed from a graph."""
    framework = at.framework
    if not framework.operator_host_s or framework.cuda_graphs or part in framework.graphed:
        return again
    return again + PassCost(host_s=framework.operator_host_s * again.kernels)


def _add(part: SublayerCost, forward_s: float) -> None:
    part.forward.host_s += forward_s
    part.input_grads.host_s += BACKWARD_SHARE * forward_s


def _add_experts(at: LayerContext, part: SublayerCost) -> None:
    moe = at.model.moe
    assert moe is not None
    biased = PLAIN_OPERATOR_HOST_S * (at.framework.expert_bias_apart and at.model.mlp_bias)
    for spent, expert_s, count in zip((part.forward, part.input_grads), EXPERT_HOST_S, BIAS_OPERATORS, strict=True):
        spent.host_s += moe.num_experts / at.ep.size * (expert_s + biased * count)
