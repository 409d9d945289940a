"""What many plans for one model on one cluster share: a search asks for thousands that differ in little."""

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
from muster.spec.device import DeviceSpec
from muster.spec.framework_traits import FrameworkTraits
from muster.spec.model import ModelSpec
from muster.spec.plan import LayerStrategy


class LayerKind(NamedTuple):
    """What tells layers apart that take different times."""

    strategy: LayerStrategy
    experts: bool
    linear_attention: bool
    window: int | None


class StageKinds(NamedTuple):
    """Stages sorted into kinds."""

    examples: list[int]
    """A stage of each."""
    kind_by_stage: NDArray[np.intp]
    """Of each stage, its kind."""


@dataclass(frozen=True)
class CostCache:
    """What many plans for a model on a cluster share."""

    layer_types: tuple[int, ...]
    """Of each layer of the model a number that tells it from others, whatever the plan does with single ones."""
    comm_groups: dict[tuple, CommGroup] = field(default_factory=dict)
    """Where ranks lie, by their strides (`PlanSetting.group`)."""
    layer_passes: dict[tuple, LayerPasses] = field(default_factory=dict)
    """Of a layer, by its kind and the groups of its ranks."""
    stage_compute: dict[tuple, tuple[PassCost, PassCost, PassCost, PassCost]] = field(default_factory=dict)
    """Of a stage what it computes of a micro-batch: forward, both parts of backward, what is made again."""
    stage_times: dict[tuple, Any] = field(default_factory=dict)
    """The same as seconds, with what travels beside it (`StageTimes`)."""
    param_numels: dict[tuple, float] = field(default_factory=dict)
    """Numbers of parameters on a rank: of a layer, and of embedding and head."""
    slowest_devices: dict[tuple, DeviceSpec] = field(default_factory=dict)
    """The slowest of a stage's."""
    stage_kinds: dict[tuple, StageKinds] = field(default_factory=dict)
    """Which stages are alike, and which hops."""

    @cached_property
    def layers_are_alike(self) -> bool:
        """Whether it is the same for all."""
        return len(set(self.layer_types)) == 1


_RECENT: deque[tuple[ModelSpec, int, ClusterSpec, FrameworkTraits, CostCache]] = deque(maxlen=8)


def cost_cache_of(model: ModelSpec, seq_len: int, cluster: ClusterSpec, framework: FrameworkTraits) -> CostCache:
    """What is known from recent calls for the same objects."""
    for its_model, its_len, its_cluster, its_software, known in _RECENT:
        if its_model is model and its_len == seq_len and its_cluster is cluster and its_software == framework:
            return known
    layers = range(model.num_layers)
    kinds = [(model.has_experts(one), model.has_linear_attention(one), model.attention_window(one)) for one in layers]
    numbers = tuple(kinds.index(kind) for kind in kinds)
    _RECENT.append((model, seq_len, cluster, framework, CostCache(numbers)))
    return _RECENT[-1][-1]
