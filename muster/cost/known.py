"""What many plans for one model on one cluster share: a search asks for thousands that differ in little."""

from collections import deque
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from muster.cost.collectives import Group
from muster.cost.layer_parts import LayerPasses
from muster.cost.spent import Spent
from muster.spec.cluster import ClusterSpec
from muster.spec.device import DeviceSpec
from muster.spec.model import ModelSpec
from muster.spec.plan import Strategy
from muster.spec.software import Software


class LayerKind(NamedTuple):
    """What tells layers apart that take different times."""

    strategy: Strategy
    experts: bool
    linear_attention: bool
    window: int | None


class StageKinds(NamedTuple):
    """Stages sorted into kinds."""

    examples: list[int]
    """A stage of each."""
    which: NDArray[np.intp]
    """Of each stage, its kind."""


@dataclass(frozen=True)
class Known:
    """What many plans for a model on a cluster share."""

    layers: tuple[int, ...]
    """Of each layer of the model a number that tells it from others, whatever the plan does with single ones."""
    groups: dict[tuple, Group] = field(default_factory=dict)
    """Where ranks lie, by their strides (`PlanSetting.group`)."""
    passes: dict[tuple, LayerPasses] = field(default_factory=dict)
    """Of a layer, by its kind and the groups of its ranks."""
    wholes: dict[tuple, tuple[Spent, Spent, Spent, Spent]] = field(default_factory=dict)
    """Of a stage what it computes of a micro-batch: forward, both parts of backward, what is made again."""
    stages: dict[tuple, Any] = field(default_factory=dict)
    """The same as seconds, with what travels beside it (`StageTimes`)."""
    numels: dict[tuple, float] = field(default_factory=dict)
    """Numbers of parameters on a rank: of a layer, and of embedding and head."""
    devices: dict[tuple, DeviceSpec] = field(default_factory=dict)
    """The slowest of a stage's."""
    patterns: dict[tuple, StageKinds] = field(default_factory=dict)
    """Which stages are alike, and which hops."""

    @cached_property
    def layers_alike(self) -> bool:
        """Whether it is the same for all."""
        return len(set(self.layers)) == 1


_RECENT: deque[tuple[ModelSpec, int, ClusterSpec, Software, Known]] = deque(maxlen=8)


def known_of(model: ModelSpec, seq_len: int, cluster: ClusterSpec, software: Software) -> Known:
    """What is known from recent calls for the same objects."""
    for its_model, its_len, its_cluster, its_software, known in _RECENT:
        if its_model is model and its_len == seq_len and its_cluster is cluster and its_software == software:
            return known
    layers = range(model.num_layers)
    kinds = [(model.has_experts(one), model.has_linear_attention(one), model.window(one)) for one in layers]
    numbers = tuple(kinds.index(kind) for kind in kinds)
    _RECENT.append((model, seq_len, cluster, software, Known(numbers)))
    return _RECENT[-1][-1]
