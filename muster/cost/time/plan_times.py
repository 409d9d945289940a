"""Seconds of every instruction of a plan's Program on a cluster."""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import permutations

import numpy as np
from numpy.typing import NDArray

from muster.config.optim_config import OptimConfig, UpdateTime
from muster.config.optimizer_state import is_zeroth_order, mean_state_bytes
from muster.cost.activations import late_written_bytes, offloaded_activation_bytes
from muster.cost.comm_volume import step_report_bytes
from muster.cost.host_updates import (
    HOST_UPDATE_BYTES_PER_S,
    disk_rates,
    host_part_copies,
    host_updated_numels,
    shared_update_numels,
)
from muster.cost.param_offload import offloaded_params
from muster.cost.perturbation import as_one_forward, perturbation_bytes
from muster.cost.precision_bytes import compute_bytes, master_bytes
from muster.cost.sequence_slices import slice_workloads
from muster.cost.time.bucket_steps import with_bucket_steps
from muster.cost.time.collectives import CommGroup, all_reduce_s, p2p_s
from muster.cost.time.cost_cache import CostCache
from muster.cost.time.kernels import matmul_s, stream_s
from muster.cost.time.op_times import OpTimes, P2PTime
from muster.cost.time.pass_cost import OVERLAP_SLOWDOWN
from muster.cost.time.profiled_times import profiled_times, streamed_s
from muster.cost.time.rank_placement import PlacedPlan
from muster.cost.time.scaled_casts import operand_cast_bytes
from muster.cost.time.stage_times import StageTimes, example_stage_times, pair_of_stages_s
from muster.cost.time.update_bytes import optimizer_bytes_per_element, update_bytes_per_element
from muster.layout.host_updates import part_sizes_of
from muster.layout.stage_resharding import stage_transfers
from muster.schedule.action import Kind, Lane
from muster.schedule.offload import LAYER_COPIES
from muster.spec.cluster import ClusterSpec
from muster.spec.compilation import compiles
from muster.spec.cuda_graphs import replays_graphs
from muster.spec.device import DeviceSpec, LinkSpec
from muster.spec.errors import ConfigError, InfeasibleError
from muster.spec.framework_traits import FrameworkTraits
from muster.spec.frameworks import MUSTER
from muster.spec.layer_strategy import Tier
from muster.spec.mesh import Mesh
from muster.spec.model import ModelSpec, parameter_shapes
from muster.spec.plan import SCALED_PRECISIONS, Plan
from muster.spec.workload import Workload

GRAD_NORM_BYTES = 4
"""Bytes per element of the gradient norm, which reads each gradient once."""
CLIP_BYTES = 8
"""Bytes per element of clipping, which reads and writes each gradient once."""
STEP_HOST_S = 5e-3
"""Seconds of the host once a step: Python of optimizer and loop that can't run ahead of the device, because they wait
for the gradient norm."""


def plan_times(
    model: ModelSpec,
    plan: Plan,
    workload: Workload,
    cluster: ClusterSpec,
    framework: FrameworkTraits | None = None,
    data_rank: int | None = None,
    cache: CostCache | None = None,
    optim: OptimConfig | None = None,
    update_time: UpdateTime = "after_passes",
) -> OpTimes:
    """Return the seconds of each (kind, stage) of the plan's Program, and of each p2p transfer between stages; of every
    slice where sequences are cut into slices.

    The plan's ranks are laid on the cluster's devices in order. The times are those of the pipeline of `data_rank`, or
    of the slowest device and link of each stage where it is None. On a measured machine they are those of Muster's own
    kernels (`profiled_times`). Calls with one `cache` share the costs of equal layers and stages.
    The optimizer is AdamW if `optim` is None; `update_time`: time at which the host updates parameters.

    Raises InfeasibleError where the cluster has fewer devices, ConfigError where a device's rates are unknown.
    """
    own = cluster, framework, data_rank
    if is_zeroth_order(optim):
        return _times_at_points(model, plan, workload, *own, cache, optim)
    times = _micro_batch_times(model, plan, workload, *own, cache, optim, update_time)
    times = with_bucket_steps(times, plan, model)
    if plan.sequence_slices == 1:
        return times
    # Cost tables are for one sequence length and one number of positions before it.
    parts = slice_workloads(model, plan, workload)
    slices = (_micro_batch_times(model, plan, part, *own, CostCache(), optim) for part in parts)
    return replace(times, slices=tuple(slices))


