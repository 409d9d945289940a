"""Transfers and buffers of context-parallel attention: what a rank passes to its collectives and sends, by kind.

From here `muster.cost.comm_volume` takes bytes, `muster.cost.time.context_parallel` times and the memory forecast
buffers. The kinds of `muster.spec.context_kinds` make these calls and no others: a test counts them.
"""

from collections.abc import Callable
from math import gcd
from typing import Literal, NamedTuple

from muster.layout.context_parallel import last_hop_parts
from muster.spec.context_kinds import ContextRanks, CpCommType

Among = Literal["ring", "outer ring", "back", "ulysses"]
"""Ranks of a transfer: those that hold other positions of the same heads, of a double ring the inner or the outer one,
or the same ring in the other direction; or those that exchange heads."""


class Transfer(NamedTuple):
    """Some equal calls of one collective, or equal sends to another rank of a ring."""

    kind: Literal["send", "all_gather", "reduce_scatter", "all_to_all"]
    calls: int
    numel: int
    """Elements of the tensor that one call is given."""
    in_master_dtype: bool = False
    """Elements are of the master dtype, else of the compute dtype."""
    among: Among = "ring"


class AttentionTransfers(NamedTuple):
    """Transfers of one layer's attention over one micro-batch."""

    forward: tuple[Transfer, ...]
    backward: tuple[Transfer, ...]


class AttentionShape(NamedTuple):
    """Positions of one rank and its heads while attention is computed."""

    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    seq_len: int = 0
    """Positions of a sequence; for the bytes of scores alone."""
    window: int | None = None
    """Keys that a query sees at most; for temporary bytes alone."""

    @property
    def scores(self) -> int:
        """Elements of the scores of the queries and the keys of whole sequences."""
        return self.tokens * self.heads * self.seq_len

    @property
    def queries(self) -> int:
        """Elements of the queries."""
        return self.tokens * self.heads * self.head_dim

    @property
    def keys_and_values(self) -> int:
        """Elements of the keys and values together."""
        return 2 * self.tokens * self.kv_heads * self.head_dim

    def exchanged(self, ranks: int) -> "AttentionShape":
        """Return the shape after `ranks` ranks have exchanged positions for heads; where there are fewer key/value
        heads than ranks, neighbours get the same one."""
        return AttentionShape(
            self.tokens * ranks,
            self.heads // ranks,
            max(self.kv_heads, ranks) // ranks,
            self.head_dim,
            window=self.window,
        )


class StateShape(NamedTuple):
    """States of a layer's linear attention on one rank."""

    sequences: int
    heads: int
    key_dim: int
    value_dim: int

    @property
    def numel(self) -> int:
        """Elements of all states."""
        return self.sequences * self.heads * self.key_dim * self.value_dim


def attention_transfers(ranks: ContextRanks, shape: AttentionShape) -> AttentionTransfers:
    """Return the transfers of one rank.

    Groups that exchange heads send queries, keys and values to the ranks of their heads, and outputs back, in the
    backward the gradients the other way (arXiv:2309.14509 §3.2); a ring among groups comes between (arXiv:2405.07719
    §3).

    Example: with p2p over 4 ranks a forward sends 3 blocks of 2 · tokens · kv_heads · head_dim elements.
    """
    if ranks.size == 1:
        return AttentionTransfers((), ())
    if ranks.ulysses == 1:
        kind = "double ring" if ranks.window > 1 else ranks.kind
        return _KINDS[kind].transfers(ranks, shape)
    inside = shape.exchanged(ranks.ulysses)
    ring = attention_transfers(ContextRanks("p2p", ranks.ring, window=ranks.window), inside)
    qkv = Transfer("all_to_all", 1, inside.queries + inside.keys_and_values, among="ulysses")
    outputs = Transfer("all_to_all", 1, inside.queries, among="ulysses")
    return AttentionTransfers((qkv, *ring.forward, outputs), (outputs, *ring.backward, qkv))


