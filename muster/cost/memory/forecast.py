"""How much memory each rank of a plan needs, moment by moment of its Program, and whether that is there."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf

import numpy as np
from numpy.typing import NDArray

from muster.cost.memory.device_overhead import device_overhead
from muster.cost.memory.liveness import AllocationOrder, allocation_orders, find_peak, peak_terms
from muster.cost.memory.megatron_memory import megatron_stage_memory
from muster.cost.memory.native_memory import (
    DEFAULT_KERNEL_WORKSPACE,
    KERNEL_WORKSPACES,
    KernelWorkspace,
    native_stage_memory,
)
from muster.cost.memory.param_shards import layer_type
from muster.cost.memory.stage_memory import StageMemory
from muster.cost.precision_bytes import MemoryTerms
from muster.layout.mesh import axis_sizes
from muster.layout.tensor_layout import has_vocab_shard
from muster.schedule.program import Program
from muster.spec.cluster import ClusterSpec
from muster.spec.framework_traits import FrameworkTraits
from muster.spec.model import ModelSpec
from muster.spec.plan import Plan
from muster.spec.workload import Workload

MEMORY_HEADROOM = 0.12
"""Of a device's memory, what chosen plans leave free where any plan does and nobody says `--memory-limit`. The peaks
that programs report are off by a tenth from their forecasts on average (`memory` of `muster validate --json`). Of the
layouts of arXiv:2311.05610, sheets that don't ship included, 3 of 45 whose forecast fills 80 to 88 % of the memory ran
out of it, but 5 of 15 of those from there to 90 %."""


IndexArray = NDArray[np.intp]
StageMemoryCache = dict[Hashable, StageMemory]
"""By `kind_of_stage`."""


@dataclass(frozen=True, slots=True)
class RankForecast:
    """The ranks that hold one pipeline rank's stages, all of which do the same: the one that holds most."""

    pp_rank: int
    rank: int
    """The first of them whose device has the least memory."""
    num_ranks: int
    peak_instruction: str
    """When it holds most: an instruction, and the moment within it."""
    terms: MemoryTerms
    capacity_bytes: int | None
    """Of the rank's device; None where it is unknown."""
    host_bytes: int = 0
    """What it has in its host's memory at most, of what it offloads."""
    host_capacity_bytes: float | None = None
    """A device's share of that memory, the least of these ranks; None where it is unknown."""

    @property
    def exceeds_host_memory(self) -> bool:
        """Whether what it offloads is more than its share of the host's memory."""
        return self.host_capacity_bytes is not None and self.host_bytes > self.host_capacity_bytes

    @property
    def fits(self) -> bool | None:
        if self.exceeds_host_memory:
            return False
        return None if self.capacity_bytes is None else self.terms.total <= self.capacity_bytes

    @property
    def largest_terms(self) -> list[tuple[str, int]]:
        """The three terms that take most, with their bytes, largest first."""
        return sorted(self.terms.by_name().items(), key=lambda pair: -pair[1])[:3]


@dataclass(frozen=True, slots=True)
class MemoryForecast:
    """What a plan needs, by pipeline rank."""

    ranks: tuple[RankForecast, ...]

    @property
    def fullest(self) -> RankForecast:
        """The ranks that hold most, of those that come nearest to what they have or have too little."""
        return max(self.ranks, key=lambda one: one.terms.total / (one.capacity_bytes or 1))

    @property
    def fits(self) -> bool | None:
        """Whether every rank's memory suffices; None where a device's is unknown."""
        found = [one.fits for one in self.ranks]
        return False if any(one.exceeds_host_memory for one in self.ranks) else None if None in found else all(found)


def forecast_memory(
    model: ModelSpec,
    plan: Plan,
    workload: Workload,
    cluster: ClusterSpec,
    program: Program,
    framework: FrameworkTraits | None = None,
    kernel_workspace: KernelWorkspace | None = None,
) -> MemoryForecast:
    """What each rank holds at its peak while it follows the Program.

    `software`: how it stores the model, Muster's own way if not given. `kernels`: what kernels need for a while, those
    of the cluster's first device if not given.
    """
    found, known = [], {}
    orders, tightest = allocation_orders(program), _tightest_ranks(plan, cluster)
    shares = host_shares_bytes(plan, cluster)
    for pp_rank, stages in enumerate(
        _stage_memory_by_pp_rank(model, plan, workload, cluster, framework, kernel_workspace)
    ):
        at, terms = peak_terms(orders[pp_rank], stages, known)
        rank = tightest[pp_rank]
        group = cluster.group_of(rank)
        fixed = sum(stage.resident.total for stage in stages.values())
        terms += device_overhead(group.device, plan, pp_rank, terms.total - fixed)
        away = orders[pp_rank].max_host_bytes({stage: own.offloaded.total for stage, own in stages.items()})
        count, capacity = plan.mesh(pp_rank).num_ranks, group.device.memory_bytes
        share = None if shares[pp_rank] == inf else shares[pp_rank]
        found.append(RankForecast(pp_rank, rank, count, at, terms, capacity, away, share))
    return MemoryForecast(tuple(found))