def _times_at_points(
    model: ModelSpec,
    plan: Plan,
    workload: Workload,
    cluster: ClusterSpec,
    framework: FrameworkTraits | None,
    data_rank: int | None,
    cache: CostCache | None,
    optim: OptimConfig,
) -> OpTimes:
    """Return `plan_times` of a step whose passes are forwards at perturbed parameters."""
    times = _micro_batch_times(model, *as_one_forward(plan, workload), cluster, framework, data_rank, cache, optim)
    setting = place_plan(model, plan, workload, cluster, framework, data_rank, cache, optim)
    seconds = dict(times.seconds)
    for stage in range(plan.num_stages):
        moved = perturbation_bytes(model, plan, stage, optim)
        if (rates := cluster.device.rates) is not None:
            drawn_s = streamed_s(rates, plan, stage, moved)
        else:
            drawn_s = stream_s(setting.device(stage), moved)
        seconds[Kind.F, stage] += drawn_s
    return replace(times, seconds=seconds)


def _micro_batch_times(
    model: ModelSpec,
    plan: Plan,
    workload: Workload,
    cluster: ClusterSpec,
    framework: FrameworkTraits | None,
    data_rank: int | None,
    cache: CostCache | None,
    optim: OptimConfig | None,
    update_time: UpdateTime = "after_passes",
) -> OpTimes:
    """Return `plan_times` where a pass takes the whole of a workload's sequences."""
    if cluster.device.rates is not None:
        return profiled_times(model, plan, workload, cluster.device.rates, optim, update_time)
    setting = place_plan(model, plan, workload, cluster, framework, data_rank, cache, optim)
    setting = replace(setting, update_time=update_time)
    examples = example_stage_times(setting)
    stages = [examples[kind] for kind in setting.stage_kinds.kind_by_stage.tolist()]
    seconds = {(kind, stage): time_s for stage, at in enumerate(stages) for kind, time_s in at.seconds.items()}
    exposed_s = {(kind, stage): waits_s for stage, at in enumerate(stages) for kind, waits_s in at.exposed_s.items()}
    for stage in _stages_with_step_sums(setting):
        seconds.update({(kind, stage): time_s for kind, time_s in _stage_sums(setting, stage, stages[stage])})
    seconds.update(_offload_times(setting, dict(seconds)))
    seconds.update(_host_update_times(setting))
    if plan.vocab_parallel:
        for key, time_s, reduction_s in _vocab_parallel_times(setting):
            seconds[key] = time_s + reduction_s
            exposed_s[key] = {"dp": reduction_s} if reduction_s else {}
    whole = setting if data_rank is None else replace(setting, data_rank=None)  # all wait for the slowest
    seconds[Kind.GRAD_NORM, -1], seconds[Kind.STEP, -1] = per_step_s(
        whole, examples if data_rank is None else example_stage_times(whole)
    )
    seconds[Kind.CLIP, -1] = clip_s(setting)
    hops = {}
    for stage, pair in enumerate(stage_p2p_times(setting)):
        if pair is not None:
            hops[stage - 1, stage], hops[stage, stage - 1] = pair
    for one, other in plan.hops if plan.paths else ():
        if (one, other) not in hops:
            hops[one, other], hops[other, one] = p2p_times_between(setting, one, other)
    cores = cluster.device.shared_cores
    processes, pools = _processes_and_machines(setting) if cores else ((), ())
    pairs_s = dict(_pair_times(setting, stages)) if setting.overlaps_pairs else {}
    shared = processes, pools
    sizes = part_sizes_of(model, plan)
    # Other programs' overlap is in the seconds of their gathers and reductions (`ParamCommunication.per_step_times`).
    is_simulated = setting.framework.overlaps_whole_passes_only and cluster.device.kind != "cpu"
    slowdown = OVERLAP_SLOWDOWN * is_simulated
    return OpTimes(seconds, 0.0, cores, *shared, hops, exposed_s, pairs_s, part_sizes=sizes, overlap_slowdown=slowdown)