def unhidden_share(ranks: ContextRanks, backward: bool) -> float:
    """Return the share of a ring's scores that no transfer overlaps where its links are the slower part: those of the
    block that arrives last, or of the part of it that does (`muster.layout.context_parallel.ring_parts`), and in a
    double ring of as many as an inner ring has ranks."""
    if ranks.kind in ("token_ring", "rsa") or (ranks.kind == "burst" and backward):
        return 1 / ranks.ring
    return ranks.window / (2 * last_hop_parts(ranks.window, backward)) / ranks.ring


def attention_workspace(ranks: ContextRanks, shape: AttentionShape, compute: int, master: int, backward: bool) -> int:
    """Return the temporary bytes of attention over several ranks, with elements of `compute` and `master` bytes.

    Where heads are exchanged: queries, keys and values before, as they are sent and as they arrive; or afterwards what
    the ring needs. Rings and all-gathers also add up the output, or the gradient of the queries, in the master dtype.
    """
    if ranks.size == 1:
        return 0
    if ranks.ulysses == 1:
        kind = "double ring" if ranks.window > 1 else ranks.kind
        return _KINDS[kind].workspace(ranks, shape, compute, master, backward)
    inside = shape.exchanged(ranks.ulysses)
    exchange = 3 * (inside.queries + inside.keys_and_values) * compute
    return max(
        exchange,
        attention_workspace(ContextRanks("p2p", ranks.ring, window=ranks.window), inside, compute, master, backward),
    )


# ----------------------------------------------------------------------------------------------------------------------
# Linear attention


STATE_BLOCKS = 8
"""Blocks of a state that is handed on from rank to rank, at most."""


def num_state_blocks(key_dim: int) -> int:
    """Return the blocks in which a state is handed on: so many that they are equal."""
    return gcd(STATE_BLOCKS, key_dim)


