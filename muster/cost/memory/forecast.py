"""Memory forecast: the peak of each rank of a plan, found by a liveness walk over its Program, and whether it fits."""

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf

import numpy as np
from numpy.typing import NDArray

from muster.config.optim_config import OptimConfig
from muster.config.outer_config import OuterConfig
from muster.cost.memory.device_overhead import device_overhead
from muster.cost.memory.graph_memory import held_by_graphs
from muster.cost.memory.kernel_workspace import DEFAULT_KERNEL_WORKSPACE, KERNEL_WORKSPACES, KernelWorkspace
from muster.cost.memory.liveness import (
    AllocationOrder,
    InstructionMemoryCache,
    allocation_orders,
    find_peak,
    peak_terms,
)
from muster.cost.memory.megatron_memory import megatron_stage_memory
from muster.cost.memory.native_memory import native_stage_memory
from muster.cost.memory.param_shards import layer_type
from muster.cost.memory.rank_memory import outer_error_bytes
from muster.cost.memory.stage_memory import StageMemory
from muster.cost.memory.terms import MemoryTerms
from muster.cost.memory.version_memory import held_by_versions
from muster.layout.host_updates import device_updates
from muster.layout.mesh import axis_sizes
from muster.layout.tensor_layout import has_vocab_shard
from muster.schedule.action import Kind
from muster.schedule.program import Program
from muster.spec.cluster import ClusterSpec
from muster.spec.compilation import compiles
from muster.spec.cuda_graphs import replays_graphs
from muster.spec.device_update_rules import updates_fetched_state
from muster.spec.framework_traits import FrameworkTraits
from muster.spec.frameworks import MUSTER
from muster.spec.layer_strategy import LayerStrategy
from muster.spec.model import ModelSpec
from muster.spec.plan import Plan
from muster.spec.workload import Workload

MEMORY_HEADROOM = 0.12
"""Share of a device's memory that chosen plans leave free if any plan can and no `--memory-limit` is given.

Reported peaks differ from their forecasts by a tenth on average (`memory` of `muster validate --json`). Of the layouts
of arXiv:2311.05610 (including sheets that don't ship), 3 of 45 with a forecast of 80 to 88 % of the memory ran out of
memory, but 5 of 15 with one of 88 to 90 %.
"""

IndexArray = NDArray[np.intp]
StageMemoryCache = dict[Hashable, StageMemory]
"""Memory of stages, by `stage_memory_key`."""


@dataclass(frozen=True, slots=True)
class RankForecast:
    """Forecast for the ranks of one pipeline rank, which all run the same instructions, at the one that holds most."""

    pp_rank: int
    rank: int
    """First world rank among them whose device has the least memory."""
    num_ranks: int
    peak_instruction: str
    """Instruction of the peak and the moment within it, for example `0F3, loss`."""
    terms: MemoryTerms
    capacity_bytes: int | None
    """Memory of the rank's device; None if unknown."""
    host_bytes: int = 0
    """Peak of its offloaded activations, optimizer state and buffers in host memory."""
    host_capacity_bytes: float | None = None
    """Host memory per device, the least of these ranks; None if unknown."""
    disk_bytes: int = 0
    """Its optimizer state and activations on disk."""
    disk_capacity_bytes: float | None = None
    """Disk space per device, the least of these ranks; None if unknown."""

    @property
    def exceeds_host_memory(self) -> bool:
        """True if what it keeps in host memory exceeds its share."""
        return self.host_capacity_bytes is not None and self.host_bytes > self.host_capacity_bytes

    @property
    def exceeds_disk(self) -> bool:
        """True if what it keeps on disk exceeds its share."""
        return self.disk_capacity_bytes is not None and self.disk_bytes > self.disk_capacity_bytes

    @property
    def fits(self) -> bool | None:
        if self.exceeds_host_memory or self.exceeds_disk:
            return False
        return None if self.capacity_bytes is None else self.terms.total <= self.capacity_bytes

    @property
    def largest_terms(self) -> list[tuple[str, int]]:
        """The three terms that take most, with their bytes, largest first."""
        return sorted(self.terms.by_name().items(), key=lambda pair: -pair[1])[:3]


