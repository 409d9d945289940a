"""Temporary memory of linear attention's chunks, as `muster.model.chunked_recurrence` makes them."""

from muster.cost.activations import PassSizes
from muster.cost.context_traffic import state_workspace
from muster.spec.model_components import DECAY_RANK, LinearAttentionSpec


def recurrence_workspace(sizes: PassSizes, compute: int, master: int, backward: bool) -> int:
    """Return the temporary bytes of a layer's recurrence, with elements of `compute` and `master` bytes.

    Forward: scaled queries and sums of logarithms of decays; states and a copy without the last, in order; scores,
    decayed queries, and the two terms of the outputs. Backward: states and their gradients, a copy of one, scores and
    theirs, the gradients of the operands and two products; and those of outputs, gates and the hidden state, which
    wait. Where the compute dtype is another, also the operands in the master dtype.
    """
    linear, states = _linear(sizes), sizes.states
    assert states is not None
    tp, tokens, is_mixed = sizes.mesh.tp, sizes.tokens, compute != master
    keys, values, decays = (tokens * width // tp for width in (linear.k_width, linear.v_width, linear.decay_width))
    chunks = -(-tokens // (states.sequences * linear.chunk))
    all_states = (chunks + 1) * states.numel
    scores = tokens * linear.chunk * states.heads
    operands = keys + decays + (keys + values + decays) * is_mixed
    exchange = state_workspace(sizes.context, states, master)
    if not backward:
        return (operands + 2 * all_states + scores + 2 * values + keys + decays) * master + exchange
    gradients = 4 * keys + values + decays + values * is_mixed
    waiting = 2 * values * compute + sizes.hidden_bytes
    return (operands + 3 * all_states + 2 * scores + gradients) * master + waiting + exchange


def deferred_width(sizes: PassSizes) -> int:
    """Return the elements of a position that linear attention's matmuls keep from I to W, without hidden states."""
    linear, tp = _linear(sizes), sizes.mesh.tp
    narrow = 2 * DECAY_RANK * (linear.kind == "gla")
    return (2 * linear.k_width + 3 * linear.v_width + linear.decay_width) // tp + narrow


def _linear(sizes: PassSizes) -> LinearAttentionSpec:
    linear = sizes.model.linear_attention
    assert linear is not None
    return linear
