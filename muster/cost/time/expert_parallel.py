"""Times of a layer's experts: routing, their matmuls, and the exchange of tokens with the ranks that have them."""

from collections.abc import Sequence
from itertools import accumulate
from math import comb

from muster.cost.activations import expert_parameter_bytes
from muster.cost.expert_traffic import ExpertCall, RoutedShape, copy_calls, dispatch_calls
from muster.cost.precision_bytes import master_bytes
from muster.cost.time.collectives import all_gather_s, all_to_all_s, reduce_scatter_s
from muster.cost.time.kernels import matmul_s, stream_s
from muster.cost.time.mlp import add_mlp, add_mlp_matmuls
from muster.cost.time.pass_cost import PassCost
from muster.cost.time.pass_pairs import turns_of_rows
from muster.cost.time.sublayer import LayerContext, SublayerCost, add_tp_entry, add_tp_exit
from muster.spec.expert_kinds import ROW_SCALE_BYTES

EXPERT_BIAS_PASSES = (4.5, 6)
"""Passes over the outputs of experts' matrices (forward, backward) that biases of experts take: their rows are gathered
and added; gradients are cast to float32 and summed by expert."""
BIAS_APART_BYTES = {False: (12, 16), True: (28, 40)}
"""Bytes per element of experts' outputs (forward, backward) that weighting and adding their biases expert by expert
moves, with weights in bf16 and in float32: product, sum, concatenation and cast, and the gradients of output, bias and
weight (Megatron-Core, moe/experts.py)."""
PERMUTE_RATE = 0.5
"""Share of the streaming rate at which rows are gathered into another order (B200, github:MooreThreads/SimuMax
configs/system/b200_bf16_ceperm.json)."""
LSH_COLUMNS, LSH_KERNELS = 48, 25
"""Directions that hash functions turn a row to, and kernels of hashes and their order (`muster.parallel.lsh_rows`)."""


def add_experts(at: LayerContext, part: SublayerCost) -> None:
    """Add router, dispatch, grouped matmuls over the local experts, and combine (arXiv:2101.03961 §2).

    All ranks wait for the one whose experts got most tokens. Each rank dispatches the tokens of its own part of the
    sequence, or all where the hidden state enters experts as it does an MLP.
    """
    model, moe = at.model, at.model.moe
    assert moe is not None
    rows = at.routed_tokens * moe.top_k * at.etp * at.expert_imbalance
    own = at.tokens if at.experts_like_mlp else at.routed_tokens
    hidden = model.hidden_size * at.element_bytes
    part.add_elementwise(at, 2 * own * moe.num_experts * 4 + own * hidden, 3 * own * moe.num_experts * 4, 6)
    sorts = 1 + (at.framework.sorts_received_rows and moe.num_experts > at.ep.size > 1)
    permuted = 4 * sorts * (rows if at.experts_like_mlp else rows / at.etp) * hidden / PERMUTE_RATE
    part.add_elementwise(at, permuted, permuted, 2 + 2 * sorts)
    if at.dispatch.lsh_rate:  # hashes, sums of runs, and the way back to each row
        part.forward.add(matmul_s(at.device, rows / at.etp, LSH_COLUMNS, model.hidden_size, at.high_precision))
        part.add_elementwise(at, rows / at.etp * 5 * hidden, rows / at.etp * 4 * hidden, LSH_KERNELS)
    if at.dispatch.dtype != "none":
        part.add_elementwise(at, rows / at.etp * (3 * hidden + 2 * (model.hidden_size + ROW_SCALE_BYTES)), 0, 4)
    for spent in (part.forward, part.input_grads):
        if at.experts_like_mlp:
            continue
        if at.etp > 1:
            gathered = rows * hidden
            spent.add_exposed("tp", all_gather_s(at.tp, gathered) + reduce_scatter_s(at.tp, gathered))
        elif at.tp.size > 1 and at.framework.experts_in_tp_region and not at.strategy.sp:
            # Each rank routes a part of the positions, and gathers the others.
            spent.add_exposed("tp", all_gather_s(at.tp, at.tokens * hidden))
    if at.experts_like_mlp:
        add_tp_entry(at, part)
    part.add_parts(_chunk_of_matmuls(at), at.dispatch.chunks)
    if model.mlp_bias and not at.framework.fused_swiglu_clamp:
        made = rows * ((1 + model.gated) * moe.expert_size / at.etp + model.hidden_size) * at.element_bytes
        forward, backward = EXPERT_BIAS_PASSES
        part.add_elementwise(at, forward * made, backward * made, 2 * (2 + model.gated))
    if model.mlp_bias and at.framework.expert_bias_apart:
        forward, backward = BIAS_APART_BYTES[at.framework.dispatch_once_per_rank]
        part.add_elementwise(at, forward * rows * model.hidden_size, backward * rows * model.hidden_size, 0)
    if moe.shared_size and at.experts_like_mlp:
        add_mlp_matmuls(at, part, at.tokens, moe.shared_size / at.tp.size)
    elif moe.shared_size:
        add_mlp(at, part, moe.shared_size)
    if at.experts_like_mlp:
        add_tp_exit(at, part)