@dataclass(frozen=True, slots=True)
class MemoryForecast:
    """Memory of a plan, by pipeline rank."""

    ranks: tuple[RankForecast, ...]

    @property
    def fullest(self) -> RankForecast:
        """Forecast with the largest share of its device's memory."""
        return max(self.ranks, key=lambda rank: rank.terms.total / (rank.capacity_bytes or 1))

    @property
    def fits(self) -> bool | None:
        """True if every rank fits; None if a device's memory is unknown."""
        found = [rank.fits for rank in self.ranks]
        if any(rank.exceeds_host_memory or rank.exceeds_disk for rank in self.ranks):
            return False
        return None if None in found else all(found)


def forecast_memory(
    model: ModelSpec,
    plan: Plan,
    workload: Workload,
    cluster: ClusterSpec,
    program: Program,
    framework: FrameworkTraits | None = None,
    kernel_workspace: KernelWorkspace | None = None,
    optim: OptimConfig | None = None,
    outer: OuterConfig | None = None,
) -> MemoryForecast:
    """Forecast the peak memory of each rank as it runs the Program.

    `framework`: the framework whose storage is modelled (default: Muster). `kernel_workspace`: the temporary memory of
    kernels (default: that of the cluster's first device). `optim`: the optimizer in native storage (default: AdamW).
    `outer`: outer steps of a plan with islands (default: DiLoCo's).
    """
    found = []
    cache: InstructionMemoryCache = {}
    orders = program.once(allocation_orders)
    tightest = _tightest_ranks(plan, cluster)
    shares, disk_shares = host_shares_bytes(plan, cluster), disk_shares_bytes(plan, cluster)
    for pp_rank, stages in enumerate(
        _stage_memory_by_pp_rank(model, plan, workload, cluster, framework, kernel_workspace, optim=optim)
    ):
        resident = sum(stage.resident.total for stage in stages.values())
        if replays_graphs(plan, cluster.device.kind):
            stages = held_by_graphs(plan, stages, orders[pp_rank].actions)
        stages = held_by_versions(plan, orders[pp_rank].actions, stages, optim)
        peak_instruction, terms = peak_terms(orders[pp_rank], stages, cache)
        rank = tightest[pp_rank]
        device = cluster.group_of(rank).device
        terms += device_overhead(device, plan, pp_rank, terms.total - resident)
        terms += MemoryTerms(optimizer=outer_error_bytes(model, plan, rank, optim, outer))
        offloaded = {
            stage: tuple(one.offloaded.total for one in memory.slices or (memory,)) for stage, memory in stages.items()
        }
        found.append(
            RankForecast(
                pp_rank,
                rank,
                plan.islands * plan.mesh(pp_rank).num_ranks,
                peak_instruction,
                terms,
                device.memory_bytes,
                orders[pp_rank].max_host_bytes(offloaded)
                + orders[pp_rank].max_away_bytes({stage: one.host_activations for stage, one in stages.items()})
                + sum(memory.host_state for memory in stages.values())
                + _update_buffers(stages.values(), program)
                + sum(memory.activation_buffers for memory in stages.values()),
                None if shares[pp_rank] == inf else shares[pp_rank],
                sum(memory.disk_state for memory in stages.values())
                + orders[pp_rank].max_away_bytes({stage: one.disk_activations for stage, one in stages.items()}),
                None if disk_shares[pp_rank] == inf else disk_shares[pp_rank],
            )
        )
    return MemoryForecast(tuple(found))


def _update_buffers(stages: Collection[StageMemory], program: Program) -> int:
    """Return the bytes of the buffers in host memory for a rank's updates by the host."""
    kinds = {item.action.kind for lanes in program.ranks for item in lanes.get("host", ())} - {Kind.HOST_UPDATE}
    if Kind.BACKWARD_UPDATE in kinds:
        return max(memory.backward_buffers for memory in stages)
    if kinds:
        return sum(memory.delayed_buffers for memory in stages)
    return max(memory.host_buffers for memory in stages)


