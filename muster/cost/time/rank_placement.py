"""Where the ranks of a plan lie on a cluster: the groups of its axes, the devices of its stages."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from muster.cost.time.collectives import CommGroup, all_reduce_s, make_comm_group, p2p_s
from muster.cost.time.cost_cache import CostCache, LayerKind, StageKinds
from muster.cost.time.kernels import sustained_flops_per_s
from muster.layout.mesh import axis_sizes
from muster.spec.cluster import ClusterSpec
from muster.spec.device import DeviceSpec
from muster.spec.framework_traits import FrameworkTraits
from muster.spec.model import ModelSpec
from muster.spec.plan import Mesh, Plan
from muster.spec.workload import Workload

_DATA_AXES = "dp_replicate", "dp_shard"
_PROBE_BYTES = 2**26
"""Groups are compared by how long so much takes."""
_SHAPE_FIELDS = "pp", "vpp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "etp", "axis_order", "micro_batch_size"
_SCHEDULE_FIELDS = (
    "version",
    "schedule",
    "pinned_schedule",
    "max_in_flight_micro_batches",
    "stages",
    "overrides",
    "default_strategy",
)
_SHARED_FIELDS = tuple(name for name in Plan.model_fields if name not in (*_SHAPE_FIELDS, *_SCHEDULE_FIELDS))
"""Fields of a plan that may tell on all stages; the others do through a stage's layers, mesh and groups."""


