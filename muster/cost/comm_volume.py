"""Communication volume: the bytes that each rank passes to collectives and sends in one step, from shapes alone.

An input tensor counts with its size at the call, whatever a ring or tree algorithm then transfers. A test counts the
same bytes at the calls.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from muster.config.freezing import is_frozen
from muster.config.optim_config import OptimConfig
from muster.config.optimizer_state import is_zeroth_order, mean_state_bytes, whole_matrix_precision, whole_matrix_shapes
from muster.cost.activations import expert_parameter_bytes, late_written_bytes, pass_sizes
from muster.cost.context_traffic import attention_transfers, state_transfers
from muster.cost.expert_traffic import ExpertCall, copy_calls, dispatch_calls, load_of_ranks, routed_shape
from muster.cost.perturbation import POINTS, as_one_forward
from muster.cost.precision_bytes import compute_bytes, master_bytes
from muster.cost.sequence_slices import offloaded_bytes_of_slices
from muster.cost.shard_traffic import (
    SHARD_LEVELS,
    forward_gather_bytes,
    replicate_axis_bytes,
    shard_axis_bytes,
    shard_level_bytes,
)
from muster.layout.host_updates import device_updates, layer_of
from muster.layout.matrix_owners import OwnedMatrix, assign_owners, peer_ranks, sent_numel
from muster.layout.mesh import MeshCoordinates, coordinates_of, dp_index_of, rank_at, ranks_of_pp_rank
from muster.layout.stage_resharding import BoxTransfer, stage_transfers, tied_grad_transfers
from muster.layout.tensor_layout import (
    computed_layers,
    has_vocab_shard,
    rank_layouts,
    stage_layouts,
    stages_on,
    tp_partial_grad_copies,
)
from muster.schedule.action import ACTIVATION_COPIES, COPY_LANES, Kind
from muster.schedule.build import build_program
from muster.schedule.program import Instruction
from muster.spec.adapters import is_adapter
from muster.spec.model import ModelSpec, parameter_shapes
from muster.spec.plan import Plan
from muster.spec.workload import Workload

STEP_REPORT_BYTES = 10 * 8
"""Bytes that GRAD_NORM all-reduces in float64: the squares of the gradients, the loss, the z-loss, the two losses of
routers, that of multi-token prediction, the requests to stop and to let lost ranks join, and two flags: a save is in
progress, a save failed."""


def step_report_bytes(spec: ModelSpec) -> int:
    """Return the bytes that GRAD_NORM all-reduces: with experts also how often each was chosen in each layer, and how
    many choices were dropped."""
    return STEP_REPORT_BYTES + (0 if spec.moe is None else 8 * len(spec.expert_layers) * (spec.moe.num_experts + 1))


def step_comm_bytes(
    spec: ModelSpec, plan: Plan, workload: Workload, rank: int, optim: OptimConfig | None = None
) -> dict[str, dict[str, int]]:
    """Return the bytes that world rank `rank` sends in one step, by axis and kind, without zeros.

    Axes: those of the mesh, where dp_shard stands for all ranks that share a stage's state (dp_shard and cp), cp for
    attention, and edp for the ranks that have the same experts, where expert parallelism leaves each some of them;
    `world` for the all-reduce over all ranks; `optimizer` for what the optimizer step sends; `host` for copies to and
    from host memory and disk; those of `SHARD_LEVELS` for parameters and gradients that are sharded over fewer ranks
    than optimizer state. Kinds: names of collectives; on `pp` the instructions that send (SEND_F, SEND_B,
    ALL_REDUCE_TIED, ALL_REDUCE_REPLICAS) and those of the vocabulary-parallel layers (EMB_REDUCE, HIDDEN_BCAST,
    LOGIT_STATS, EMB_GRAD_BCAST). The optimizer is AdamW if `optim` is None.
    """
    if is_zeroth_order(optim):
        return _bytes_at_points(spec, plan, workload, rank, optim)
    at = coordinates_of(plan, rank)
    sent: dict[str, Counter[str]] = {
        axis: Counter() for axis in ("tp", "cp", "ep", "edp", "dp_shard", *SHARD_LEVELS, "dp_replicate", "pp", "world")
    }
    for stage in stages_on(plan, at.pp):
        sent["tp"] += tensor_axis_bytes(spec, plan, workload, stage, at, optim)
        sent["cp"] += context_axis_bytes(spec, plan, workload, stage, at)
        sent["ep"] += expert_axis_bytes(spec, plan, workload, stage, at)
        sent["edp"] += shard_axis_bytes(spec, plan, workload, stage, at, optim, experts=True)
        sent["dp_shard"] += shard_axis_bytes(spec, plan, workload, stage, at, optim)
        for level, kinds in shard_level_bytes(spec, plan, workload, stage, at, optim).items():
            sent[level] += kinds
        sent["dp_replicate"] += replicate_axis_bytes(spec, plan, workload, stage, at, optim)
        sent["pp"] += pipeline_bytes(spec, plan, workload, stage, at, optim)
    if any(strategy.offload != "none" or strategy.offload_optimizer != "none" for strategy in plan.strategies):
        sent["host"] = _host_bytes(spec, plan, workload, at, optim)
    if plan.world_size > 1:
        sent["world"]["all_reduce"] = step_report_bytes(spec)
    sent["optimizer"] = Counter(send=whole_matrix_bytes(spec, plan, rank, optim) + adapter_step_bytes(spec, plan, rank))
    return {axis: dict(+kinds) for axis, kinds in sent.items() if +kinds}


def _bytes_at_points(
    spec: ModelSpec, plan: Plan, workload: Workload, rank: int, optim: OptimConfig | None
) -> dict[str, dict[str, int]]:
    """Return `step_comm_bytes` of a zeroth-order step: those of forwards over twice as many sequences, of which
    embeddings come once for both points, and no gradients."""
    at = coordinates_of(plan, rank)
    sent: dict[str, Counter[str]] = {axis: Counter() for axis in ("tp", "cp", "dp_shard", "pp", "world")}
    doubled = as_one_forward(plan, workload)
    for stage in stages_on(plan, at.pp):
        sent["tp"] += _forward_tensor_bytes(spec, plan, workload, stage, at, optim)
        sent["cp"] += context_axis_bytes(spec, *doubled, stage, at, has_backward=False)
        sent["dp_shard"] += forward_gather_bytes(spec, plan, workload, stage, at)
        if not plan.is_last(stage):
            sent["pp"][Kind.SEND_F] += pipeline_bytes(spec, *doubled, stage, at)[Kind.SEND_F]
    if plan.offloads_params:
        lanes = build_program(plan, spec, workload, data_rank=dp_index_of(plan, at), optim=optim, num_steps=1).ranks[
            at.pp
        ]
        sent["host"] = _param_load_bytes(spec, plan, lanes.get("compute", ()), at)
    if plan.world_size > 1:
        sent["world"]["all_reduce"] = step_report_bytes(spec)
    return {axis: dict(+kinds) for axis, kinds in sent.items() if +kinds}


def _forward_tensor_bytes(
    spec: ModelSpec, plan: Plan, workload: Workload, stage: int, at: MeshCoordinates, optim: OptimConfig | None
) -> Counter[str]:
    """Return the bytes that one stage's forwards pass to tensor-parallel collectives."""
    sent, tp = Counter[str](), plan.mesh(stage).tp
    if tp == 1:
        return sent
    count = plan.num_stage_micro_batches(stage, workload, dp_index_of(plan, at))
    positions = plan.local_micro_batch_size(stage) * workload.seq_len // plan.mesh(stage).sequence_shards
    hidden, layers = (
        positions * spec.hidden_size * compute_bytes(plan.precision),
        len(computed_layers(spec, plan, stage)),
    )
    points = POINTS if optim is None or not optim.perturbation_parallel else 1
    rows = POINTS  # halves of the sequences that a rank's points have together
    embeddings = plan.is_first(stage) * rows // points
    entering, leaving = rows * (2 * layers + plan.is_last(stage)), rows * 2 * layers + embeddings
    if plan.strategy(plan.layers(stage, spec.num_layers).start).sp:
        sent["all_gather"] += count * entering * (hidden // tp)
        sent["reduce_scatter"] += count * leaving * hidden
    else:
        sent["all_reduce"] += count * leaving * hidden
    wide = master_bytes(plan.precision)
    if spec.qk_norm and spec.qk_norm_width == "projection":
        sent["all_reduce"] += count * rows * layers * 2 * positions * wide
    if plan.is_last(stage):
        sent["all_reduce"] += count * rows * 3 * positions * wide
    return sent


# ----------------------------------------------------------------------------------------------------------------------
# Tensor parallelism


def tensor_axis_bytes(
    spec: ModelSpec, plan: Plan, workload: Workload, stage: int, at: MeshCoordinates, optim: OptimConfig | None = None
) -> Counter[str]:
    """Return the bytes that one stage passes to tensor-parallel collectives, by kind.

    Per layer and micro-batch the hidden state enters two tensor-parallel regions and exits two, at column-parallel and
    row-parallel matmuls (attention and MLP); it also enters the head and exits the embedding (arXiv:2205.05198 §4.2.2).
    Without sequence parallelism an exit is an all-reduce in the forward, and an entry one in the backward: 4 layers
    of a middle stage make 8 in either. With it, an entry is an all-gather in the forward, and an all-gather and a
    reduce-scatter in the backward; an exit is a reduce-scatter in the forward and an all-gather in the backward.

    Of latent attention, the latent vectors enter, each position's once, gathered whole; the hidden state only where
    queries are made of it directly.

    `async_tp` splits the collectives of the forward matmuls, and the all-gather in the backward of an exit, into p2p
    sends of tp − 1 chunks. Full recompute repeats a layer's forward; without `async_tp` only up to its last matmul, so
    that one exit isn't repeated unless a norm of the output needs it. Tiles repeat the MLP's entry and exit, and the
    head's entry. Ladders and sub-layers side by side have sums of their own (`_sums_of_streams`).
    """
    sent, tp = Counter[str](), plan.mesh(stage).tp
    if tp == 1:
        return sent
    count = plan.num_stage_micro_batches(stage, workload, dp_index_of(plan, at))
    positions = plan.local_micro_batch_size(stage) * workload.seq_len // plan.mesh(stage).sequence_shards
    hidden = positions * spec.hidden_size * compute_bytes(plan.precision)
    layers, strategy = computed_layers(spec, plan, stage), plan.strategy(plan.layers(stage, spec.num_layers).start)
    further = len(spec.last_layers(plan.is_last(stage)))
    first, last = plan.is_first(stage) + further, plan.is_last(stage) + further  # embeddings and heads
    first_back = first * (not is_frozen(optim, "embed.weight"))
    # Experts keep the whole hidden state that entered, and have no matmul that a ring could overlap. Where each rank
    # routes its own tokens, shared ones alone are entered.
    routed = [layer for layer in layers if spec.has_experts(layer)]
    own_tokens, shares = plan.routes_own_tokens(plan.mesh(stage)), spec.moe is not None and spec.moe.shared_size > 0
    experts, skipped = (routed, []) if shares or not own_tokens else ([], routed)
    entering, leaving = 2 * len(layers) - len(skipped) + last, 2 * len(layers) - len(skipped)
    again, experts_again, skipped_again = (
        sum(plan.strategy(layer).recompute == "full" for layer in some) for some in (layers, experts, skipped)
    )
    is_async, is_tiled = strategy.tp_overlap == "async_tp", plan.sequence_tiles > 1
    entries_again = 2 * again - skipped_again
    exits_again = again + (again - skipped_again) * (spec.has_post_norms or is_async)
    if spec.other_stream is not None:
        entering, leaving, exits_again = _sums_of_streams(spec, plan, layers, entering, leaving, optim)
    if is_tiled:  # each MLP once more, and the head; full recompute stops before the MLP unless a norm reads its output
        entries_again = again * (1 + spec.has_post_norms) + len(layers) + last
        exits_again = again * (1 + spec.has_post_norms) + len(layers)
    # A layer that predicts further ends with a norm: recompute repeats its last exit, too.
    normed_again = further * (plan.strategy(spec.num_layers - 1).recompute == "full" and not spec.has_post_norms)
    exits_again += normed_again * (not is_async and not (skipped and spec.has_experts(spec.num_layers - 1)))
    if spec.mla is not None:
        latent = [layer for layer in layers if not spec.has_linear_attention(layer)]
        latent_again = sum(plan.strategy(layer).recompute == "full" for layer in latent)
        sent += _latent_bytes(strategy.sp, count, len(latent), latent_again, tp, hidden, spec)
        if spec.mla.q_lora_rank is not None:  # of the hidden state no head is made
            entering, entries_again = entering - len(latent), entries_again - latent_again
    if is_async:
        sends = entering + 2 * leaving + entries_again + exits_again - 3 * len(experts) - 2 * experts_again
        sent["send"] += count * sends * (tp - 1) * (hidden // tp)
        sent["all_gather"] += count * (entering + len(experts) + experts_again + first_back) * (hidden // tp)
        sent["reduce_scatter"] += count * (entering + len(experts) + first) * hidden
    elif strategy.sp:
        gathers = 2 * entering - len(experts) + leaving + first_back + entries_again
        sent["all_gather"] += count * gathers * (hidden // tp)
        sent["reduce_scatter"] += count * (entering + leaving + first + exits_again) * hidden
    else:
        sent["all_reduce"] += count * (entering + leaving + first + exits_again) * hidden
    if own_tokens and spec.moe is not None:
        routed_again = sum(plan.strategy(layer).recompute == "full" for layer in routed)
        if not strategy.sp:  # parts are gathered, in the forward results and in the backward gradients
            gathered_again = spec.has_post_norms * routed_again
            gathered_again += normed_again * spec.has_experts(spec.num_layers - 1)
            sent["all_gather"] += count * (2 * len(routed) + gathered_again) * (hidden // tp)
        sent["all_reduce"] += count * (len(routed) + routed_again) * _balance_bytes(spec, plan, stage)
    if spec.qk_norm and spec.qk_norm_width == "projection":
        # The mean squares of a position's queries and keys, and in the backward their terms of the gradient.
        sent["all_reduce"] += count * (2 * len(layers) + again) * 2 * positions * master_bytes(plan.precision)
    if last:  # the largest logit, then the sum of exponentials and the label's logit, of each position
        sent["all_reduce"] += count * last * (1 + is_tiled) * 3 * positions * master_bytes(plan.precision)
    sent["all_reduce"] += _copied_gradient_bytes(spec, plan, stage, at, optim)
    return sent


def _sums_of_streams(
    spec: ModelSpec, plan: Plan, layers: Sequence[int], entering: int, leaving: int, optim: OptimConfig | None
) -> tuple[int, int, int]:
    """Return the entries, exits and repeated exits of layers of a ladder or of sub-layers side by side, given the first
    two of ordinary ones and of the head.

    Of a ladder nothing reads the sums that a backward would repeat. Sub-layers side by side have a sum of their streams
    before each MLP but the model's first, and one of gradients; the streams' gradients are summed at the embedding
    where it has one, and the conjunction leaves.
    """
    if spec.parallel_sublayers == 1:
        return entering, leaving, 0
    sums = [layer for layer in layers if layer > 0]
    begins, ends = len(sums) < len(layers) and not is_frozen(optim, "embed.weight"), spec.num_layers - 1 in layers
    again = sum(plan.strategy(layer).recompute == "full" for layer in sums)
    return len(sums) + begins + ends, len(sums) + ends, again


def _copied_gradient_bytes(
    spec: ModelSpec, plan: Plan, stage: int, at: MeshCoordinates, optim: OptimConfig | None
) -> int:
    """Return the bytes of the gradients of parameters that several ranks have copies of and each uses in part."""
    layouts = {layout.name: layout for layout in stage_layouts(spec, plan, stage, at)}
    mesh, sp = plan.mesh(stage), plan.strategy(plan.layers(stage, spec.num_layers).start).sp
    copies = tp_partial_grad_copies(spec, layouts, mesh, sp)
    numels = (layouts[name].numel * (mesh.tp // n) for name, n in copies.items() if not is_frozen(optim, name))
    return sum(numels) * master_bytes(plan.precision)


def _latent_bytes(
    sp: bool, count: int, layers: int, layers_again: int, tp: int, hidden: int, spec: ModelSpec
) -> Counter[str]:
    """Return the bytes of the latent vectors that enter layers, of which each rank makes its heads; `hidden`: those of
    the hidden state."""
    assert spec.mla is not None
    vectors = hidden // spec.hidden_size * spec.mla.latent_width
    if not sp:
        return Counter(all_reduce=count * layers * vectors)
    return Counter(
        all_gather=count * (layers + layers_again) * (vectors // tp), reduce_scatter=count * layers * vectors
    )


# ----------------------------------------------------------------------------------------------------------------------
# Context parallelism


def context_axis_bytes(
    spec: ModelSpec, plan: Plan, workload: Workload, stage: int, at: MeshCoordinates, has_backward: bool = True
) -> Counter[str]:
    """Return the bytes that the attention of one stage's layers passes to context-parallel collectives, or sends, by
    kind; full recompute repeats the forward's (`attention_transfers`)."""
    sizes, layers = pass_sizes(spec, plan, workload, stage, at.tp), computed_layers(spec, plan, stage)
    count = plan.num_stage_micro_batches(stage, workload, dp_index_of(plan, at))
    softmax = attention_transfers(sizes.context, sizes.attention)
    linear = None if (states := sizes.states) is None else state_transfers(sizes.context, states, at.cp)
    sent = Counter[str]()
    for layer in layers:
        found = linear if linear is not None and spec.has_linear_attention(layer) else softmax
        again = found.forward if plan.strategy(layer).recompute == "full" else ()
        for one in (*found.forward, *((*again, *found.backward) if has_backward else ())):
            size = master_bytes(plan.precision) if one.in_master_dtype else compute_bytes(plan.precision)
            sent[one.kind] += count * one.calls * one.numel * size
    if sizes.mesh.cp > 1:
        balanced = [layer for layer in layers if spec.has_experts(layer)]
        times = len(balanced) + sum(plan.strategy(layer).recompute == "full" for layer in balanced)
        sent["all_reduce"] += count * times * _balance_bytes(spec, plan, stage)
    return sent


def _balance_bytes(spec: ModelSpec, plan: Plan, stage: int) -> int:
    """Return the bytes of the choices of each expert in each sequence, whose positions lie on several ranks: what the
    load-balancing loss sums in one forward of a layer."""
    if spec.moe is None or not spec.moe.aux_loss_coef:
        return 0
    sets = plan.local_micro_batch_size(stage) if spec.moe.aux_loss_scope == "sequence" else 1
    return sets * spec.moe.num_experts * master_bytes(plan.precision)


# ----------------------------------------------------------------------------------------------------------------------
# Expert parallelism


def expert_axis_calls(
    spec: ModelSpec, plan: Plan, workload: Workload, stage: int, at: MeshCoordinates
) -> Iterator[tuple[int, ExpertCall]]:
    """Yield the collectives that take tokens of one stage's layers to their experts and back, and how often a step
    makes each; full recompute repeats the forward's (`dispatch_calls`)."""
    moe, sizes = spec.moe, pass_sizes(spec, plan, workload, stage, at.tp)
    layers = [layer for layer in computed_layers(spec, plan, stage) if spec.has_experts(layer)]
    if moe is None:
        return
    count = plan.num_stage_micro_batches(stage, workload, dp_index_of(plan, at))
    own = len(layers) - len(spec.last_layers(plan.is_last(stage))) * spec.has_experts(spec.num_layers - 1)
    again, further_again = (
        sum(plan.strategy(layer).recompute == "full" for layer in some) for some in (layers[:own], layers[own:])
    )
    shape = routed_shape(spec, plan, stage, sizes.routed_tokens)
    dispatch = plan.expert_dispatch(sizes.mesh)
    load, sizes_of_one = (
        load_of_ranks(workload, plan, sizes.mesh),
        expert_parameter_bytes(spec, sizes.mesh.etp, compute_bytes(plan.precision)),
    )
    copied = copy_calls(dispatch, moe.num_experts, sizes_of_one, load.copies)
    calls = dispatch_calls(dispatch, shape)
    # A layer that predicts further ends with a norm, which reads the experts' results again.
    normed = dispatch_calls(dispatch, shape._replace(result_is_repeated=True)).repeated
    passes = [(calls.forward, len(layers)), (calls.repeated, again), (normed, further_again)]
    passes += [(copied.forward, len(layers)), (copied.repeated, again + further_again), (copied.backward, len(layers))]
    for some, times in (*passes, (calls.backward, len(layers))):
        yield from ((count * times, call) for call in some if times)


def expert_axis_bytes(spec: ModelSpec, plan: Plan, workload: Workload, stage: int, at: MeshCoordinates) -> Counter[str]:
    """Return the bytes that one stage's layers with experts pass to these collectives, by kind."""
    sent = Counter[str]()
    for times, call in expert_axis_calls(spec, plan, workload, stage, at):
        sent[call.kind] += times * call.nbytes
    return sent


def expert_axis_messages(spec: ModelSpec, plan: Plan, workload: Workload, stage: int, at: MeshCoordinates) -> int:
    """Return the messages that one stage's layers with experts send in them: one to each other rank of a group."""
    return sum(times * call.messages for times, call in expert_axis_calls(spec, plan, workload, stage, at))


# ----------------------------------------------------------------------------------------------------------------------
# Pipeline


def pipeline_bytes(
    spec: ModelSpec, plan: Plan, workload: Workload, stage: int, at: MeshCoordinates, optim: OptimConfig | None = None
) -> Counter[str]:
    """Return the bytes that one stage sends to other pipeline ranks: hidden states forward, their gradients backward,
    the gradient of a tied embedding, and with two pipeline replicas all gradients."""
    sent, rank = Counter[str](), rank_at(plan, at)
    count = plan.num_stage_micro_batches(stage, workload, dp_index_of(plan, at))
    hidden = count * spec.hidden_size * compute_bytes(plan.precision)
    ends = [(Kind.SEND_F, stage + 1, count)] * (not plan.is_last(stage))
    ends += [(Kind.SEND_B, stage - 1, count)] * (not plan.is_first(stage))
    if plan.paths:
        pairs = Counter(pair for path in plan.paths for pair in pairwise(path))
        ends = [(Kind.SEND_F, other, times) for (one, other), times in pairs.items() if one == stage]
        ends += [(Kind.SEND_B, other, times) for (other, one), times in pairs.items() if one == stage]
    for kind, other, times in ends:
        numel = _sent_numel(rank, stage_transfers(spec, plan, workload.seq_len, stage, other))
        sent[kind] += numel * times * compute_bytes(plan.precision)
    is_summed = spec.embeds_on_last_stage and not plan.vocab_parallel and not is_frozen(optim, "embed.weight")
    if (other := plan.tied_embedding_peer(stage)) is not None and is_summed:
        sent[Kind.ALL_REDUCE_TIED] = _sent_numel(rank, tied_grad_transfers(spec, plan, stage, other)) * master_bytes(
            plan.precision
        )
    if has_vocab_shard(plan, stage):
        local = plan.local_micro_batch_size(stage) * workload.seq_len // plan.mesh(stage).sequence_shards
        positions = local * plan.num_micro_batches(workload, dp_index_of(plan, at))
        vectors = local * hidden
        sent[Kind.EMB_REDUCE] = vectors
        sent[Kind.LOGIT_STATS] = 2 * vectors + 3 * positions * master_bytes(plan.precision)
        sent[Kind.HIDDEN_BCAST] = vectors if plan.pp_rank(plan.stages_per_replica - 1) == at.pp else 0
        sent[Kind.EMB_GRAD_BCAST] = vectors if plan.pp_rank(0) == at.pp else 0
    if plan.pipeline_replicas > 1:
        layouts = stage_layouts(spec, plan, stage, at)
        held = sum(layout.numel for layout in layouts if not is_frozen(optim, layout.name))
        sent[Kind.ALL_REDUCE_REPLICAS] = held * master_bytes(plan.precision)
    return sent


def _sent_numel(rank: int, messages: Iterable[BoxTransfer]) -> int:
    return sum(message.box.numel for message in messages if message.source == rank)


def _host_bytes(
    spec: ModelSpec, plan: Plan, workload: Workload, at: MeshCoordinates, optim: OptimConfig | None
) -> Counter[str]:
    """Return the bytes copied to host memory and back, by kind, for the copies in the Program."""
    lanes = build_program(plan, spec, workload, data_rank=dp_index_of(plan, at), num_steps=1).ranks[at.pp]
    stages = stages_on(plan, at.pp)
    moved, written = (
        {stage: offloaded_bytes_of_slices(spec, plan, workload, stage, tier) for stage in stages}
        for tier in ("host", "disk")
    )
    late = {stage: late_written_bytes(spec, plan, workload, stage) for stage in stages}
    later = {(Kind.WRITE_ACT, stage): size for stage, size in late.items()}
    later |= {(Kind.WRITE_ACT_LATE, stage): written[stage][0] - size for stage, size in late.items()}
    sent = Counter[str]()
    for lane, sizes in zip(COPY_LANES, (moved, written), strict=True):
        for item in lanes.get(lane, ()):
            if item.action.kind in ACTIVATION_COPIES:
                sent[item.action.kind] += sizes[item.action.stage][item.action.slice] - later.get(item.action[:2], 0)
    sent += _param_load_bytes(spec, plan, lanes.get("compute", ()), at) if plan.offloads_params else Counter()
    for stage in stages_on(plan, at.pp):
        kept = [layout for layout in stage_layouts(spec, plan, stage, at) if not is_frozen(optim, layout.name)]
        layers = [(layout.numel, layer_of(layout.name)) for layout in kept]
        parts = plan.host_updated_layers(stage, spec.num_layers)
        on_device = device_updates(plan, spec.num_layers, stage) or (False,) * len(parts)
        by_device = {layer for layer, own in zip(parts, on_device, strict=True) if own}
        by_host = {layer for layer in parts if layer not in by_device and plan.param_tier(layer) == "none"}
        count = sum(n for n, layer in layers if layer in by_host)
        sent[Kind.OFFLOAD_GRAD] += 2 * count * master_bytes(plan.precision)
        sent[Kind.RELOAD_PARAM] += count * master_bytes(plan.precision)
        each = mean_state_bytes(optim, dict(parameter_shapes(spec)), master_bytes(plan.precision))
        for kind in (Kind.RELOAD_STATE, Kind.OFFLOAD_STATE) if by_device else ():
            sent[kind] += int(each * sum(n for n, layer in layers if layer in by_device))
    return sent


def _param_load_bytes(spec: ModelSpec, plan: Plan, compute: Iterable[Instruction], at: MeshCoordinates) -> Counter[str]:
    """Return the bytes of parameters that come to the device for passes, and of gradients that leave it. What lies
    outside of layers comes once for all passes up to a backward."""
    sent, gathered = Counter[str](), set[int]()
    for kind, stage, *_ in (item.action for item in compute):
        if kind not in (Kind.F, Kind.B):
            continue
        away = [
            (layout.numel, layer_of(layout.name))
            for layout in stage_layouts(spec, plan, stage, at)
            if plan.param_tier(layer_of(layout.name)) != "none"
        ]
        load = Kind.LOAD_F if kind == Kind.F else Kind.LOAD_B
        loaded = sum(numel for numel, layer in away if layer is not None or stage not in gathered)
        sent[load] += loaded * compute_bytes(plan.precision)
        gathered.add(stage)
        if kind == Kind.B:
            sent[load] += sum(numel for numel, _ in away) * master_bytes(plan.precision)
            gathered.remove(stage)
    return sent


# ----------------------------------------------------------------------------------------------------------------------
# Optimizer


def whole_matrix_bytes(spec: ModelSpec, plan: Plan, rank: int, optim: OptimConfig | None) -> int:
    """Return the bytes that a rank sends for an optimizer that updates whole matrices, such as Muon: its shards to the
    matrices' owners, and the updates of the matrices that it owns back to the holders of their shards."""
    if not whole_matrix_shapes(optim, dict(parameter_shapes(spec))):
        return 0
    at = coordinates_of(plan, rank)
    peers = sorted(peer for peer, other in ranks_of_pp_rank(plan, at.pp) if other.dp_replicate == at.dp_replicate)
    held = [{layout.name: layout for layout in rank_layouts(spec, plan, peer)} for peer in peers]
    shapes = whole_matrix_shapes(optim, {name: layout.shape for name, layout in held[0].items()})
    matrices = [
        OwnedMatrix(name, shapes[name], tuple(layouts[name].boxes for layouts in held), owner)
        for owners in assign_owners(shapes, len(peers))
        for name, owner in owners.items()
    ]
    precision = whole_matrix_precision(optim)
    size = master_bytes(plan.precision) if precision is None else compute_bytes(precision)
    return sent_numel(matrices, peers.index(rank)) * size


def adapter_step_bytes(spec: ModelSpec, plan: Plan, rank: int) -> int:
    """Return the bytes that a rank sends in a step of adapters that change the weights beside them: its parts of A and
    B, and of their steps, to each of its peers."""
    if spec.adapter is None or not spec.adapter.changes_weights:
        return 0
    peers = peer_ranks(plan, coordinates_of(plan, rank))
    numel = sum(layout.numel for layout in rank_layouts(spec, plan, rank) if is_adapter(layout.name))
    return 2 * numel * (len(peers) - 1) * master_bytes(plan.precision)