def peak_bytes_by_pp_rank(
    model: ModelSpec,
    plan: Plan,
    workload: Workload,
    cluster: ClusterSpec,
    orders: Sequence[AllocationOrder],
    cache: StageMemoryCache | None = None,
    framework: FrameworkTraits | None = None,
    optim: OptimConfig | None = None,
) -> list[tuple[int, int]]:
    """Return (world rank, peak bytes) of the pipeline ranks that have orders: the total of `forecast_memory`.

    `orders`: allocation orders of all ranks, or of the first ones, which plans with one schedule share. `framework`,
    `optim`: as there. `cache`: memory of stages of plans with this one's `stage_memory_family`; it is extended.
    """
    found = []
    instructions: InstructionMemoryCache = {}
    tightest = _tightest_ranks(plan, cluster)
    own = model, plan, workload, cluster, framework
    held = _stage_memory_by_pp_rank(*own, cache=cache, optim=optim, num_ranks=len(orders))
    for pp_rank, stages in enumerate(held):
        resident = sum(stage.resident.total for stage in stages.values())
        if replays_graphs(plan, cluster.device.kind):
            stages = held_by_graphs(plan, stages, orders[pp_rank].actions)
        stages = held_by_versions(plan, orders[pp_rank].actions, stages, optim)
        _, total = find_peak(orders[pp_rank], stages, instructions)
        rank = tightest[pp_rank]
        device = cluster.group_of(rank).device
        found.append((rank, total + device_overhead(device, plan, pp_rank, total - resident).total))
    return found


def offloaded_state_bytes(
    model: ModelSpec,
    plan: Plan,
    workload: Workload,
    cluster: ClusterSpec,
    cache: StageMemoryCache | None = None,
    framework: FrameworkTraits | None = None,
    optim: OptimConfig | None = None,
) -> list[tuple[int, int]]:
    """Return the bytes of optimizer state and buffers in host memory, and on disk, by pipeline rank. `cache`, `optim`:
    as in `peak_bytes_by_pp_rank`."""
    held = _stage_memory_by_pp_rank(model, plan, workload, cluster, framework, cache=cache, optim=optim)
    return [
        (
            sum(memory.host_state for memory in stages.values())
            + max((memory.host_buffers for memory in stages.values()), default=0),
            sum(memory.disk_state for memory in stages.values()),
        )
        for stages in held
    ]


def host_shares_bytes(plan: Plan, cluster: ClusterSpec) -> list[float]:
    """Return the host memory per device of each pipeline rank, the least of its ranks; infinite where unknown."""
    return _least_shares(plan, cluster, [group.host_memory_per_device_bytes for group in cluster.groups])


def disk_shares_bytes(plan: Plan, cluster: ClusterSpec) -> list[float]:
    """Return the disk space per device of each pipeline rank, the least of its ranks; infinite where unknown."""
    return _least_shares(plan, cluster, [group.disk_per_device_bytes for group in cluster.groups])


def _least_shares(plan: Plan, cluster: ClusterSpec, by_group: Sequence[float | None]) -> list[float]:
    shares = np.array([share or inf for share in by_group])
    if cluster.is_uniform:
        return [float(shares[0])] * plan.pp
    return [float(np.min(shares[groups])) for groups in _node_groups_of(_ranks_by_pp_rank(plan), cluster)]


def _tightest_ranks(plan: Plan, cluster: ClusterSpec) -> list[int]:
    """Return for each pipeline rank its first world rank whose device has the least memory."""
    held = _ranks_by_pp_rank(plan)
    if cluster.is_uniform:
        return [int(ranks[0]) for ranks in held]
    memory = np.array([group.device.memory_bytes or inf for group in cluster.groups])
    groups = _node_groups_of(held, cluster)
    return [int(ranks[np.argmin(memory[own])]) for ranks, own in zip(held, groups, strict=True)]


