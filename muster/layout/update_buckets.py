"""Buckets of a stage's parameters, each of which is gathered as one."""

from collections.abc import Mapping
from math import prod

from muster.layout.host_updates import layer_of
from muster.layout.tensor_layout import computed_layers, stage_shards
from muster.spec.model import ModelSpec
from muster.spec.plan import Plan


def update_buckets(plan: Plan, spec: ModelSpec, stage: int) -> list[range]:
    """Return the layers of each bucket, as places among those of the stage, in the order in which a forward uses them:
    first that of the parameters outside of layers, which has none."""
    count, size = len(computed_layers(spec, plan, stage)), plan.bucket_layers
    return [range(0), *(range(start, min(start + size, count)) for start in range(0, count, size))]


def bucket_of(plan: Plan, spec: ModelSpec, stage: int, name: str) -> int:
    """Return the bucket of a parameter."""
    layer, first = layer_of(name), plan.layers(stage, spec.num_layers).start
    return 0 if layer is None else 1 + (layer - first) // plan.bucket_layers


def bucket_shares(plan: Plan, spec: ModelSpec) -> Mapping[int, tuple[float, ...]]:
    """Return stage → share of its parameters' elements that each bucket has."""
    found = {}
    for stage in range(plan.num_stages):
        numels = [0] * len(update_buckets(plan, spec, stage))
        for name, _, part, *_ in stage_shards(spec, plan, stage):
            numels[bucket_of(plan, spec, stage, name)] += prod(part.size)
        found[stage] = tuple(numel / max(1, sum(numels)) for numel in numels)
    return found