def state_transfers(ranks: ContextRanks, shape: StateShape, index: int = 0) -> AttentionTransfers:
    """Return the transfers of the states of one layer's linear attention on rank `index`, in the master dtype.

    lasp2: an all-gather of the states, with the part that a rank keeps of an earlier one, for each element of the keys,
    and in the backward of their gradients (arXiv:2502.07563 §3.2). zeco: blocks of one state to the next rank, in the
    backward to the one before (arXiv:2507.01004 §3).
    """
    if ranks.size == 1:
        return AttentionTransfers((), ())
    if ranks.kind == "lasp2":
        kept = shape.numel // shape.value_dim
        return AttentionTransfers(
            (Transfer("all_gather", 1, shape.numel + kept, in_master_dtype=True),),
            (Transfer("all_gather", 1, shape.numel, in_master_dtype=True),),
        )
    blocks = num_state_blocks(shape.key_dim)
    hop = Transfer("send", blocks, shape.numel // blocks, in_master_dtype=True)
    return AttentionTransfers((hop,) * (index < ranks.size - 1), (hop,) * (index > 0))


def state_saved_numel(ranks: ContextRanks, shape: StateShape) -> int:
    """Return the elements that a layer saves of an exchange of states, in the master dtype: the state before the rank's
    positions, and the part that it keeps of it, or all ranks keep."""
    if ranks.size == 1:
        return 0
    return shape.numel + shape.numel // shape.value_dim * (ranks.size if ranks.kind == "lasp2" else 1)


def state_workspace(ranks: ContextRanks, shape: StateShape, master: int) -> int:
    """Return the temporary bytes of an exchange of states: all ranks' ones and the own beside what it keeps, or one
    that arrives and one that leaves, in blocks and whole."""
    if ranks.size == 1:
        return 0
    return (ranks.size + 3 if ranks.kind == "lasp2" else 4) * shape.numel * master


# ----------------------------------------------------------------------------------------------------------------------
# Kinds


class _Kind(NamedTuple):
    transfers: Callable[[ContextRanks, AttentionShape], AttentionTransfers]
    """Transfers of a ring of ranks of a shape."""
    workspace: Callable[[ContextRanks, AttentionShape, int, int, bool], int]
    """Temporary bytes for the same, elements of the compute and the master dtype in bytes, and backward or not."""


def _ring_transfers(ranks: ContextRanks, shape: AttentionShape) -> AttentionTransfers:
    """Return hops of keys and values, an early and a late chunk; in the backward again, and hops of their gradients
    from the second rank home."""
    hops = Transfer("send", 2 * (ranks.ring - 1), shape.keys_and_values // 2)
    return AttentionTransfers((hops,), (hops, hops._replace(in_master_dtype=True)))


_HeldBlocks = tuple[float, float]
"""Blocks of keys and values in the compute dtype, and sums of their gradients in the master dtype."""

_HELD_IN_RING: dict[int, _HeldBlocks] = {2: (0.5, 3), 3: (2, 3.5)}
"""Ranks of a ring → what a backward holds at its fullest moment: with more ranks `_HELD_IN_LONG_RING`."""
_HELD_IN_LONG_RING = (2.5, 3.5)
"""Both parts of a block and of the next one, and a part's terms of one block of scores; the sum of the rank's own
block, a part's terms, and of both parts' sums what arrives and what leaves."""
_HELD_IN_TWO_TURNS: dict[int, _HeldBlocks] = {2: (2.25, 3.25), 3: (4, 3.5)}
"""Ranks of an inner ring → the same of a double ring with two inner ones: from four on `_HELD_IN_LONG_TURNS`, of which
the parts for the last hop and their copies are two blocks."""
_HELD_IN_LONG_TURNS = (4.5, 3.5)
_HELD_IN_MORE_TURNS: dict[tuple[int, int], _HeldBlocks] = {
    (3, 2): (4.5, 3.5),
    (3, 3): (2.5, 6),
    (3, 4): (3.25, 5.75),
    (4, 2): (3.25, 5.75),
    (4, 3): (4, 6.5),
}
"""(Inner rings, ranks of each) → the same of more inner rings: beyond, `_HELD_IN_LONG_DOUBLE_RING`."""
_HELD_IN_LONG_DOUBLE_RING = (4.5, 6.5)
"""The same of many long inner rings: what two of them take, and three sums over the inner rings before on their way."""


def _ring_workspace(ranks: ContextRanks, shape: AttentionShape, compute: int, master: int, backward: bool) -> int:
    """Return the bytes of a ring's attention, whose blocks travel in an early and a late part.

    Forward: a block and the next one beside the output, a result of half the queries and the one before it, or its copy
    in the master dtype. Backward: the gradient of the queries, a term of half of them and a copy of the output for
    these, and what `_held_blocks` counts; in a ring of two also the begin, when a block leaves and one arrives beside
    the terms of two blocks of the rank's own keys. A narrow window makes blocks' terms small.
    """
    if not backward:
        return _merged_output(shape, compute, master) + round(shape.keys_and_values * _held_forward(ranks) * compute)
    blocks, sums = _held_blocks(ranks)
    if shape.window is not None and shape.window < shape.tokens:
        blocks -= 0.5
    held = blocks * compute + sums * master
    queries, statistics = shape.queries * (master + compute), shape.tokens * shape.heads * master // 2
    most = round(shape.keys_and_values * held) + queries
    if ranks.ring == 2:
        most = max(most, shape.keys_and_values * (3 * compute + master) + queries + shape.queries * compute // 2)
    return most + statistics


def _merged_output(shape: AttentionShape, compute: int, master: int) -> int:
    """Return the bytes of an output that is summed, a result of half the queries, and the one before or its copy in the
    master dtype, with their statistics."""
    results = master + (compute + master) / 2
    return round(shape.queries * results) + 2 * shape.tokens * shape.heads * master


def _held_forward(ranks: ContextRanks) -> float:
    """Return the blocks of keys and values that a ring's forward holds: one and the next; in a double ring those for
    the next turn beside, and parts of the last hop."""
    if ranks.window == 1:
        return 2
    return (4 if ranks.ring == 2 * ranks.window else 3.5) + 0.5 * (ranks.window > 3)


def _held_blocks(ranks: ContextRanks) -> _HeldBlocks:
    """Return what a ring's backward holds at its fullest moment, as the runtime's order of messages leaves it: counted
    there (`tests.test_context_memory`)."""
    turns = ranks.ring // ranks.window
    if ranks.window == 1:
        return _HELD_IN_RING.get(ranks.ring, _HELD_IN_LONG_RING)
    if turns == 2:
        return _HELD_IN_TWO_TURNS.get(ranks.window, _HELD_IN_LONG_TURNS)
    return _HELD_IN_MORE_TURNS.get((turns, ranks.window), _HELD_IN_LONG_DOUBLE_RING)


def _double_ring_transfers(ranks: ContextRanks, shape: AttentionShape) -> AttentionTransfers:
    """Return the hops of keys and values around inner rings and, once for each, over the outer one, in the last hop
    over it and the inner rings after it in smaller parts; in the backward again, and hops of their gradients around
    each inner ring, home, and over the outer one, home."""
    forward, backward = _double_ring_hops(ranks, shape, False), _double_ring_hops(ranks, shape, True)
    return AttentionTransfers(forward, (*backward, *(one._replace(in_master_dtype=True) for one in backward)))


def _double_ring_hops(ranks: ContextRanks, shape: AttentionShape, backward: bool) -> tuple[Transfer, ...]:
    turns, half, steps = ranks.ring // ranks.window, shape.keys_and_values // 2, ranks.window - 1
    last = last_hop_parts(ranks.window, backward)
    hops = (
        Transfer("send", 2 * (turns - 1) * steps, half),
        Transfer("send", 2 * last * steps, half // last),
        Transfer("send", 2 * (turns - 2), half, among="outer ring"),
        Transfer("send", 2 * last, half // last, among="outer ring"),
    )
    return tuple(one for one in hops if one.calls)


def _burst_transfers(ranks: ContextRanks, shape: AttentionShape) -> AttentionTransfers:
    """Return the hops of keys and values; in the backward those of queries and gradients of outputs, of two numbers for
    each query, and of the gradients of queries, which the last brings home."""
    numbers = Transfer("send", ranks.ring - 1, 2 * shape.tokens * shape.heads, in_master_dtype=True)
    following = Transfer("send", ranks.ring, shape.queries, in_master_dtype=True)
    backward = Transfer("send", ranks.ring - 1, 2 * shape.queries), numbers, following
    return AttentionTransfers(_ring_transfers(ranks, shape).forward, backward)


def _burst_workspace(ranks: ContextRanks, shape: AttentionShape, compute: int, master: int, backward: bool) -> int:
    """Return the bytes of the ring's forward; in the backward of the queries and the next ones, each with the gradient
    of its output and two numbers, the stand-in for the output and what it is made from, the gradient's own sum, the one
    that arrives and the one that leaves, and the gradients of keys and values."""
    if not backward:
        return _ring_workspace(ranks, shape, compute, master, backward)
    numbers = 4 * shape.tokens * shape.heads * master
    return shape.queries * (5 * compute + 3 * master) + shape.keys_and_values * (master + compute) + numbers


def _token_ring_transfers(ranks: ContextRanks, shape: AttentionShape) -> AttentionTransfers:
    """Return the hops of queries, and outputs and log-sum-exps straight back; in the backward the hops of queries,
    gradients of outputs and two numbers for each query, and the gradients of queries straight back."""
    hops, numbers = ranks.ring - 1, shape.tokens * shape.heads
    forward = (
        Transfer("send", hops, shape.queries),
        Transfer("send", hops, shape.queries, among="back"),
        Transfer("send", hops, numbers, in_master_dtype=True, among="back"),
    )
    backward = (
        Transfer("send", hops, 2 * shape.queries),
        Transfer("send", hops, 2 * numbers, in_master_dtype=True),
        Transfer("send", hops, shape.queries, in_master_dtype=True, among="back"),
    )
    return AttentionTransfers(forward, backward)


def _token_ring_workspace(ranks: ContextRanks, shape: AttentionShape, compute: int, master: int, backward: bool) -> int:
    """Return the bytes of the queries and the next ones, of the sums of their outputs and of this rank's, and of the
    outputs that leave and arrive, twice; in the backward what BurstAttention needs, and two more sums."""
    if backward:
        return _burst_workspace(ranks, shape, compute, master, backward) + 2 * shape.queries * master
    return shape.queries * (2 * master + 6 * compute)


def _rsa_transfers(ranks: ContextRanks, shape: AttentionShape) -> AttentionTransfers:
    """Return the hops of keys and of values, which go around one after the other; in the backward again, and the
    reduce-scatter of the gradients of keys and values of the whole sequence."""
    hops = Transfer("send", 2 * (ranks.ring - 1), shape.keys_and_values // 2)
    return AttentionTransfers((hops,), (hops, Transfer("reduce_scatter", 1, ranks.ring * shape.keys_and_values)))


def _rsa_workspace(ranks: ContextRanks, shape: AttentionShape, compute: int, master: int, backward: bool) -> int:
    """Return the bytes of the scores in the master dtype beside the copy that a log-sum-exp makes, less those of the
    probabilities, which are saved; in the backward of their gradient and its product with them, and of the gradients of
    keys and values of the whole sequence twice; and of a block and the next."""
    summed = _summed(shape, compute, master, backward) + shape.keys_and_values * compute
    if not backward:
        return shape.scores * (2 * master - compute) + summed
    return 2 * shape.scores * master + summed + 2 * ranks.ring * shape.keys_and_values * compute


def _all_gather_transfers(ranks: ContextRanks, shape: AttentionShape) -> AttentionTransfers:
    """Return the gathers of keys and values, once each way, and the reduce-scatter of their gradients."""
    gather = Transfer("all_gather", 1, shape.keys_and_values)
    return AttentionTransfers((gather,), (gather, Transfer("reduce_scatter", 1, ranks.ring * shape.keys_and_values)))


def _all_gather_workspace(ranks: ContextRanks, shape: AttentionShape, compute: int, master: int, backward: bool) -> int:
    """Return the bytes of keys and values of the whole sequence as they arrive and in order; in the backward in order,
    their gradients in the master dtype, and these in the compute dtype."""
    own, whole = shape.keys_and_values, shape.keys_and_values * ranks.ring
    summed = _summed(shape, compute, master, backward)
    return max(summed + whole * compute, whole * 2 * compute) + (
        whole * max(master, compute) + own * compute if backward else own * compute
    )


def _summed(shape: AttentionShape, compute: int, master: int, backward: bool) -> int:
    """Return the bytes of the output, or of the gradient of the queries, summed and as it is returned."""
    return shape.queries * (2 * master + compute if backward else master + compute)


_KINDS: dict[CpCommType | Literal["double ring"], _Kind] = {
    "p2p": _Kind(_ring_transfers, _ring_workspace),
    "double ring": _Kind(_double_ring_transfers, _ring_workspace),
    "burst": _Kind(_burst_transfers, _burst_workspace),
    "token_ring": _Kind(_token_ring_transfers, _token_ring_workspace),
    "rsa": _Kind(_rsa_transfers, _rsa_workspace),
    "all_gather": _Kind(_all_gather_transfers, _all_gather_workspace),
    # Attention with a softmax beside linear attention.
    "lasp2": _Kind(_all_gather_transfers, _all_gather_workspace),
    "zeco": _Kind(_all_gather_transfers, _all_gather_workspace),
}