def _pair_times(setting: PlacedPlan, stages: Sequence[StageTimes]) -> Iterator[tuple[tuple[int, int], float]]:
    """Yield the times of the pairs of passes that a rank may have, of two of its stages each."""
    known: dict[tuple[int, int], float] = {}
    for rank in range(setting.plan.pp):
        held = [stage for stage, holder in enumerate(setting.placement) if holder == rank]
        for forward, backward in permutations(held, 2):
            key = id(stages[forward]), id(stages[backward])
            if key not in known:
                known[key] = pair_of_stages_s(stages[forward], stages[backward])
            yield (forward, backward), known[key]


def _processes_and_machines(setting: PlacedPlan) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return, for each pipeline rank, its processes on one node, and the number of the machine that it runs on."""
    found, pools, pool_of = [], [], dict[int, int]()
    for pp_rank in range(setting.plan.pp):
        nodes = {setting.cluster.locate(rank)[1] for rank in setting.ranks(setting.placement.index(pp_rank))}
        found.append(-(-setting.plan.mesh(pp_rank).num_ranks // len(nodes)))
        pool = min((pool_of[node] for node in nodes if node in pool_of), default=pp_rank)
        pool_of.update(dict.fromkeys(nodes, pool))
        pools.append(pool)
    return tuple(found), tuple(pools)


def place_plan(
    model: ModelSpec,
    plan: Plan,
    workload: Workload,
    cluster: ClusterSpec,
    framework: FrameworkTraits | None = None,
    data_rank: int | None = None,
    cache: CostCache | None = None,
    optim: OptimConfig | None = None,
) -> PlacedPlan:
    """Return the plan laid on the cluster's devices, with the cost tables of `cache` (None: new ones).

    Raises InfeasibleError where the cluster has fewer devices than the plan.
    """
    world_size = plan.world_size
    if world_size > cluster.num_devices:
        raise InfeasibleError(
            f"the plan needs {world_size} devices, but {cluster.name or 'the cluster'} has {cluster.num_devices}"
        )
    framework = framework or MUSTER
    kind = cluster.device.kind
    framework = framework.for_plan(compiles(plan, model, kind, framework), replays_graphs(plan, kind))
    tables = (cache or CostCache()).tables(model, workload, cluster, framework)
    return PlacedPlan(model, plan, workload, cluster, framework, world_size, tables, data_rank, optim)


def data_ranks_by_kind(setting: PlacedPlan, links: bool = True) -> dict[Hashable, list[int]]:
    """Group the data-parallel ranks whose pipelines run on equal devices and, with `links`, over equal links."""
    ranks = range(setting.plan.mesh(0).dp_size)
    if setting.is_flat or setting.cluster.device.rates is not None or not setting.is_uniform:
        return {(): list(ranks)}
    stages = range(len(setting.placement))
    found: dict[Hashable, list[int]] = {}
    for data in ranks:
        own = replace(setting, data_rank=data)
        if not links:
            found.setdefault(tuple(own.device(stage).name for stage in stages[: setting.plan.pp]), []).append(data)
            continue
        places = (
            part
            for stage in stages[: setting.plan.pp]
            for part in (own.stage_groups(stage).device_type, own.stage_groups(stage).tp, own.stage_groups(stage).cp)
        )
        hops = (
            own.p2p_group(stage - 1, stage)
            for stage in stages[1:]
            if stage % setting.stages_per_replica and setting.placement[stage] != setting.placement[stage - 1]
        )
        found.setdefault((*places, *hops), []).append(data)
    return found


def per_step_s(setting: PlacedPlan, examples: Sequence[StageTimes]) -> tuple[float, float]:
    """Return the seconds of gradient norm and optimizer step on the slowest rank, from `example_stage_times`.

    The update streams the bytes that the optimizer's entry in `muster.config.optimizers` declares; None: AdamW.
    """
    update_bytes = update_bytes_per_element(setting.plan, setting.model, setting.optim)
    owned = np.array([at.param_communication.shard_numel for at in examples])[setting.stage_kinds.kind_by_stage]
    held = np.bincount(setting.placement, owned, setting.plan.pp)
    normed, held = held, held - np.bincount(setting.placement, _host_updated(setting), setting.plan.pp)
    if setting.cluster.is_uniform:
        most = [(setting.cluster.device, float(np.max(held)))]
        all_held = [(setting.cluster.device, float(np.max(normed)))]
    else:
        kinds = zip(setting.placement, setting.stage_kinds.kind_by_stage.tolist(), strict=True)
        devices = {rank: examples[kind].device for rank, kind in kinds}
        most = [(device, float(held[rank])) for rank, device in devices.items()]
        all_held = [(device, float(normed[rank])) for rank, device in devices.items()]
    norm_s = all_reduce_s(setting.group(0, ((1, setting.plan.island_size),)), step_report_bytes(setting.model))
    if not is_zeroth_order(setting.optim):
        hosted, away = _gradients_off_device(setting)
        norm_s += max(stream_s(device, GRAD_NORM_BYTES * max(0.0, count - min(away))) for device, count in all_held)
        norm_s += _host_stream_s(setting, GRAD_NORM_BYTES, hosted)
    update_s = max(stream_s(device, update_bytes * count) for device, count in most)
    return norm_s, STEP_HOST_S + update_s + _weight_casts_s(setting, examples)


def _weight_casts_s(setting: PlacedPlan, examples: Sequence[StageTimes]) -> float:
    """Return the seconds in which the fullest rank casts its layers' weights to fp8 or nvfp4, along rows and columns.

    Transformer Engine does so once a step and keeps both for all micro-batches (`is_first_microbatch` of its modules);
    programs that cast anew count it in each pass.
    """
    plan, device = setting.plan, examples[0].device
    if plan.precision not in SCALED_PRECISIONS or setting.framework.recasts_fp8:
        return 0.0
    numel = np.array([at.param_communication.layers_numel for at in examples])[setting.stage_kinds.kind_by_stage]
    most = float(np.max(np.bincount(setting.placement, numel, plan.pp)))
    return stream_s(device, operand_cast_bytes(plan.precision, plan.fp8_recipe, device) * most)


def clip_s(setting: PlacedPlan) -> float:
    """Return the seconds of clipping by the host, of the gradients in its memory, on the slowest rank; those on the
    device are clipped as they are updated, and those on disk as they are read."""
    return _host_stream_s(setting, CLIP_BYTES, _gradients_off_device(setting)[0])


def _gradients_off_device(setting: PlacedPlan) -> tuple[list[float], list[float]]:
    """Return the elements of each pipeline rank's gradients that are summed in host memory, and of all that are summed
    there and on disk, whose norms are taken as they are added."""
    hosted, away = [0.0] * setting.plan.pp, [0.0] * setting.plan.pp
    for stage, pp_rank in enumerate(setting.placement if setting.plan.offloads_params else ()):
        own = offloaded_params(setting.model, setting.plan, stage, setting.optim)
        hosted[pp_rank] += own.host_gradients
        away[pp_rank] += own.numel("host", "disk") * own.has_gradients
    return hosted, away


def _host_stream_s(setting: PlacedPlan, bytes_each: int, elements: Sequence[float]) -> float:
    """Return the seconds in which the slowest rank's host streams so many bytes for each of its elements; the devices
    of a node share its cores."""
    found = []
    for pp_rank, count in enumerate(elements):
        first = setting.first_rank(setting.placement.index(pp_rank))
        group, device = setting.cluster.group_of(first), setting.device(setting.placement.index(pp_rank))
        sharing = min(group.devices_per_node, setting.world_size)
        rate = group.host_update_bytes_per_s or HOST_UPDATE_BYTES_PER_S
        on_gpu_s = bytes_each * count * sharing / rate
        found.append(stream_s(device, bytes_each * count) if device.kind == "cpu" and count else on_gpu_s)
    return max(found)


def _stages_with_step_sums(setting: PlacedPlan) -> Iterable[int]:
    """Return the stages with a reduction over other stages: all with two replicas, else the first and the last."""
    last = len(setting.placement)
    return range(last) if setting.plan.pipeline_replicas > 1 else sorted({0, last - 1})


def _stage_sums(setting: PlacedPlan, stage: int, at: StageTimes) -> Iterator[tuple[str, float]]:
    """Yield (kind, seconds) of the reductions between a stage and another once a step.

    Where gradients are reduce-scattered before, each rank reduces its shard only.
    """
    plan, gradient_bytes = setting.plan, setting.framework.grad_bytes
    parts = at.mesh.dp_shard if setting.framework.storage == "muster" else 1
    words = setting.model.vocab_size * setting.model.hidden_size / (at.mesh.tp * parts)
    other = plan.tied_embedding_peer(stage)
    if other is not None:
        pair = setting.pair(setting.first_rank(stage), setting.first_rank(other))
        yield Kind.ALL_REDUCE_TIED, all_reduce_s(pair, words * gradient_bytes)
    if plan.pipeline_replicas > 1 and stage < plan.stages_per_replica:
        pair = setting.pair(setting.first_rank(stage), setting.first_rank(stage + plan.stages_per_replica))
        yield Kind.ALL_REDUCE_REPLICAS, all_reduce_s(pair, at.param_communication.numel / parts * gradient_bytes)


HOST_LINK_EFFICIENCY = 0.8
"""Share of the link's bandwidth that copies between pinned host memory and a device reach: 25 of 31.5 GB/s on PCIe 4
(an assumption, typical of bandwidth tests)."""


def host_copy_s(device: DeviceSpec, size: float) -> float:
    """Return the seconds to copy bytes to the host's memory, or back. Raises ConfigError for an unknown link."""
    if device.kind == "cpu":
        return stream_s(device, 2 * size)
    if device.host_bandwidth_bytes_per_s is None:
        raise ConfigError(
            f"how fast {device.name} reaches its host's memory is unknown, so offload has no time: give the device"
            " host_bandwidth_bytes_per_s in a cluster file"
        )
    return size / (HOST_LINK_EFFICIENCY * device.host_bandwidth_bytes_per_s)


