"""Placement of a plan's ranks on a cluster: the communication groups of its axes, the devices of its stages."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import gcd
from typing import NamedTuple

import numpy as np

from muster.config.optim_config import OptimConfig, UpdateTime
from muster.cost.time.collectives import CommGroup, all_reduce_s, make_comm_group, p2p_s
from muster.cost.time.cost_cache import CostTables, LayerKind, StageKinds
from muster.cost.time.kernels import sustained_flops_per_s
from muster.cost.time.trained_parts import trained_parts
from muster.layout.mesh import axis_sizes
from muster.spec.cluster import ClusterSpec
from muster.spec.device import DeviceSpec
from muster.spec.framework_traits import FrameworkTraits
from muster.spec.mesh import Mesh
from muster.spec.mesh_axes import EXPERT_RANK_AXES
from muster.spec.model import ModelSpec
from muster.spec.pass_pairs import pairs_passes
from muster.spec.plan import Plan
from muster.spec.workload import Workload

_DATA_AXES = "dp_replicate", "dp_shard"
_PROBE_BYTES = 2**26
"""Message size at which the speeds of groups are compared."""
_SHAPE_FIELDS = "pp", "vpp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "etp", "axis_order", "micro_batch_size"
_SCHEDULE_FIELDS = (
    "version",
    "schedule",
    "pinned_schedule",
    "max_in_flight_micro_batches",
    "stages",
    "overrides",
    "default_strategy",
    "expert_placement",
)
_SHARED_FIELDS = tuple(name for name in Plan.model_fields if name not in (*_SHAPE_FIELDS, *_SCHEDULE_FIELDS))
"""Plan fields that may change the cost of every stage. The others change it only through a stage's layers, mesh and
groups."""


@dataclass(frozen=True)
class PlacedPlan:
    """A plan laid on a cluster's devices in rank order, with the groups and devices of each stage.

    Thousands of placed plans share one `cache`. The keys of its tables hold relative positions only (ranks modulo
    `period`, strides between ranks), so that a group worked out for one plan serves all plans that place ranks alike.
    """

    model: ModelSpec
    plan: Plan
    workload: Workload
    cluster: ClusterSpec
    framework: FrameworkTraits
    world_size: int
    cache: CostTables
    data_rank: int | None = None
    """Data-parallel rank whose pipeline is timed; None: the slowest of each stage's ranks and links."""
    optim: OptimConfig | None = None
    """Optimizer, and what it freezes; None: AdamW of all parameters."""
    update_time: UpdateTime = "after_passes"
    """Time at which the host updates parameters."""

    @cached_property
    def num_nodes(self) -> int:
        """Number of nodes that the plan's ranks fill."""
        per_node = self.cluster.groups[0].devices_per_node
        return max(1, min(self.cluster.num_nodes, -(-self.world_size // per_node)))

    @property
    def single_rank(self) -> CommGroup:
        """Group of a rank alone."""
        return self.group(0, ())

    @cached_property
    def is_flat(self) -> bool:
        """True where all nodes are alike and equally linked, so that it doesn't matter on which of them ranks are."""
        cluster = self.cluster
        return cluster.is_uniform and not cluster.tiers and cluster.node_bandwidth_bytes_per_s is None

    @cached_property
    def period(self) -> int:
        """Distance in ranks at which groups are alike: the devices of one fabric where the cluster is flat."""
        return self.cluster.groups[0].domain_devices if self.is_flat else self.cluster.num_devices

    def group(self, first: int, steps: tuple[tuple[int, int], ...]) -> CommGroup:
        """Return the group of ranks that spans from rank `first` by (stride, size) on some axes.

        Example: `group(4, ((1, 2), (16, 2)))` holds ranks 4, 5, 20, 21.
        """
        key = first % self.period, steps
        if key not in self.cache.comm_groups:
            real = tuple(step for step in steps if step[1] > 1)
            self.cache.comm_groups[key] = self._make_group(first % self.period, real)
        return self.cache.comm_groups[key]

    def _make_group(self, first: int, steps: tuple[tuple[int, int], ...]) -> CommGroup:
        """Return one object for all groups that are alike."""
        key = ("made", first, steps) if steps else ("made",)
        if key not in self.cache.comm_groups:
            ranks = [first]
            for stride, size in steps:
                ranks = [rank + stride * index for index in range(size) for rank in ranks]
            intra_link = self.cluster.groups[0].intra
            made = make_comm_group(self.cluster, sorted(ranks)) if steps else CommGroup(1, 1, 1, intra_link, None)
            self.cache.comm_groups[key] = self.cache.intern(made)
        return self.cache.comm_groups[key]

    def pair(self, rank: int, other: int) -> CommGroup:
        """Return the group of two ranks."""
        low, high = sorted((rank, other))
        return self.group(low, ((high - low, 2),)) if low != high else self.single_rank

    @cached_property
    def _first_ranks(self) -> list[int]:
        """First world rank of each pipeline rank."""
        if self.is_uniform:
            stride = axis_strides(axis_sizes(self.plan))["pp"]
            return [pp_rank * stride for pp_rank in range(self.plan.pp)]
        sizes = [self.plan.mesh(pp_rank).num_ranks for pp_rank in range(self.plan.pp)]
        return [sum(sizes[:pp_rank]) for pp_rank in range(self.plan.pp)]

    @cached_property
    def shared_key(self) -> tuple:
        """Cache key of everything that all stages have in common and that changes their cost."""
        plan = self.plan
        return *(getattr(plan, name) for name in _SHARED_FIELDS), plan.vocab_parallel and plan.pp, self.num_nodes

    @cached_property
    def is_uniform(self) -> bool:
        """True where all stages have equal meshes."""
        return self.plan.is_uniform

    @cached_property
    def _mesh(self) -> Mesh:
        return self.plan.mesh(0)

    def mesh(self, stage: int) -> Mesh:
        """Return `Plan.mesh`, quickly where all meshes are equal."""
        return self._mesh if self.is_uniform else self.plan.mesh(stage)

    def micro_batch_size(self, stage: int) -> int:
        """Return `Plan.local_micro_batch_size`, quickly where all meshes are equal."""
        return self.plan.micro_batch_size if self.is_uniform else self.plan.local_micro_batch_size(stage)

    @cached_property
    def stages_per_replica(self) -> int:
        """Number of stages of one pipeline replica."""
        return self.plan.stages_per_replica

    @cached_property
    def overlaps_pairs(self) -> bool:
        """True if exchanges of experts, or tensor-parallel collectives, hide in pairs of passes."""
        return self.framework.overlap_pairs and pairs_passes(self.plan, self.model)

    @cached_property
    def placement(self) -> tuple[int, ...]:
        """Pipeline rank of each stage."""
        return self.plan.placement

    @cached_property
    def layers(self) -> list[range]:
        """Layers of each stage of one pipeline replica."""
        counts = self.plan.layer_counts(self.model.num_layers)
        ends = list(accumulate(counts))
        return [range(end - count, end) for count, end in zip(counts, ends, strict=True)]

    def first_rank(self, stage: int) -> int:
        """Return the first world rank of a stage."""
        return self._first_ranks[self.placement[stage]]

    # ------------------------------------------------------------------------------------------------------------------
    # Kinds of stages and of transfers: one example of each kind is costed, however many there are

    def stage_key(self, stage: int) -> tuple:
        """Return a key that is equal for stages with equal times: they are placed alike, and their layers are alike."""
        within = stage % self.stages_per_replica
        is_first, is_last = within == 0, within == self.stages_per_replica - 1
        return self._location_key(stage), is_first, is_last, self._layer_keys[within]

    @cached_property
    def stage_kinds(self) -> StageKinds:
        """Stages sorted by equal `stage_key`."""
        return self._kinds_by(("stages", self.is_uniform, *self._layer_keys), self.stage_key)

    @cached_property
    def p2p_kinds(self) -> StageKinds:
        """Stages sorted by the distance to the stage before; those that receive nothing from another rank are alike."""
        return self._kinds_by(("hops", self.stages_per_replica), self._p2p_key)

    def _kinds_by(self, key: tuple, key_of: Callable[[int], Hashable]) -> StageKinds:
        key = *key, self.period, self.placement, *self._first_ranks
        if key not in self.cache.stage_kinds:
            numbers: dict[Hashable, int] = {}
            kinds = [numbers.setdefault(key_of(stage), len(numbers)) for stage in range(len(self.placement))]
            self.cache.stage_kinds[key] = StageKinds([kinds.index(kind) for kind in numbers.values()], np.array(kinds))
        return self.cache.stage_kinds[key]

    def _p2p_key(self, stage: int) -> tuple[int, ...]:
        if self.receives_p2p(stage):
            sender, receiver = self.first_rank(stage - 1), self.first_rank(stage)
            return sender % self.period, receiver - sender
        return ()

    def receives_p2p(self, stage: int) -> bool:
        """Tell if a stage receives its input from another rank."""
        return stage % self.stages_per_replica > 0 and self.placement[stage] != self.placement[stage - 1]

    def _location_key(self, stage: int) -> int:
        """Return a number that is equal for stages placed alike."""
        pp_rank = self.placement[stage]
        return self._first_ranks[pp_rank] % self.period if self.is_uniform else pp_rank

    @cached_property
    def _layer_keys(self) -> list[Hashable]:
        """For each stage of one replica, a key that is equal where the layers are alike, and as much of them is
        trained."""
        if self.optim is not None and self.optim.freeze:
            kinds = (tuple(map(self.layer_kind, layers)) for layers in self.layers)
            return [(kind, trained_parts(self.optim, self.model, self.plan, at)) for at, kind in enumerate(kinds)]
        if self.plan.overrides:
            return [tuple(map(self.layer_kind, layers)) for layers in self.layers]
        if self.cache.layers_are_alike:
            return [len(layers) for layers in self.layers]
        return [self.cache.layer_types[layers.start : layers.stop] for layers in self.layers]

    def layer_kind(self, layer: int) -> LayerKind:
        """Return everything that a layer's times depend on besides its place."""
        model = self.model
        return LayerKind(
            self.plan.pass_strategy(layer),
            model.has_experts(layer),
            model.has_linear_attention(layer),
            model.attention_window(layer),
            model.parallel_sublayers > 1 and layer > 0,
        )

    # ------------------------------------------------------------------------------------------------------------------
    # Groups and devices of a stage

    def stage_groups(self, stage: int) -> "StageGroups":
        """Return the device of a stage's ranks, and the groups in which they communicate."""
        location = self._location_key(stage)
        if location not in self._stage_groups:
            device_type = self._device_type(stage)
            self._stage_groups[location] = StageGroups(
                device_type,
                self.cluster.groups[device_type].device,
                data_parallel=self.axis_group(stage, "cp", "dp_shard"),
                replicas=self.axis_group(stage, "dp_replicate"),
                tp=self.axis_group(stage, "tp"),
                cp=self.axis_group(stage, "cp"),
                ep=self.expert_group(stage),
                shard_levels=self._shard_levels(stage),
                ep_levels=self.expert_levels(stage),
            )
        return self._stage_groups[location]

    @cached_property
    def _stage_groups(self) -> dict[int, "StageGroups"]:
        return {}

    @cached_property
    def _axis_sizes_and_strides(self) -> list[tuple[dict[str, int], dict[str, int]]]:
        """Sizes and strides of the axes, by pipeline rank."""
        plan = self.plan
        found = []
        for pp_rank in range(1 if self.is_uniform else plan.pp):
            sizes = axis_sizes(plan, pp_rank) if self.is_uniform else axis_sizes(plan, pp_rank) | {"pp": 1}
            found.append((sizes, axis_strides(sizes)))
        return found * plan.pp if self.is_uniform else found

    def axis_group(self, stage: int, *axes: str) -> CommGroup:
        """Return the slowest group of a stage's ranks that differ on these axes only: the others wait for it."""
        sizes, strides = self._axis_sizes_and_strides[self.placement[stage]]
        steps = tuple((strides[axis], sizes[axis]) for axis in axes)
        first = self.first_rank(stage)
        if self.is_flat:
            return self.group(first, steps)
        key = "slowest", first, steps, tuple(sizes.items()), self.data_rank
        if key not in self.cache.comm_groups:
            groups = [self.group(first + offset, steps) for offset in self._offsets(stage, axes)]
            self.cache.comm_groups[key] = max(groups, key=lambda group: all_reduce_s(group, _PROBE_BYTES))
        return self.cache.comm_groups[key]

    def ranks(self, stage: int) -> list[int]:
        """Return the world ranks of a stage."""
        return [self.first_rank(stage) + offset for offset in self._offsets(stage)]

    def _offsets(self, stage: int, without: Sequence[str] = ()) -> list[int]:
        """Return the distances from a stage's first rank to its ranks that have index 0 on the axes `without`.

        With a `data_rank`, ranks of other data-parallel ranks are left out, unless `without` names a data axis.
        """
        sizes, strides = self._axis_sizes_and_strides[self.placement[stage]]
        fixed = {} if self.data_rank is None or set(without) & set(_DATA_AXES) else self._data_indices
        offsets = [0]
        for axis, size in sizes.items():
            if axis not in without and axis != "pp":
                indices = (fixed[axis],) if axis in fixed else range(size)
                offsets = [offset + strides[axis] * index for offset in offsets for index in indices]
        return offsets

    @cached_property
    def _data_indices(self) -> dict[str, int]:
        """Index of the `data_rank` on each data axis."""
        return dict(zip(_DATA_AXES, divmod(self.data_rank or 0, self.plan.dp_shard), strict=True))

    def device(self, stage: int) -> DeviceSpec:
        """Return the slowest of a stage's devices."""
        return self.cluster.groups[self._device_type(stage)].device

    def _device_type(self, stage: int) -> int:
        """Return the index of a node group with the slowest of a stage's devices, one index for equal devices."""
        if self.cluster.is_uniform:
            return 0
        first = self.first_rank(stage)
        sizes, strides = self._axis_sizes_and_strides[self.placement[stage]]
        key = first, tuple(sizes.items()), tuple(strides.items()), self.data_rank, self.plan.precision
        if key not in self.cache.slowest_devices:
            ranks = (first + offset for offset in self._offsets(stage))
            types = dict.fromkeys(self.cache.device_types[self.cluster.locate(rank)[0]] for rank in ranks)
            self.cache.slowest_devices[key] = min(types, key=self._device_flops_per_s)
        return self.cache.slowest_devices[key]

    def _device_flops_per_s(self, device_type: int) -> float:
        return sustained_flops_per_s(self.cluster.groups[device_type].device, self.plan.precision)

    def p2p_group(self, source: int, target: int) -> CommGroup:
        """Return the slowest pair of ranks of two stages that send to each other."""
        sender, receiver = self.first_rank(source), self.first_rank(target)
        if self.is_flat or not self.is_uniform:
            return self.pair(sender, receiver)
        sizes = tuple(self._axis_sizes_and_strides[0][0].items())
        key = "pair", min(sender, receiver), max(sender, receiver), sizes, self.data_rank
        if key not in self.cache.comm_groups:
            pairs = [self.pair(sender + offset, receiver + offset) for offset in self._offsets(source)]
            self.cache.comm_groups[key] = max(pairs, key=lambda pair: p2p_s(pair, _PROBE_BYTES))
        return self.cache.comm_groups[key]

    def expert_group(self, stage: int) -> CommGroup:
        """Return the expert-parallel group of a stage.

        Expert parallelism folds into the ranks of a stage that share its experts: neighbours, beyond those that share
        an expert's tensors (arXiv:2504.14960).
        """
        sizes, strides = self._axis_sizes_and_strides[self.placement[stage]]
        return self.group(self.first_rank(stage), _expert_steps(sizes, strides, self.mesh(stage)))

    def expert_levels(self, stage: int) -> tuple[CommGroup, CommGroup] | None:
        """Return the groups of the two steps of a hierarchical exchange; None under other dispatchers."""
        inner = self.plan.expert_dispatch(self.mesh(stage)).inner
        if inner == 1:
            return None
        sizes, strides = self._axis_sizes_and_strides[self.placement[stage]]
        return self._near_and_far(stage, _expert_steps(sizes, strides, self.mesh(stage)), inner)

    def _near_and_far(self, stage: int, steps: Sequence[tuple[int, int]], inner: int) -> tuple[CommGroup, CommGroup]:
        """Return the groups of `inner` neighbours and of the ranks of the same place in these, of the ranks that lie
        (stride, size) apart, innermost first."""
        near, far = [], []
        for stride, size in steps:
            taken = gcd(inner, size)
            inner //= taken
            near.append((stride, taken))
            far.append((stride * taken, size // taken))
        first = self.first_rank(stage)
        levels = (tuple(step for step in steps if step[1] > 1) for steps in (near, far))
        inside, between = (self.group(first, steps) for steps in levels)
        return inside, between

    def _shard_levels(self, stage: int) -> tuple[CommGroup, CommGroup, CommGroup] | None:
        if not self.plan.has_shard_levels:
            return None
        sizes, strides = self._axis_sizes_and_strides[self.placement[stage]]
        steps = sorted((strides[axis], sizes[axis]) for axis in ("cp", "dp_shard"))
        mesh = self.mesh(stage)
        params, _ = self._near_and_far(stage, steps, self.plan.gather_ranks(mesh))
        return params, *self._near_and_far(stage, steps, self.plan.reduce_ranks(mesh))


def _expert_steps(sizes: dict[str, int], strides: dict[str, int], mesh: Mesh) -> tuple[tuple[int, int], ...]:
    """Return (stride, size) of the axes that expert parallelism takes its ranks of, innermost first."""
    steps, etp, ep = [], mesh.etp, mesh.ep
    for axis in reversed(sizes):
        if axis in EXPERT_RANK_AXES:
            shared = gcd(etp, sizes[axis])
            etp //= shared
            taken = gcd(ep, sizes[axis] // shared)
            ep //= taken
            steps.append((strides[axis] * shared, taken))
    return tuple(step for step in steps if step[1] > 1)


class StageGroups(NamedTuple):
    """The device of a stage's ranks, and the groups in which they communicate."""

    device_type: int
    """Index of the first node group of the cluster with this device."""
    device: DeviceSpec
    data_parallel: CommGroup
    """Ranks that share parameters and gradients: dp_shard and cp."""
    replicas: CommGroup
    tp: CommGroup
    cp: CommGroup
    ep: CommGroup
    ep_levels: tuple[CommGroup, CommGroup] | None = None
    """Neighbours, and ranks of different groups of neighbours, in a hierarchical exchange."""
    shard_levels: tuple[CommGroup, CommGroup, CommGroup] | None = None
    """Neighbours that share a copy of the parameters, neighbours that share gradients, and data-parallel ranks of
    different groups of the latter; None where all share both."""

    @property
    def layer_key(self) -> tuple[Hashable, ...]:
        """Device and groups that a layer's own kernels and collectives depend on."""
        return self.device_type, self.tp, self.cp, self.ep, self.ep_levels


def axis_strides(sizes: dict[str, int]) -> dict[str, int]:
    """Return the distance in ranks between neighbours on each axis; `sizes` begins with the outermost axis."""
    strides = {}
    stride = 1
    for axis in reversed(sizes):
        strides[axis] = stride
        stride *= sizes[axis]
    return strides
