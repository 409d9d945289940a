"""Times of layers of sub-layers side by side, whose sum over tensor-parallel ranks travels while attention computes
(`parallel_sublayers`, Kraken, arXiv:2408.07802 §3)."""

from muster.cost.time.collectives import all_reduce_s
from muster.cost.time.pass_cost import PassCost
from muster.cost.time.sublayer import LayerContext, LayerPasses, SublayerCost, add_tp_exit


def passes_of_sublayers(
    at: LayerContext, attention: SublayerCost, mlp: SublayerCost, recompute: PassCost, layer: int
) -> LayerPasses:
    """Return the costs of a layer's passes.

    The sum of all streams travels beside attention, and again where full recompute repeats it; in a backward the sum of
    its gradients beside that of attention, gradients of weights among it, which are taken to be computed there. The
    first layer has no sum.
    """
    forward, again = attention.forward + mlp.forward, recompute + PassCost()
    input_grads, weight_grads = attention.input_grads + mlp.input_grads, attention.weight_grads + mlp.weight_grads
    if layer > 0 and at.tp.size > 1:
        sum_s = all_reduce_s(at.tp, at.hidden_bytes)
        forward.add_overlapped("tp", sum_s, _total_s(attention.forward))
        input_grads.add_overlapped("tp", sum_s, _total_s(attention.input_grads + attention.weight_grads))
        if at.strategy.recompute == "full":
            again.add_overlapped("tp", sum_s, _total_s(attention.forward))
    return LayerPasses(forward, input_grads, weight_grads, again, mlp.turns)


def _total_s(cost: PassCost) -> float:
    return cost.compute_s + sum(cost.exposed_s.values())


def add_sum_of_streams(at: LayerContext, part: SublayerCost) -> None:
    """Add what a layer of sub-layers side by side computes beside an ordinary one: the sum of the rank's streams, and
    one more addition to each; in the backward as much for their gradients."""
    moved = (4 * at.streams + 1) * at.tokens * at.model.hidden_size * at.element_bytes
    part.add_elementwise(at, moved, moved, 2)


def add_first_streams(at: LayerContext, part: SublayerCost) -> None:
    """Add the copies of the embeddings that streams begin as, and the sum of their gradients over all ranks."""
    moved = (at.streams + 1) * at.tokens * at.model.hidden_size * at.element_bytes
    part.add_elementwise(at, moved, moved)
    if at.tp.size > 1:
        part.input_grads.add_exposed("tp", all_reduce_s(at.tp, at.hidden_bytes))


def add_conjunction(at: LayerContext, part: SublayerCost) -> None:
    """Add the linear layer that makes one hidden state of all streams, each rank's part of which is summed."""
    part.add_linear(at, at.tokens, at.model.hidden_size, at.model.hidden_size * at.streams)
    add_tp_exit(at, part)