def copy_beside_pass_s(copy_s: float, num_copied: int, pass_s: float, num_layers: int) -> float:
    """Return the seconds from the begin of a pass until its layers' copies are over, which take `copy_s` together.

    A layer's copy is overlapped with the computation of one layer: the pass waits for what it takes longer. The copies
    of a few layers that compute as one would have all of the pass, if they were spread over it; they needn't be.
    """
    waited_s = max(0.0, copy_s - pass_s * num_copied / num_layers)
    return pass_s + waited_s if waited_s else copy_s


def _offload_times(
    setting: PlacedPlan, pass_s: Mapping[tuple[str, int], float]
) -> Iterator[tuple[tuple[str, int], float]]:
    """Yield the times to copy a micro-batch's activations to the host and back, on a CPU within its memory, and to
    write those on disk and read them; the devices of a node share its disk. `pass_s`: seconds of passes by kind and
    stage, which copies layer by layer run beside."""
    own = setting.model, setting.plan, setting.workload
    for stage in range(setting.plan.num_stages):
        if written := offloaded_activation_bytes(*own, stage, "disk"):
            group = setting.cluster.group_of(setting.first_rank(stage))
            sharing = min(group.devices_per_node, setting.world_size)
            reads, writes = disk_rates(group)
            times_s = written * sharing / writes, written * sharing / reads
            if late := late_written_bytes(*own, stage):  # what waits then is the disk's own lane
                yield (Kind.WRITE_ACT, stage), times_s[0] * (1 - late / written)
                yield (Kind.WRITE_ACT_LATE, stage), times_s[0] * late / written
                yield (Kind.READ_ACT, stage), times_s[1]
            else:
                yield from _layer_copy_times(setting, stage, "disk", times_s, pass_s)
        yield from _param_load_times(setting, stage)
        moved = offloaded_activation_bytes(*own, stage)
        if not moved:
            continue
        time_s = host_copy_s(setting.device(stage), moved)
        if setting.plan.offloads_by_layer:
            yield from _layer_copy_times(setting, stage, "host", (time_s, time_s), pass_s)
        else:
            yield (Kind.OFFLOAD, stage), time_s
            yield (Kind.RELOAD, stage), time_s


