"""Times of a plugin's layers, from a trace of their forward."""

from muster.cost.time.kernels import matmul_s, memory_s, stream_s, sustained_flops_per_s
from muster.cost.time.pass_cost import PassCost
from muster.cost.time.sublayer import LayerContext, LayerPasses, SublayerCost, add_tp_entry, add_tp_exit
from muster.spec.plugin_model import PluginModel

PLUGIN_ATTENTION_RATE = 0.5
"""Assumed rate of a plugin's fused attention, relative to that of matmuls."""


def plugin_layer_passes(plugin: PluginModel, at: LayerContext) -> LayerPasses:
    """Return the costs of the passes of one layer.

    Each matmul of the forward has two in the backward, attention takes two and a half times its forward
    (arXiv:2205.14135 §3.1), and everything else moves twice the bytes.
    """
    facts, part, device = plugin.layer_trace(at.model, at.seq_len, at.tp.size, at.precision), SublayerCost(), at.device
    sequences = at.sequences / at.cp.size
    for one in facts.matmuls:
        seconds = matmul_s(device, one.m * sequences, one.n, one.k, at.matmul_precision, batch=one.batch)
        part.forward.add(seconds)
        part.input_grads.add(seconds, 1 if one.has_weight else 2)
        if one.has_weight:
            part.weight_grads.add(
                matmul_s(device, one.k, one.n, one.m * sequences, at.matmul_precision, batch=one.batch)
            )
        else:
            part.input_grads.add(seconds, 0)
    if facts.attention_flops:
        rate = PLUGIN_ATTENTION_RATE * sustained_flops_per_s(device, at.high_precision)
        seconds = facts.attention_flops * sequences / rate
        part.forward.add(seconds)
        part.input_grads.add(2.5 * seconds, 2)
    moved = facts.streamed_bytes * sequences
    part.forward.add(stream_s(device, moved, facts.num_kernels), facts.num_kernels)
    part.input_grads.add(facts.num_kernels * device.kernel_s + memory_s(device, 2 * moved), facts.num_kernels)
    for _ in range(facts.num_tp_regions):
        add_tp_entry(at, part)
        add_tp_exit(at, part)
    again = part.forward if at.strategy.recompute == "full" else PassCost()
    return LayerPasses(part.forward, part.input_grads, part.weight_grads, again)