def _chunk_of_matmuls(at: LayerContext) -> SublayerCost:
    """Return the matmuls of the rows of one chunk. Gradients of the weights are added up over chunks."""
    moe, part, chunks = at.model.moe, SublayerCost(), at.dispatch.chunks
    assert moe is not None
    inner, experts = moe.expert_size / at.etp, moe.num_experts / at.ep.size + at.expert_load.copies
    pairs = max(1, round(at.routed_tokens)) * moe.top_k
    sent_share = at.dispatch.sent_rows(pairs, moe.num_experts) / pairs
    rows = at.routed_tokens * moe.top_k * at.etp * at.expert_imbalance * sent_share
    add_mlp_matmuls(at, part, rows / chunks, inner, experts)
    if chunks > 1:
        elements = (2 + at.model.gated) * inner * at.model.hidden_size * experts
        added_s = stream_s(at.device, 3 * elements * at.element_bytes)
        part.weight_grads = part.weight_grads + PassCost(added_s, 1) * ((chunks - 1) / chunks)
    return part


# ----------------------------------------------------------------------------------------------------------------------
# Exchange


def add_expert_exchange(at: LayerContext, attention: SublayerCost, mlp: SublayerCost) -> None:
    """Add the exchange of tokens with their experts' ranks, and of gradients.

    It is exposed, or overlaps with the passes of another micro-batch (arXiv:2412.19437 §3.2.1); in chunks, those that
    travel overlap with the matmuls of others (arXiv:2206.03382 §4.2). Through a shortcut, rows travel beside attention
    and come back beside shared experts, and so do their gradients (arXiv:2404.05019).
    """
    calls = dispatch_calls(at.dispatch, _routed_shape(at))
    backward_s = sum(one.compute_s for part in (attention, mlp) for one in (part.input_grads, part.weight_grads))
    chunk = _chunk_of_matmuls(at)
    beside = _work_beside(at, attention)
    experts_s = chunk.forward.compute_s, chunk.input_grads.compute_s + chunk.weight_grads.compute_s
    rows_s = ([_call_s(at, call) for call in made[-len(calls.backward) :]] for made in (calls.forward, calls.backward))
    forward, backward = map(turns_of_rows, rows_s, experts_s)
    mlp.turns = forward, backward
    passes = (
        (mlp.forward, calls.forward, attention.forward.compute_s + mlp.forward.compute_s, chunk.forward.compute_s),
        (mlp.input_grads, calls.backward, backward_s, chunk.input_grads.compute_s + chunk.weight_grads.compute_s),
    )
    for (spent, made, compute_s, matmuls_s), hidden in zip(passes, beside, strict=True):
        seconds = [_call_s(at, call) for call in made]
        if at.dispatch.redundant:
            _add_copies(at, spent, made is calls.forward, matmuls_s)
        if at.framework.overlap_expert_comm:
            spent.add_overlapped("ep", sum(seconds), compute_s)
            continue
        if hidden is not None and made:
            spent.add_exposed("ep", sum(seconds[:-2]))
            for row_s, beside_s in zip(seconds[-2:], hidden, strict=True):
                spent.add_overlapped("ep", row_s, beside_s)
            continue
        counts, rows = seconds[: -2 * at.dispatch.chunks], seconds[-2 * at.dispatch.chunks :]
        in_flight_s = at.dispatch.chunks * matmuls_s
        exposed_s = sum(rows) if at.dispatch.chunks == 1 else chunked_s(rows, matmuls_s) - in_flight_s
        spent.add_exposed("ep", sum(counts) + exposed_s)
        spent.add_overlapped("ep", sum(rows) - exposed_s, in_flight_s)


def _work_beside(at: LayerContext, attention: SublayerCost) -> tuple[tuple[float, float] | None, ...]:
    """Return for forward and backward the seconds of work beside which rows travel one way and the other; None where
    they don't travel beside a layer's dense part."""
    moe, dispatch = at.model.moe, at.dispatch
    assert moe is not None
    if not moe.shortcut or dispatch.kind != "all_to_all" or dispatch.chunks > 1 or dispatch.redundant:
        return None, None
    add_mlp(at, shared := SublayerCost(), moe.shared_size)
    backward_s = [one.input_grads.compute_s + one.weight_grads.compute_s for one in (shared, attention)]
    return (attention.forward.compute_s, shared.forward.compute_s), (backward_s[0], backward_s[1])