def _layer_copy_times(
    setting: PlacedPlan,
    stage: int,
    tier: Tier,
    copies_s: tuple[float, float],
    pass_s: Mapping[tuple[str, int], float],
) -> Iterator[tuple[tuple[str, int], float]]:
    """Yield the times of the copies of a stage's layers to a tier and back, which take `copies_s` by themselves, from
    the begin of the pass that they are beside."""
    num_layers = setting.model.num_layers
    count, layers = len(setting.plan.offloaded_layers(stage, num_layers, tier)), setting.plan.layers(stage, num_layers)
    passes = Kind.F, Kind.I if setting.plan.split_backward else Kind.B
    lane: Lane = "host_copy" if tier == "host" else "disk"
    for kind, beside, copy_s in zip(LAYER_COPIES[lane], passes, copies_s, strict=True):
        yield (kind, stage), copy_beside_pass_s(copy_s, count, pass_s[beside, stage], len(layers))


def _param_load_times(setting: PlacedPlan, stage: int) -> Iterator[tuple[tuple[str, int], float]]:
    """Yield the times to bring a stage's parameters to the device for a pass, and its gradients back, over the link to
    the host and from the disk, which the devices of a node share."""
    away = offloaded_params(setting.model, setting.plan, stage, setting.optim, setting.update_time)
    if not away.groups:
        return
    count = setting.plan.num_stage_micro_batches(stage, setting.workload)
    group = setting.cluster.group_of(setting.first_rank(stage))
    sharing = min(group.devices_per_node, setting.world_size)
    reads, writes = disk_rates(group)
    for backward, load, read in ((False, Kind.LOAD_F, Kind.READ_F), (True, Kind.LOAD_B, Kind.READ_B)):
        yield (load, stage), host_copy_s(setting.device(stage), away.host_link_bytes(backward))
        if away.numel("disk"):
            was_read, was_written = away.disk_bytes_of_pass(backward, count)
            yield (read, stage), sharing * (was_read / reads + was_written / writes)


