"""Transfers of context-parallel attention: what a rank passes to its collectives and sends, by kind.

From here `muster.cost.comm_volume` takes bytes, `muster.cost.time.attention` times and the memory forecast buffers. The
kinds of `muster.parallel.context_parallel` make these calls and no others: a test counts them.
"""

from typing import Literal, NamedTuple

from muster.spec.plan import CpCommType


class Transfer(NamedTuple):
    """Some equal calls of one collective, or equal sends to a neighbour."""

    kind: Literal["send", "all_gather", "reduce_scatter", "all_to_all"]
    calls: int
    numel: int
    """Elements of the tensor that one call is given."""
    in_master_dtype: bool = False
    """Elements are of the master dtype, else of the compute dtype."""


class AttentionTransfers(NamedTuple):
    """Transfers of one layer's attention over one micro-batch."""

    forward: tuple[Transfer, ...]
    backward: tuple[Transfer, ...]


def attention_transfers(
    kind: CpCommType, cp: int, tokens: int, heads: int, kv_heads: int, head_dim: int
) -> AttentionTransfers:
    """Return the transfers of a rank with `tokens` positions, `heads` query heads and `kv_heads` key/value heads.

    p2p: cp − 1 hops of keys and values; in the backward again, and cp hops of their gradients, which the last brings
    home. all_gather: keys and values once each way, and their gradients reduce-scattered. a2a: queries, keys and values
    to the ranks of their heads, where neighbours get the same key/value head if there are fewer than ranks, and outputs
    back; in the backward the gradients the other way (arXiv:2309.14509 §3.2).

    Example: with p2p over 4 ranks a forward sends 3 blocks of 2 · tokens · kv_heads · head_dim elements.
    """
    if cp == 1:
        return AttentionTransfers((), ())
    key_values = 2 * tokens * kv_heads * head_dim
    if kind == "all_gather":
        gather = Transfer("all_gather", 1, key_values)
        return AttentionTransfers((gather,), (gather, Transfer("reduce_scatter", 1, cp * key_values)))
    if kind == "a2a":
        exchanged = tokens * (heads + 2 * max(kv_heads, cp)) * head_dim
        both = Transfer("all_to_all", 1, exchanged), Transfer("all_to_all", 1, tokens * heads * head_dim)
        return AttentionTransfers(both, both[::-1])
    hops = Transfer("send", cp - 1, key_values)
    return AttentionTransfers((hops,), (hops, Transfer("send", cp, key_values, in_master_dtype=True)))