def peak_bytes_by_pp_rank(
    model: ModelSpec,
    plan: Plan,
    workload: Workload,
    cluster: ClusterSpec,
    orders: Sequence[AllocationOrder],
    cache: StageMemoryCache | None = None,
) -> list[tuple[int, int]]:
    """Of each pipeline rank, the `rank` and the total of its `forecast` under Muster's own storage, by an
    order that many plans share. `alike`: what is known of stages of plans that differ from this one in what layers
    recompute and offload alone; more is added."""
    found, known = [], {}
    tightest = _tightest_ranks(plan, cluster)
    for pp_rank, stages in enumerate(_stage_memory_by_pp_rank(model, plan, workload, cluster, cache=cache)):
        _, total = find_peak(orders[pp_rank], stages, known)
        rank = tightest[pp_rank]
        fixed = sum(stage.resident.total for stage in stages.values())
        device = cluster.group_of(rank).device
        found.append((rank, total + device_overhead(device, plan, pp_rank, total - fixed).total))
    return found


def host_shares_bytes(plan: Plan, cluster: ClusterSpec) -> list[float]:
    """Of each pipeline rank, what each of its ranks may have in its host's memory: the least of their shares; infinite
    where none is known."""
    shares = np.array([group.host_memory_per_device_bytes or inf for group in cluster.groups])
    if cluster.is_uniform:
        return [float(shares[0])] * plan.pp
    return [float(np.min(shares[groups])) for groups in _node_groups_of(_ranks_by_pp_rank(plan), cluster)]


def _tightest_ranks(plan: Plan, cluster: ClusterSpec) -> list[int]:
    """Of each pipeline rank, the first of its ranks whose device has the least memory."""
    held = _ranks_by_pp_rank(plan)
    if cluster.is_uniform:
        return [int(ranks[0]) for ranks in held]
    memory = np.array([group.device.memory_bytes or inf for group in cluster.groups])
    groups = _node_groups_of(held, cluster)
    return [int(ranks[np.argmin(memory[own])]) for ranks, own in zip(held, groups, strict=True)]


def _ranks_by_pp_rank(plan: Plan) -> list[IndexArray]:
    """The ranks that hold each pipeline rank's stages."""
    if plan.is_uniform:
        sizes = axis_sizes(plan)
        ranks = np.arange(plan.world_size).reshape(tuple(sizes.values()))
        return list(np.moveaxis(ranks, list(sizes).index("pp"), 0).reshape(plan.pp, -1))
    ends = list(accumulate(plan.mesh(pp_rank).num_ranks for pp_rank in range(plan.pp)))
    return [np.arange(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]


def _node_groups_of(held: Sequence[IndexArray], cluster: ClusterSpec) -> list[IndexArray]:
    """The group of nodes that each of some ranks stands in."""
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
) -> list[dict[int, StageMemory]]:
    """Of each pipeline rank, what its stages hold; one object for stages that hold alike."""
    framework = framework or FrameworkTraits()
    kernel_workspace = kernel_workspace or KERNEL_WORKSPACES.get(cluster.device.kind, DEFAULT_KERNEL_WORKSPACE)
    cache = {} if cache is None else cache
    found: list[dict[int, StageMemory]] = [{} for _ in range(plan.pp)]
    for stage, pp_rank in enumerate(plan.placement):
        key = stage_memory_key(model, plan, stage)
        if key not in cache:
            cache[key] = (
                megatron_stage_memory(model, plan, workload, stage, framework)
                if framework.storage == "megatron"
                else native_stage_memory(model, plan, workload, stage, kernel_workspace)
            )
        found[pp_rank][stage] = cache[key]
    return found


def stage_memory_key(model: ModelSpec, plan: Plan, stage: int) -> Hashable:
    """What stages that hold alike have in common."""
    layers, own = plan.layers(stage, model.num_layers), plan.pp_rank(stage)
    neighbours = [0 <= other < plan.num_stages and plan.pp_rank(other) == own for other in (stage - 1, stage + 1)]
    words = plan.vocab_parallel and (own, has_vocab_shard(plan, stage))
    kinds = (
        tuple((layer_type(model, layer), plan.strategy(layer)) for layer in layers)
        if plan.overrides
        else (tuple(layer_type(model, layer) for layer in layers), plan.default_strategy)
    )
    return kinds, plan.is_first(stage), plan.is_last(stage), plan.mesh(stage), tuple(neighbours), words
