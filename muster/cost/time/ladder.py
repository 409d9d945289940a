"""Times of a layer whose attention and MLP each compute while the tensor-parallel sum of the other one travels
(`residual: ladder`, arXiv:2501.06589)."""

from muster.cost.time.alternating_turns import alternating_s
from muster.cost.time.pass_cost import PassCost
from muster.cost.time.sublayer import LayerPasses, SublayerCost


def passes_of_ladder(attention: SublayerCost, mlp: SublayerCost, recompute: PassCost) -> LayerPasses:
    """Return the costs of a layer's passes.

    A sub-layer's sum travels beside the next sub-layer, and has to arrive before the one after that; in a backward,
    that of its input's gradient, behind its gradients of weights, likewise. What a backward repeats has no sums
    (`muster.parallel.ladder`). Exposed sums of a whole backward are among those of the inputs' gradients.
    """
    again = PassCost(recompute.compute_s, recompute.kernels, recompute.host_s, dict(recompute.exposed_s))
    again.exposed_s.pop("tp", None)
    forward, forward_end_s = _in_turns(attention.forward, mlp.forward)
    backward, backward_end_s = _in_turns(
        again + mlp.input_grads + mlp.weight_grads, attention.input_grads + attention.weight_grads
    )
    again.exposed_s = {}
    input_grads = attention.input_grads + mlp.input_grads
    input_grads.exposed_s = backward.exposed_s
    weight_grads = attention.weight_grads + mlp.weight_grads
    weight_grads.exposed_s = {}
    return LayerPasses(forward, input_grads, weight_grads, again, mlp.turns, ends_s=(forward_end_s, backward_end_s))


def _in_turns(first: PassCost, second: PassCost) -> tuple[PassCost, float]:
    """Return the cost of two sub-layers in each of many layers, and the seconds at the end of a run of layers."""
    total = first + second
    messages_s = [one.exposed_s.get("tp", 0.0) for one in (first, second)]
    computed_s = [
        one.compute_s + sum(one.exposed_s.values()) - message_s
        for one, message_s in zip((first, second), messages_s, strict=True)
    ]
    each_s, end_s = alternating_s([(*turn, 0.0) for turn in zip(computed_s, messages_s, strict=True)])
    total.exposed_s.pop("tp", None)
    total.add_exposed("tp", each_s - sum(computed_s))
    return total, end_s
