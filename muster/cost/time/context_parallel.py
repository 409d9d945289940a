"""Time of context parallelism: sends around rings, which overlap with attention, and collectives, which don't."""

from collections import defaultdict
from dataclasses import replace
from functools import lru_cache
from math import ceil

from muster.cost.context_traffic import (
    AttentionShape,
    StateShape,
    Transfer,
    attention_transfers,
    state_transfers,
    unhidden_share,
)
from muster.cost.time.collectives import CommGroup, all_gather_s, all_to_all_s, p2p_s, reduce_scatter_s
from muster.cost.time.kernels import stream_s
from muster.cost.time.pass_cost import PassCost
from muster.cost.time.sublayer import LayerContext, SublayerCost
from muster.spec.context_kinds import ContextRanks

MERGE_BYTES, MERGE_KERNELS = 26, 11
"""Bytes per element of a block's output in two bytes that is merged in float32, and kernels for a block."""
ADD_BYTES = 10
"""Bytes per element of a gradient in two bytes that is added in float32."""


def add_context_transfers(
    at: LayerContext, part: SublayerCost, shape: AttentionShape, forward_s: float, backward_s: float
) -> None:
    """Add the transfers of context parallelism (`attention_transfers`) to an attention whose scores take some seconds.

    Sends overlap with the scores but those after the last one (`unhidden_share`). In programs that don't say what the
    gradients around their ring are summed in, these travel with keys and values, in the compute dtype, and blocks
    travel whole.
    """
    forward, backward = attention_transfers(at.context, shape)
    shares = unhidden_share(at.context, backward=False), unhidden_share(at.context, backward=True)
    if at.framework.cp_grad_bytes is None:
        forward, backward = _in_whole_blocks(at.context, forward), _in_whole_blocks(at.context, backward)
        backward = tuple(
            one._replace(numel=2 * one.numel) if one.kind == "send" else one
            for one in backward
            if not one.in_master_dtype
        )
        shares = 1 / at.context.ring, 1 / at.context.ring
    _add_pass(at, part.forward, forward, (1 - shares[0]) * forward_s)
    _add_pass(at, part.input_grads, backward, (1 - shares[1]) * backward_s)


def _in_whole_blocks(context: ContextRanks, transfers: tuple[Transfer, ...]) -> tuple[Transfer, ...]:
    """Return the transfers of a single ring whose blocks aren't sent in two parts."""
    if context.kind not in ("p2p", "a2a+p2p") or context.window > 1:
        return transfers
    return tuple(
        one._replace(calls=one.calls // 2, numel=2 * one.numel) if one.kind == "send" else one for one in transfers
    )


def add_block_merges(at: LayerContext, part: SublayerCost, shape: AttentionShape) -> None:
    """Add what merging the blocks of a ring moves in memory (`muster.model.block_attention`).

    In a ring a rank's queries see half the keys of each other rank, in two blocks, and half of them a block more of its
    own. Where all keys are gathered, the early and the late queries have two blocks each, consecutive ones two. Each
    output is read, converted to float32 and added to the scaled sum: 26 bytes per element. In the backward a term of
    each gradient is added, and those of keys and values also begin at zero, and join the sum of the ranks before or
    are converted and cut by rank.
    """
    ring, device = at.context.ring, at.device
    blocks = 2.0 if at.context.is_contiguous else 4.0 if at.context.kind == "all_gather" else 2 * ring + 1
    rounds = blocks / 2  # through all of a rank's queries
    forward = rounds * MERGE_BYTES * shape.queries
    backward = rounds * ADD_BYTES * shape.queries + ring * (ADD_BYTES + 16) * shape.keys_and_values
    kernels = blocks * MERGE_KERNELS
    part.forward.add(forward_s := stream_s(device, forward, kernels), kernels)
    part.attention_core.add(forward_s, kernels)
    part.input_grads.add(stream_s(device, backward, kernels), kernels)


def add_state_transfers(at: LayerContext, part: SublayerCost, shape: StateShape, scores_s: float) -> None:
    """Add the exchange of linear attention's states (`state_transfers`) to a layer whose chunks take some seconds.

    An all-gather overlaps with the outputs of a rank's own positions, half of the work; blocks that are handed on reach
    the last rank after a hop for each rank and each further block, of which the outputs hide as much.
    """
    for cost, transfers in zip((part.forward, part.input_grads), state_transfers(at.context, shape, 1), strict=True):
        for one in transfers:
            hops = at.cp.size - 2 + one.calls if one.kind == "send" else one.calls
            cost.add_overlapped("cp", hops * _transfer_s(at, one), scores_s / 2)


def add_slice_merges(at: LayerContext, part: SublayerCost, shape: AttentionShape) -> None:
    """Add what merging the blocks of a slice of sequences moves in memory: its own keys, and those of the slices before
    it. In the backward a term of the gradients of queries and of all these keys and values is added."""
    blocks = 2.0 if at.earlier_positions else 1.0
    seen = 1 + at.earlier_positions / at.seq_len
    forward_s = stream_s(at.device, blocks * MERGE_BYTES * shape.queries, blocks * MERGE_KERNELS)
    moved = ADD_BYTES * (blocks * shape.queries + seen * shape.keys_and_values)
    part.forward.add(forward_s, blocks * MERGE_KERNELS)
    part.attention_core.add(forward_s, blocks * MERGE_KERNELS)
    part.input_grads.add(stream_s(at.device, moved, blocks * MERGE_KERNELS), blocks * MERGE_KERNELS)


def _add_pass(at: LayerContext, cost: PassCost, transfers: tuple[Transfer, ...], hiding_s: float) -> None:
    sends_s: defaultdict[str, float] = defaultdict(float)
    for one in transfers:
        seconds = one.calls * _transfer_s(at, one)
        if one.kind == "send":
            sends_s[one.among] += seconds
        else:
            cost.add_exposed("cp", seconds)
    if sends_s:
        cost.add_overlapped("cp", max(sends_s.values()), hiding_s)


def _transfer_s(at: LayerContext, one: Transfer) -> float:
    group = _members(at.cp, at.context, one.among)
    element_bytes = max(at.framework.cp_grad_bytes or 0, at.element_bytes) if one.in_master_dtype else at.element_bytes
    size = one.numel * element_bytes
    if one.kind == "send":
        return p2p_s(group, size)
    if one.kind == "all_gather":
        return all_gather_s(group, group.size * size)
    return reduce_scatter_s(group, size) if one.kind == "reduce_scatter" else all_to_all_s(group, size)


@lru_cache(maxsize=1024)
def _members(cp: CommGroup, context: ContextRanks, among: str) -> CommGroup:
    """Return the ranks of one transfer, a part of the context-parallel ranks: those that exchange heads are neighbours,
    the members of a ring among them are as far apart as there are of these, and those of an outer ring by an inner one
    more."""
    size, stride = context.ring, context.ulysses
    if among == "ulysses":
        size, stride = context.ulysses, 1
    elif among == "outer ring":
        size, stride = context.ring // context.window, context.ulysses * context.window
    elif context.window > 1:
        size = context.window
    if size == cp.size:
        return cp
    together = min(size, max(1, cp.max_ranks_per_domain // stride))
    return replace(cp, size=size, num_domains=min(cp.num_domains, ceil(size / together)), max_ranks_per_domain=together)