def _host_updated(setting: PlacedPlan) -> NDArray[np.float64]:
    """Return the elements of each stage that the host updates."""
    if all(strategy.offload_optimizer == "none" for strategy in setting.plan.strategies):
        return np.zeros(len(setting.placement))
    own = setting.model, setting.plan
    stages = range(len(setting.placement))
    return np.array([float(sum(host_updated_numels(*own, stage, setting.optim))) for stage in stages])


def _host_update_times(setting: PlacedPlan) -> Iterator[tuple[tuple[str, int], float]]:
    """Yield the times of the mean part of each stage that the host updates: copies to the host and back, and the update
    by the node's cores, which its devices share. On a CPU all of it is work within its memory."""
    if not any(updated := _host_updated(setting)):
        return
    update_bytes = optimizer_bytes_per_element(setting.model, setting.optim) - 2  # no copy for bf16 passes
    shapes = dict(parameter_shapes(setting.model))
    state_bytes = mean_state_bytes(setting.optim, shapes, master_bytes(setting.plan.precision))
    for stage, numel in enumerate(updated):
        if not numel:
            continue
        device = setting.device(stage)
        group = setting.cluster.group_of(setting.first_rank(stage))
        sharing = min(group.devices_per_node, setting.world_size)
        by_host, by_device = shared_update_numels(setting.model, setting.plan, stage, setting.optim)
        if by_device:
            fetched = sum(by_device) / len(by_device)
            for kind in (Kind.RELOAD_STATE, Kind.OFFLOAD_STATE):
                yield (kind, stage), host_copy_s(device, state_bytes * fetched)
            yield (Kind.DEVICE_UPDATE, stage), stream_s(device, update_bytes * fetched)
        if not by_host:
            continue
        numel, parts = sum(by_host), len(by_host)
        sent, returned = host_part_copies(setting.model, setting.plan, stage, setting.optim)
        if sent:
            yield (Kind.OFFLOAD_GRAD, stage), host_copy_s(device, sent)
            yield (Kind.RELOAD_PARAM, stage), host_copy_s(device, returned)
        updated = update_bytes * float(numel) / parts
        if "disk" in setting.plan.host_update_tiers(stage, setting.model.num_layers):
            moved = state_bytes * float(numel) / parts
            reads, writes = disk_rates(group)
            params = offloaded_params(setting.model, setting.plan, stage, setting.optim, setting.update_time)
            read, written = (size / parts for size in params.disk_bytes_per_update)
            yield (Kind.READ_STATE, stage), (moved + read) * sharing / reads
            yield (Kind.WRITE_STATE, stage), (moved + written) * sharing / writes
        if device.kind == "cpu":
            yield (Kind.UPDATE, stage), stream_s(device, updated)
        else:
            yield (Kind.UPDATE, stage), updated * sharing / (group.host_update_bytes_per_s or HOST_UPDATE_BYTES_PER_S)


