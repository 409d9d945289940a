"""Costs that many plans for one model on one cluster share; a search asks for thousands that differ in little."""

from collections import deque
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from muster.cost.time.collectives import CommGroup
from muster.cost.time.pass_cost import PassCost
from muster.cost.time.sublayer import LayerPasses
from muster.spec.cluster import ClusterSpec
from muster.spec.framework_traits import FrameworkTraits
from muster.spec.layer_strategy import LayerStrategy
from muster.spec.model import ModelSpec
from muster.spec.workload import Workload


class LayerKind(NamedTuple):
    """Features by which layers take different times."""

    strategy: LayerStrategy
    experts: bool
    linear_attention: bool
    window: int | None
    sums_streams: bool = False
    """True for a layer that sums the streams of sub-layers side by side."""


class StageKinds(NamedTuple):
    """Stages sorted into kinds."""

    examples: list[int]
    """A stage of each."""
    kind_by_stage: NDArray[np.intp]
    """Kind of each stage."""


@dataclass(frozen=True, eq=False)
class CostTables:
    """Costs that all plans for one model, sequence length, cluster and framework share."""

    model: ModelSpec
    workload: Workload
    """One of those that agree in the length of sequences and the load of experts."""
    cluster: ClusterSpec
    framework: FrameworkTraits
    layer_types: tuple[int, ...]
    """For each layer of the model, the index of the first layer of the same architecture (experts, linear attention,
    window, a sum of streams)."""
    device_types: tuple[int, ...]
    """For each node group of the cluster, the index of the first group with the same device."""
    comm_groups: dict[tuple, CommGroup] = field(default_factory=dict)
    """Groups of ranks, by the strides between these (`PlacedPlan.group`)."""
    interned_groups: dict[tuple, list[CommGroup]] = field(default_factory=dict)
    """Groups of ranks, by their sizes and rates."""
    layer_passes: dict[tuple, LayerPasses] = field(default_factory=dict)
    """Costs of a layer's passes, by its kind and the groups of its ranks."""
    stage_compute: dict[tuple, tuple[PassCost, PassCost, PassCost, PassCost]] = field(default_factory=dict)
    """Costs of a stage's compute on one micro-batch: forward, both parts of the backward, recompute."""
    stage_times: dict[tuple, Any] = field(default_factory=dict)
    """Seconds of a stage's passes, with the exposed communication (`StageTimes`)."""
    param_numels: dict[tuple, float] = field(default_factory=dict)
    """Elements of parameters on a rank: of a layer, and of embedding and head."""
    slowest_devices: dict[tuple, int] = field(default_factory=dict)
    """Type of the slowest of a stage's devices."""
    context_fields: dict[tuple, dict[str, Any]] = field(default_factory=dict)
    """Fields of a plan that say how context-parallel ranks communicate fastest, by their degrees."""
    dispatch_fields: dict[tuple, dict[str, Any]] = field(default_factory=dict)
    """Fields of a plan that say how tokens get to experts fastest, by their degrees."""
    stage_kinds: dict[tuple, StageKinds] = field(default_factory=dict)
    """Stages, or p2p transfers between stages, sorted into kinds that cost the same."""

    @cached_property
    def layers_are_alike(self) -> bool:
        """Tell if all layers have one architecture."""
        return len(set(self.layer_types)) == 1

    def intern(self, group: CommGroup) -> CommGroup:
        """Return the first known group that is equal to this one and has the very same links.

        Collectives of equal groups take equal times. With one object for all of them, the object itself is the key of
        what was worked out for a group: hashing it costs nothing, hashing its links would.
        """
        rates = group.network_bytes_per_s, group.network_latency_s, group.network_message_s
        key = group.size, group.num_domains, group.max_ranks_per_domain, *rates
        alike = self.interned_groups.setdefault(key, [])
        for known in alike:
            if known.intra_link is group.intra_link and known.network_link is group.network_link:
                return known
        alike.append(group)
        return group

    def is_for(self, model: ModelSpec, workload: Workload, cluster: ClusterSpec, framework: FrameworkTraits) -> bool:
        """Tell if these tables hold for the very same model and cluster objects."""
        same_objects = self.model is model and self.cluster is cluster
        same_load = self.workload.expert_load is workload.expert_load
        same_work = same_load and self.workload.seq_len == workload.seq_len
        return same_objects and same_work and self.framework == framework


class CostCache:
    """Cost tables of the most recent models and clusters; made by the caller of many predictions and passed to each.

    A search predicts thousands of plans that differ in little. With one cache for all of them, whatever they share is
    worked out once. Models and clusters are compared by identity, which costs nothing; the cache keeps them alive.
    """

    def __init__(self, max_tables: int = 8) -> None:
        self._recent: deque[CostTables] = deque(maxlen=max_tables)

    def tables(
        self, model: ModelSpec, workload: Workload, cluster: ClusterSpec, framework: FrameworkTraits
    ) -> CostTables:
        """Return the tables for a model on a cluster, empty ones where there are none yet."""
        for tables in self._recent:
            if tables.is_for(model, workload, cluster, framework):
                return tables
        made = CostTables(model, workload, cluster, framework, _layer_types(model), _device_types(cluster))
        self._recent.append(made)
        return made


def _layer_types(model: ModelSpec) -> tuple[int, ...]:
    layers = range(model.num_layers)
    types = [
        (
            model.has_experts(layer),
            model.has_linear_attention(layer),
            model.attention_window(layer),
            model.parallel_sublayers > 1 and layer > 0,
        )
        for layer in layers
    ]
    return tuple(types.index(layer_type) for layer_type in types)


def _device_types(cluster: ClusterSpec) -> tuple[int, ...]:
    devices = [group.device for group in cluster.groups]
    return tuple(next(i for i, first in enumerate(devices) if first is device) for device in devices)