@dataclass(frozen=True)
class PlacedPlan:
    """What all stages share."""

    model: ModelSpec
    plan: Plan
    workload: Workload
    cluster: ClusterSpec
    framework: FrameworkTraits
    world_size: int
    cache: CostCache
    data: int | None = None
    """The data-parallel rank whose pipeline is meant; None: of each stage's ranks and links the slowest."""

    @cached_property
    def num_nodes(self) -> int:
        """Nodes that the plan's ranks fill."""
        per_node = self.cluster.groups[0].devices_per_node
        return max(1, min(self.cluster.num_nodes, -(-self.world_size // per_node)))

    @property
    def single_rank(self) -> CommGroup:
        """A rank by itself."""
        return self.group(0, ())

    @cached_property
    def is_flat(self) -> bool:
        """Whether it doesn't matter which nodes ranks are on: nodes are alike, and so are the links between them."""
        cluster = self.cluster
        return cluster.is_uniform and not cluster.tiers and cluster.node_bandwidth_bytes_per_s is None

    @cached_property
    def period(self) -> int:
        """Groups that begin so many ranks apart lie alike: the devices of a fabric, where all are alike."""
        return self.cluster.groups[0].domain_devices if self.is_flat else self.cluster.num_devices

    def group(self, first: int, steps: tuple[tuple[int, int], ...]) -> CommGroup:
        """Where the ranks lie that go out from `first` by (stride, number) on some axes."""
        key = first % self.period, steps
        if key not in self.cache.comm_groups:
            real = tuple(step for step in steps if step[1] > 1)
            self.cache.comm_groups[key] = self._make_group(first % self.period, real)
        return self.cache.comm_groups[key]

    def _make_group(self, first: int, steps: tuple[tuple[int, int], ...]) -> CommGroup:
        """The same object for groups that are alike."""
        key = ("made", first, steps) if steps else ("made",)
        if key not in self.cache.comm_groups:
            ranks = [first]
            for stride, size in steps:
                ranks = [rank + stride * index for index in range(size) for rank in ranks]
            intra = self.cluster.groups[0].intra
            made = make_comm_group(self.cluster, sorted(ranks)) if steps else CommGroup(1, 1, 1, intra, None)
            own = made.size, made.num_domains, made.max_ranks_per_domain, id(made.intra_link), id(made.network_link)
            alike = "alike", *own, made.network_bytes_per_s, made.network_latency_s
            self.cache.comm_groups[key] = self.cache.comm_groups.setdefault(alike, made)
        return self.cache.comm_groups[key]

    def pair(self, one: int, other: int) -> CommGroup:
        """Where two ranks lie."""
        low, high = (one, other) if one < other else (other, one)
        return self.group(low, ((high - low, 2),)) if low != high else self.single_rank

    @cached_property
    def _first_ranks(self) -> list[int]:
        if self.is_uniform:
            stride = axis_strides(axis_sizes(self.plan))["pp"]
            return [pp_rank * stride for pp_rank in range(self.plan.pp)]
        sizes = [self.plan.mesh(pp_rank).num_ranks for pp_rank in range(self.plan.pp)]
        return [sum(sizes[:pp_rank]) for pp_rank in range(self.plan.pp)]

    @cached_property
    def shared_key(self) -> tuple:
        """What all stages have in common, as far as it tells on what a stage costs."""
        plan = self.plan
        return *(getattr(plan, name) for name in _SHARED_FIELDS), plan.vocab_parallel and plan.pp, self.num_nodes

    @cached_property
    def is_uniform(self) -> bool:
        """Whether all stages run on meshes alike."""
        return self.plan.is_uniform

    @cached_property
    def _mesh(self) -> Mesh:
        return self.plan.mesh(0)

    def mesh(self, stage: int) -> Mesh:
        """`Plan.mesh`, quickly where all are alike."""
        return self._mesh if self.is_uniform else self.plan.mesh(stage)

    def rows(self, stage: int) -> int:
        """`Plan.rows`, quickly where all meshes are alike."""
        return self.plan.micro_batch_size if self.is_uniform else self.plan.local_micro_batch_size(stage)

    @cached_property
    def stages_per_replica(self) -> int:
        """Stages of one replica."""
        return self.plan.stages_per_replica

    @cached_property
    def placement(self) -> tuple[int, ...]:
        """The pipeline rank of each stage."""
        return self.plan.placement

    @cached_property
    def layers(self) -> list[range]:
        """Of each stage of one replica."""
        counts = self.plan.layer_counts(self.model.num_layers)
        ends = list(accumulate(counts))
        return [range(end - count, end) for count, end in zip(counts, ends, strict=True)]

    def first_rank(self, stage: int) -> int:
        """The first world rank that holds a stage."""
        return self._first_ranks[self.placement[stage]]

    def stage_key(self, stage: int) -> tuple:
        """Equal for stages whose times are: they lie alike, and have layers alike."""
        within = stage % self.stages_per_replica
        return self._location_key(stage), within == 0, within == self.stages_per_replica - 1, self._layer_keys[within]

    @cached_property
    def stage_kinds(self) -> StageKinds:
        """Which stages have equal signatures."""
        return self._kinds_by(("stages", self.is_uniform, *self._layer_keys), self.stage_key)

    @cached_property
    def p2p_kinds(self) -> StageKinds:
        """Which stages are as far from the one before; those with none before, or one on the same rank, are alike."""
        return self._kinds_by(("hops", self.stages_per_replica), self._p2p_key)

    def _kinds_by(self, key: tuple, signature_of: Callable[[int], Hashable]) -> StageKinds:
        key = *key, self.period, self.placement, *self._first_ranks
        if key not in self.cache.stage_kinds:
            numbers: dict[Hashable, int] = {}
            which = [numbers.setdefault(signature_of(stage), len(numbers)) for stage in range(len(self.placement))]
            self.cache.stage_kinds[key] = StageKinds(
                [which.index(number) for number in numbers.values()], np.array(which)
            )
        return self.cache.stage_kinds[key]

    def _p2p_key(self, stage: int) -> tuple[int, ...]:
        if self.receives_p2p(stage):
            before, own = self.first_rank(stage - 1), self.first_rank(stage)
            return before % self.period, own - before
        return ()

    def receives_p2p(self, stage: int) -> bool:
        """Whether a stage receives from another rank."""
        return stage % self.stages_per_replica > 0 and self.placement[stage] != self.placement[stage - 1]

    def _location_key(self, stage: int) -> int:
        """Equal for stages that lie alike."""
        pp_rank = self.placement[stage]
        return self._first_ranks[pp_rank] % self.period if self.is_uniform else pp_rank

    def stage_groups(self, stage: int) -> "StageGroups":
        """Of a stage's ranks."""
        where = self._location_key(stage)
        if where not in self._stage_groups:
            data, replicas = self.axis_group(stage, "cp", "dp_shard"), self.axis_group(stage, "dp_replicate")
            tp, cp = self.axis_group(stage, "tp"), self.axis_group(stage, "cp")
            self._stage_groups[where] = StageGroups(
                self.device(stage), data, replicas, tp, cp, self.expert_group(stage)
            )
        return self._stage_groups[where]

    @cached_property
    def _stage_groups(self) -> dict[int, "StageGroups"]:
        return {}

    @cached_property
    def _layer_keys(self) -> list[Hashable]:
        """Equal for stages of one replica whose layers are alike."""
        if self.plan.overrides:
            return [tuple(map(self.layer_kind, layers)) for layers in self.layers]
        if self.cache.layers_are_alike:
            return [len(layers) for layers in self.layers]
        return [self.cache.layer_types[layers.start : layers.stop] for layers in self.layers]

    def layer_kind(self, layer: int) -> LayerKind:
        """What a layer's times depend on besides where it lies."""
        model = self.model
        return LayerKind(
            self.plan.strategy(layer),
            model.has_experts(layer),
            model.has_linear_attention(layer),
            model.attention_window(layer),
        )

    @cached_property
    def _axis_sizes_and_strides(self) -> list[tuple[dict[str, int], dict[str, int]]]:
        """Sizes and strides of the axes, by pipeline rank."""
        plan, found = self.plan, []
        for pp_rank in range(1 if self.is_uniform else plan.pp):
            sizes = axis_sizes(plan, pp_rank) if self.is_uniform else axis_sizes(plan, pp_rank) | {"pp": 1}
            found.append((sizes, axis_strides(sizes)))
        return found * plan.pp if self.is_uniform else found

    def axis_group(self, stage: int, *axes: str) -> CommGroup:
        """The slowest of the groups of a stage's ranks that differ on these axes alone: the others wait for it."""
        sizes, strides = self._axis_sizes_and_strides[self.placement[stage]]
        steps = tuple((strides[axis], sizes[axis]) for axis in axes)
        first = self.first_rank(stage)
        if self.is_flat:
            return self.group(first, steps)
        key = "slowest", first, steps, tuple(sizes.items()), self.data
        if key not in self.cache.comm_groups:
            found = [self.group(first + offset, steps) for offset in self._offsets(stage, axes)]
            self.cache.comm_groups[key] = max(found, key=lambda group: all_reduce_s(group, _PROBE_BYTES))
        return self.cache.comm_groups[key]

    def ranks(self, stage: int) -> list[int]:
        """The world ranks that hold a stage."""
        return [self.first_rank(stage) + offset for offset in self._offsets(stage)]

    def _offsets(self, stage: int, without: Sequence[str] = ()) -> list[int]:
        """From a stage's first rank to its others that don't differ from it on some axes; without data-parallel axes
        among these, of the one data-parallel rank that is meant."""
        sizes, strides = self._axis_sizes_and_strides[self.placement[stage]]
        own = {} if self.data is None or set(without) & set(_DATA_AXES) else self._data_indices
        offsets = [0]
        for axis, size in sizes.items():
            if axis not in without and axis != "pp":
                indices = (own[axis],) if axis in own else range(size)
                offsets = [offset + strides[axis] * index for offset in offsets for index in indices]
        return offsets

    @cached_property
    def _data_indices(self) -> dict[str, int]:
        """Where the data-parallel rank stands on its axes."""
        return dict(zip(_DATA_AXES, divmod(self.data or 0, self.plan.dp_shard), strict=True))

    def device(self, stage: int) -> DeviceSpec:
        """The slowest of a stage's devices."""
        first = self.first_rank(stage)
        if self.cluster.is_uniform:
            return self.cluster.groups[0].device
        sizes, strides = self._axis_sizes_and_strides[self.placement[stage]]
        key = first, tuple(sizes.items()), tuple(strides.items()), self.data, self.plan.precision
        if key not in self.cache.slowest_devices:
            devices = {id(one): one for one in (self._device_at(first + offset) for offset in self._offsets(stage))}
            self.cache.slowest_devices[key] = min(
                devices.values(), key=lambda one: sustained_flops_per_s(one, self.plan.precision)
            )
        return self.cache.slowest_devices[key]

    def _device_at(self, rank: int) -> DeviceSpec:
        return self.cluster.group_of(rank).device

    def p2p_group(self, source: int, target: int) -> CommGroup:
        """The slowest pair of ranks of two stages that send to each other."""
        one, other = self.first_rank(source), self.first_rank(target)
        if self.is_flat or not self.is_uniform:
            return self.pair(one, other)
        key = "pair", min(one, other), max(one, other), tuple(self._axis_sizes_and_strides[0][0].items()), self.data
        if key not in self.cache.comm_groups:
            found = [self.pair(one + offset, other + offset) for offset in self._offsets(source)]
            self.cache.comm_groups[key] = max(found, key=lambda pair: p2p_s(pair, _PROBE_BYTES))
        return self.cache.comm_groups[key]

    def expert_group(self, stage: int) -> CommGroup:
        """Expert parallelism folds into the ranks of a stage: neighbours, beyond those that share an expert's
        tensors (arXiv:2504.14960)."""
        mesh = self.mesh(stage)
        return self.group(self.first_rank(stage), ((mesh.etp, mesh.ep),))


class StageGroups(NamedTuple):
    """What a stage's ranks are, and the groups in which they communicate."""

    device: DeviceSpec
    data_parallel: CommGroup
    """Those that share parameters and gradients: dp_shard and cp."""
    replicas: CommGroup
    tp: CommGroup
    cp: CommGroup
    ep: CommGroup


def axis_strides(sizes: dict[str, int]) -> dict[str, int]:
    """How many ranks lie between neighbours on each axis; `sizes`: outermost first."""
    strides, stride = {}, 1
    for axis in reversed(sizes):
        strides[axis], stride = stride, stride * sizes[axis]
    return strides
