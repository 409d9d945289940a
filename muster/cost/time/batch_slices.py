"""Times of a layer's passes in two slices of a micro-batch, each of which computes while the tensor-parallel
collectives of the other travel (`tp_overlap: domino`, arXiv:2409.15241).

The executor lets the two slices take turns (`muster.parallel.domino`): a turn is a sublayer's compute, and its
collectives are under way in the other slice's turn. So a layer takes the longer one of its compute and its collectives,
but for what can't overlap: in a run of layers the last turn has no other one beside it.
"""

from collections.abc import Sequence
from math import prod

from muster.cost.time.alternating_turns import alternating_s
from muster.cost.time.kernels import stream_s
from muster.cost.time.pass_cost import OVERLAP_SLOWDOWN, PassCost
from muster.cost.time.sublayer import LayerContext, LayerPasses, SublayerCost
from muster.spec.model import layer_parameter_shapes


def slices_s(
    computed_s: Sequence[float], exchanged_s: Sequence[float], beside_s: Sequence[float] | None = None
) -> tuple[float, float]:
    """Return the seconds that two slices take for one layer of many, and those that a run of layers takes beyond that.

    `computed_s` and `exchanged_s` are one slice's turns in a layer, and the collectives of each; `beside_s`: the end of
    a turn that computes beside its own collective, as gradients of weights do. Both slices' collectives share links.

    Example: turns of 2 s with collectives of 1 s take 2 · (2 + 2) s, and 1 s at the end; with collectives of 3 s,
    2 · (3 + 3) s. What overlaps computes slower (`OVERLAP_SLOWDOWN`).
    """
    turns = zip(computed_s, exchanged_s, beside_s or [0.0] * len(computed_s), strict=True)
    return alternating_s([turn for turn in turns for _ in range(2)])


def passes_of_slices(
    at: LayerContext, layer: int, attention: SublayerCost, mlp: SublayerCost, recompute: PassCost
) -> LayerPasses:
    """Return the costs of a layer's passes over two slices, given those of one.

    Exposed collectives of a whole backward, in which gradients of inputs and of weights are made together, are among
    those of the inputs' gradients. The second slice adds its gradients of weights to the first one's.
    """
    tp_numel = sum(prod(shape) for _, shape in layer_parameter_shapes(at.model, layer) if len(shape) > 1) / at.tp.size
    summed = PassCost(stream_s(at.device, 3 * tp_numel * at.element_bytes), 1)
    forward, forward_end_s = _two([(attention.forward, 0.0), (mlp.forward, 0.0)])
    # A recomputed layer's collectives travel within the backward, before those of its gradients.
    repeated = [(recompute * 0.5, 0.0)] * 2 if "tp" in recompute.exposed_s else []
    own = PassCost() if repeated else recompute * 0.5
    parts = [(one.input_grads + one.weight_grads + own, one.tp_hidden_s) for one in (mlp, attention)]
    backward, backward_end_s = _two([*repeated, *parts])
    input_grads = (attention.input_grads + mlp.input_grads) * 2
    input_grads.exposed_s = backward.exposed_s
    again = recompute * 2
    again.exposed_s = {}
    weight_grads = (attention.weight_grads + mlp.weight_grads) * 2 + summed
    weight_grads.exposed_s = {}
    return LayerPasses(forward, input_grads, weight_grads, again, mlp.turns, ends_s=(forward_end_s, backward_end_s))


def _two(turns: Sequence[tuple[PassCost, float]]) -> tuple[PassCost, float]:
    """Return the cost of two slices with these turns each, and the seconds at the end of a run of layers; beside each
    turn the seconds of its collectives that it hides itself."""
    total = PassCost()
    for one, _ in turns:
        total += one * 2
    left_s = [one.exposed_s.get("tp", 0.0) for one, _ in turns]
    # A hidden second counts as `OVERLAP_SLOWDOWN` of an exposed one.
    messages_s = [left + (1 - OVERLAP_SLOWDOWN) * hidden_s for left, (_, hidden_s) in zip(left_s, turns, strict=True)]
    computed_s = [
        one.compute_s + sum(one.exposed_s.values()) - left for left, (one, _) in zip(left_s, turns, strict=True)
    ]
    each_s, end_s = slices_s(computed_s, messages_s, [hidden_s for _, hidden_s in turns])
    total.exposed_s.pop("tp", None)
    total.add_exposed("tp", each_s - 2 * sum(computed_s))
    return total, end_s