def stage_p2p_times(setting: PlacedPlan) -> list[tuple[P2PTime, P2PTime] | None]:
    """Return, for each stage, the transfers of the hidden state from the stage before, and of the gradient back.

    None where both stages are on one rank, or there is no stage before.
    """
    if not p2p_times_are_alike(setting):
        return [_stage_p2p_time(setting, stage) for stage in range(len(setting.placement))]
    examples = example_p2p_times(setting)
    return [examples[kind] for kind in setting.p2p_kinds.kind_by_stage.tolist()]


def p2p_times_are_alike(setting: PlacedPlan) -> bool:
    """Tell if p2p times depend only on the distance between stages."""
    return setting.is_uniform and setting.is_flat and not setting.plan.overrides


def example_p2p_times(setting: PlacedPlan) -> list[tuple[P2PTime, P2PTime] | None]:
    """Return the p2p times of a stage of each kind (`PlacedPlan.p2p_kinds`), where `p2p_times_are_alike`."""
    return [_stage_p2p_time(setting, stage) for stage in setting.p2p_kinds.examples]


def _stage_p2p_time(setting: PlacedPlan, stage: int) -> tuple[P2PTime, P2PTime] | None:
    return p2p_times_between(setting, stage - 1, stage) if setting.receives_p2p(stage) else None


def p2p_times_between(setting: PlacedPlan, before: int, stage: int) -> tuple[P2PTime, P2PTime]:
    """Return the transfers of the hidden state from one stage to another on another rank, and of the gradient back."""
    if not setting.is_uniform:
        return _resharding_p2p_time(setting, before, stage), _resharding_p2p_time(setting, stage, before)
    pair, plan = setting.p2p_group(before, stage), setting.plan
    one, other = (
        _p2p_time(
            setting,
            pair,
            source,
            plan.mesh(source),
            plan.strategy(setting.layers[source % setting.stages_per_replica].start).sp,
        )
        for source in (before, stage)
    )
    return one, other


