"""Turns of a layer's passes in a pair whose passes hide each other's tensor-parallel collectives
(`tp_overlap: pairs`)."""

from collections.abc import Iterator, Sequence

from muster.cost.time.pass_cost import PassCost
from muster.cost.time.pass_pairs import Turn
from muster.cost.time.sublayer import LayerContext, SublayerCost


def tp_turns(
    at: LayerContext, parts: Sequence[SublayerCost], recompute: PassCost
) -> tuple[tuple[Turn, ...], tuple[Turn, ...]]:
    """Return the turns of forward and backward of sub-layers that follow one another: each computes until it waits for
    a collective. What the backward computes again comes before its own turns, with the collectives that are repeated.
    """
    if not at.has_tp_pairs:
        return (), ()
    forward = [turn for part in parts for turn in _forward(part)]
    again = list(forward) if (repeated_s := recompute.exposed_s.get("tp", 0.0)) else []
    if again and repeated_s < sum(turn.exchanged_s for turn in forward) - again[-1].exchanged_s / 2:
        again.pop()  # a recompute that ends before its last collective
    left_s = recompute.compute_s - sum(turn.computed_s for turn in again)
    shares = (1.0, *[0.0] * (len(parts) - 1)) if again else [1 / len(parts)] * len(parts)
    backward = [
        turn for part, share in zip(reversed(parts), shares, strict=True) for turn in _backward(part, share * left_s)
    ]
    return tuple(forward), (*again, *backward)


def _forward(part: SublayerCost) -> Iterator[Turn]:
    """Yield the turns of a forward, whose compute is divided equally between them."""
    messages = [one for one in part.tp_messages if one.forward_s]
    for one in messages:
        yield Turn(part.forward.compute_s / len(messages), one.forward_s)


def _backward(part: SublayerCost, again_s: float) -> Iterator[Turn]:
    """Yield the turns of a full backward, of which `again_s` are for what it computes again."""
    messages = [one for one in reversed(part.tp_messages) if one.backward_s]
    compute_s = part.input_grads.compute_s + part.weight_grads.compute_s + again_s
    for one in messages:
        yield Turn(compute_s / len(messages), one.backward_s, min(one.beside_s, compute_s / len(messages)))