def _add_copies(at: LayerContext, spent: PassCost, is_forward: bool, matmuls_s: float) -> None:
    """Add the copies of experts that travel before the experts compute, or their gradients, beside the matmuls of a
    rank's own experts (arXiv:2502.02581); the rank that gives or gets most of them decides.

    The numbers of rows, from which ranks choose copies, come before.
    """
    moe, load, ranks = at.model.moe, at.expert_load, at.ep.size
    assert moe is not None
    sizes = expert_parameter_bytes(at.model, at.etp, at.element_bytes)
    calls = copy_calls(at.dispatch, moe.num_experts, sizes, load.most_copies * ranks / max(1, ranks - 1))
    made = calls.forward if is_forward else calls.backward
    counts_s = sum(_call_s(at, call) for call in made if call.kind == "all_gather")
    spent.add_exposed("ep", counts_s)
    copies_s = sum(all_to_all_s(at.ep, call.nbytes) for call in made if call.kind == "all_to_all")
    spent.add_overlapped("ep", copies_s, matmuls_s * min(1.0, load.own_share / load.imbalance))


def chunked_s(exchanges_s: Sequence[float], matmuls_s: float) -> float:
    """Return the seconds in which chunks travel to experts, are computed in `matmuls_s` each, and travel back.

    The first half of the exchanges sets out at once, one after another over the same links; those back queue up behind
    them as their chunks are done. So with exchanges of t and matmuls of c in n chunks it takes about 2 t + n · c where
    matmuls are the longer ones, and n · 2 t where exchanges are (arXiv:2206.03382 §4.2; FSMoE's cases 2 and 1,
    arXiv:2501.10714).

    Example: two chunks of 1 s each way and 3 s of matmuls take 1 + 3 + 3 + 1 = 8 s.
    """
    half = len(exchanges_s) // 2
    arrivals_s = list(accumulate(exchanges_s[:half]))
    done_s, links_free_s = 0.0, arrivals_s[-1]
    for arrival_s, back_s in zip(arrivals_s, exchanges_s[half:], strict=True):
        done_s = max(done_s, arrival_s) + matmuls_s
        links_free_s = max(links_free_s, done_s) + back_s
    return links_free_s


def _routed_shape(at: LayerContext) -> RoutedShape:
    moe = at.model.moe
    assert moe is not None
    tokens = max(1, round(at.routed_tokens))
    return RoutedShape(
        tokens,
        tokens * moe.top_k,
        at.model.hidden_size * at.element_bytes,
        master_bytes(at.precision),
        moe.num_experts,
        moe.needs_whole_sequences,
        row_elements=at.model.hidden_size,
    )


def _call_s(at: LayerContext, call: ExpertCall) -> float:
    """Return the seconds of one collective of the experts' ranks."""
    near, far = at.ep_levels or (at.ep, at.ep)
    group = {"all": at.ep, "inner": near, "outer": far}[call.among]
    match call.kind:
        case "all_gather":
            return all_gather_s(group, call.ranks * call.nbytes)
        case "reduce_scatter":
            return reduce_scatter_s(group, call.nbytes)
    # The fullest rank receives more than others send it, and gives as much back.
    sent = _sent_share(at)
    return all_to_all_s(group, at.expert_imbalance * sent * call.nbytes, _crossing_share(at, sent))


def _sent_share(at: LayerContext) -> float:
    """Return the share of a token's rows that travels: all, or one for each rank that holds experts of it. Of R ranks
    with n of E experts each, k random ones are on R · (1 − C(E − n, k) / C(E, k))."""
    moe, ranks = at.model.moe, at.ep.size
    assert moe is not None
    if not at.framework.dispatch_once_per_rank:
        return 1.0
    others = moe.num_experts - moe.num_experts // ranks
    return ranks * (1 - comb(others, moe.top_k) / comb(moe.num_experts, moe.top_k)) / moe.top_k


def _crossing_share(at: LayerContext, sent: float) -> float:
    """Return the share of what is sent to other nodes that crosses the network: each row, or one for each node
    (arXiv:2412.19437 §3.2.2). Experts of a group lie on one node."""
    moe, nodes = at.model.moe, at.ep.num_domains
    assert moe is not None
    if not at.framework.dispatch_once_per_node:
        return 1.0
    reached = min(moe.top_groups, nodes) if moe.num_groups > 1 else min(moe.top_k, nodes)
    return min(1.0, reached / moe.top_k / sent)