def _p2p_time(setting: PlacedPlan, pair: CommGroup, source: int, mesh: Mesh, sp: bool) -> P2PTime:
    split = mesh.tp if sp or setting.framework.scatter_gather_p2p else 1
    tokens = setting.micro_batch_size(source) * setting.workload.seq_len / mesh.sequence_shards / split
    size = tokens * setting.model.boundary_size(mesh.tp) * compute_bytes(setting.plan.precision)
    return P2PTime(p2p_s(pair, size), size / _link_bytes_per_s(pair))


def _resharding_p2p_time(setting: PlacedPlan, source: int, target: int) -> P2PTime:
    """Return the p2p time between stages that may cut a micro-batch differently.

    A rank may send to several ranks and receive from several, over one link out and one link in. The busiest link
    decides.
    """
    plan, seconds, start_s = setting.plan, defaultdict[tuple[str, int], float](float), 0.0
    element_bytes = compute_bytes(plan.precision)
    for message in stage_transfers(setting.model, plan, setting.workload.seq_len, source, target):
        pair, size = setting.pair(message.source, message.target), message.box.numel * element_bytes
        wire_s = size / _link_bytes_per_s(pair)
        start_s = max(start_s, p2p_s(pair, size) - wire_s)
        seconds["out", message.source] += wire_s
        seconds["in", message.target] += wire_s
    busiest_s = max(seconds.values(), default=0.0)
    return P2PTime(start_s + busiest_s, busiest_s)


def _link_bytes_per_s(group: CommGroup) -> float:
    link: LinkSpec = group.intra_link
    fabric = link.bandwidth_bytes_per_s * link.efficiency
    return fabric if group.num_domains == 1 else min(fabric, group.network_bytes_per_s)


def _vocab_parallel_times(setting: PlacedPlan) -> Iterator[tuple[tuple[str, int], float, float]]:
    """Yield the times of vocabulary parallelism over pipeline ranks (arXiv:2411.05288), and the reductions of gradients
    that end passes.

    Each rank computes embedding and logits of its part of the vocabulary; the collectives overlap with its passes.
    """
    plan, model = setting.plan, setting.model
    words = model.vocab_size / plan.pp
    pipeline = setting.axis_group(0, "pp") if plan.is_uniform else setting.single_rank
    for rank in range(plan.pp):
        stage = next(stage for stage in range(plan.num_stages) if plan.pp_rank(stage) == rank)
        times = StageTimes(setting, stage)
        at = times.layer_context
        trains_embedding, trains_head = (
            (True, True) if times.trained is None else (times.trained.embedding, times.trained.head)
        )
        hidden, wide = at.hidden_bytes, at.high_precision
        reduction_s = times.param_communication.words_reduction_s
        score_s = matmul_s(at.device, at.tokens, words, model.hidden_size, wide)
        logits_s = stream_s(at.device, 3 * at.element_bytes * at.tokens * words, 2)
        yield (Kind.EMB_F, stage), stream_s(at.device, 2 * hidden / plan.pp), 0.0
        yield (Kind.S, stage), 2 * score_s + logits_s, 0.0
        gradient_s = score_s + stream_s(at.device, at.element_bytes * at.tokens * words)
        yield (Kind.T, stage), gradient_s * trains_head, reduction_s * trains_head
        rows_s = stream_s(at.device, 3 * hidden / plan.pp)
        yield (Kind.EMB_W, stage), rows_s * trains_embedding, reduction_s * trains_embedding
        for kind, size in (
            (Kind.EMB_REDUCE, hidden),
            (Kind.HIDDEN_BCAST, hidden),
            (Kind.LOGIT_STATS, 2 * hidden),
            (Kind.EMB_GRAD_BCAST, hidden),
        ):
            yield (kind, stage), all_reduce_s(pipeline, size) / 2, 0.0
