"""Times and memory of a plugin's layers, from what was counted of their forward."""

from muster.cost.kernels import matmul_s, memory_s, stream_s, sustained_flops_per_s
from muster.cost.layer_parts import LayerPasses, LayerSetting, Part, enter, leave
from muster.cost.spent import Spent
from muster.spec.model import ModelSpec
from muster.spec.own_model import OwnModel, own_model
from muster.spec.plan import Precision, Recompute

FUSED_RATE = 0.5
"""Share of the rate of matrix products that fused attention of a plugin is taken to have."""


def own_layer_passes(own: OwnModel, at: LayerSetting) -> LayerPasses:
    """The passes of one layer: each product of the forward has two in the backward, attention two and a half times its
    forward (arXiv:2205.14135 §3.1), and all else moves twice the bytes."""
    facts, part, device = own.facts(at.model, at.seq_len, at.tp.size, at.precision), Part(), at.device
    sequences = at.sequences / at.cp.size
    for one in facts.products:
        seconds = matmul_s(device, one.m * sequences, one.n, one.k, at.linear_precision, batch=one.batch)
        part.forward.add(seconds)
        part.inputs.add(seconds, 1 if one.has_weight else 2)
        if one.has_weight:
            part.weights.add(matmul_s(device, one.k, one.n, one.m * sequences, at.linear_precision, batch=one.batch))
        else:
            part.inputs.add(seconds, 0)
    if facts.attention_flops:
        rate = FUSED_RATE * sustained_flops_per_s(device, at.wide)
        seconds = facts.attention_flops * sequences / rate
        part.forward.add(seconds)
        part.inputs.add(2.5 * seconds, 2)
    moved = facts.streamed_bytes * sequences
    part.forward.add(stream_s(device, moved, facts.kernels), facts.kernels)
    part.inputs.add(facts.kernels * device.kernel_s + memory_s(device, 2 * moved), facts.kernels)
    for _ in range(facts.spreads):
        enter(at, part)
        leave(at, part)
    again = part.forward if at.strategy.recompute == "full" else Spent()
    return LayerPasses(part.forward, part.inputs, part.weights, again)


def own_layer_bytes(
    spec: ModelSpec, tp: int, tokens: int, hidden_bytes: int, seq_len: int, precision: Precision, recompute: Recompute
) -> int | None:
    """What a plugin's layer keeps of `tokens` tokens from its forward to its backward; None for Muster's own layers."""
    own = own_model(spec)
    if own is None or recompute == "full":
        return None if own is None else hidden_bytes
    return own.facts(spec, seq_len, tp, precision).kept_bytes * tokens // seq_len


def own_largest_bytes(spec: ModelSpec, tp: int, tokens: int, seq_len: int, precision: Precision) -> int | None:
    """The largest tensor that the layer makes on the way; None for Muster's own layers."""
    own = own_model(spec)
    return None if own is None else own.facts(spec, seq_len, tp, precision).largest_bytes * tokens // seq_len