def _ranks_by_pp_rank(plan: Plan) -> list[IndexArray]:
    """Return the world ranks of each pipeline rank."""
    if plan.is_uniform:
        sizes = axis_sizes(plan)
        ranks = np.arange(plan.island_size).reshape(tuple(sizes.values()))
        return list(np.moveaxis(ranks, list(sizes).index("pp"), 0).reshape(plan.pp, -1))
    ends = list(accumulate(plan.mesh(pp_rank).num_ranks for pp_rank in range(plan.pp)))
    return [np.arange(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]


def _node_groups_of(held: Sequence[IndexArray], cluster: ClusterSpec) -> list[IndexArray]:
    """Return the index of the node group of each rank."""
    ends = np.cumsum([group.num_devices for group in cluster.groups])
    return [np.searchsorted(ends, ranks % cluster.num_devices, "right") for ranks in held]


def _stage_memory_by_pp_rank(
    model: ModelSpec,
    plan: Plan,
    workload: Workload,
    cluster: ClusterSpec,
    framework: FrameworkTraits | None = None,
    kernel_workspace: KernelWorkspace | None = None,
    cache: StageMemoryCache | None = None,
    optim: OptimConfig | None = None,
    num_ranks: int | None = None,
) -> list[dict[int, StageMemory]]:
    """Return stage → memory for the first pipeline ranks (default: all); stages with equal memory share one object."""
    framework = framework or MUSTER
    kind = cluster.device.kind
    framework = framework.for_plan(compiles(plan, model, kind, framework), replays_graphs(plan, kind))
    kernel_workspace = kernel_workspace or KERNEL_WORKSPACES.get(cluster.device.kind, DEFAULT_KERNEL_WORKSPACE)
    cache = {} if cache is None else cache
    found: list[dict[int, StageMemory]] = [{} for _ in range(plan.pp if num_ranks is None else num_ranks)]
    for stage, pp_rank in enumerate(plan.placement):
        if pp_rank >= len(found):
            continue
        key = stage_memory_key(model, plan, stage, optim)
        if key not in cache:
            cache[key] = (
                megatron_stage_memory(model, plan, workload, stage, framework)
                if framework.storage == "megatron"
                else native_stage_memory(model, plan, workload, stage, kernel_workspace, optim)
            )
        found[pp_rank][stage] = cache[key]
    return found


_POLICY_FIELDS = ("recompute", "offload")
_FAMILY_FIELDS = tuple(
    name
    for name in Plan.model_fields
    if name not in ("schedule", "pinned_schedule", "default_strategy", "overrides", "stages", "vpp")
)
_FAMILY_STRATEGY_FIELDS = tuple(name for name in LayerStrategy.model_fields if name not in _POLICY_FIELDS)


def stage_memory_family(plan: Plan) -> Hashable:
    """Return a key that is equal for plans whose stages have equal memory where their `stage_memory_key` is: of a
    schedule only the stages' places and what its backwards do matter."""
    strategy = plan.default_strategy
    schedule = plan.placement, plan.pipeline_replicas, plan.split_backward, plan.reduces_replicas_once
    return (
        *(getattr(plan, name) for name in _FAMILY_FIELDS),
        *(getattr(strategy, name) for name in _FAMILY_STRATEGY_FIELDS),
        *schedule,
    )


def stage_memory_key(model: ModelSpec, plan: Plan, stage: int, optim: OptimConfig | None = None) -> Hashable:
    """Return a key that is equal for stages with equal memory: layer types and strategies, ends of the model, mesh,
    neighbours on the same rank, vocabulary shard, layers with state off the device; where parameters are frozen, the
    layers themselves."""
    layers = plan.layers(stage, model.num_layers)
    if optim is not None and optim.freeze:
        return layers, plan, stage
    pp_rank = plan.pp_rank(stage)
    neighbours = [0 <= other < plan.num_stages and plan.pp_rank(other) == pp_rank for other in (stage - 1, stage + 1)]
    vocab_shard = plan.vocab_parallel and (pp_rank, has_vocab_shard(plan, stage))
    layer_kinds = (
        tuple((layer_type(model, layer), plan.strategy(layer)) for layer in layers)
        if plan.overrides
        else (tuple(layer_type(model, layer) for layer in layers), plan.default_strategy)
    )
    away: Hashable = ()
    if plan.default_strategy.offload_optimizer_ratio < 1 or updates_fetched_state(plan):
        away = tuple(map(plan.offloads_optimizer, layers)), device_updates(plan, model.num_layers, stage)
    ends = plan.is_first(stage), plan.is_last(stage)
    return layer_kinds, *ends, plan.mesh(stage), tuple(neighbours), vocab_shard, away
