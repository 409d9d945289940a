"""Parts in which the host updates the parameters of a stage, whose optimizer state it keeps."""

from collections.abc import Iterable

from muster.spec.model import ModelSpec
from muster.spec.plan import Plan


def layer_of(name: str) -> int | None:
    """Return the layer of a parameter; None for those outside layers."""
    head, _, rest = name.partition(".")
    return int(rest.partition(".")[0]) if head == "layers" else None


def host_update_parts(plan: Plan, spec: ModelSpec, stage: int, names: Iterable[str]) -> list[list[str]]:
    """Return the names of a stage's parameters that the host updates, part by part: one for each layer whose state it
    keeps, and a last one for parameters outside layers (`Plan.num_host_updates` of them)."""
    if not plan.num_host_updates(stage, spec.num_layers):
        return []
    layers = [layer for layer in plan.layers(stage, spec.num_layers) if plan.offloads_optimizer(layer)]
    parts: dict[int | None, list[str]] = {layer: [] for layer in layers}
    if plan.num_host_updates(stage, spec.num_layers) > len(layers):
        parts[None] = []
    for name in names:
        if (layer := layer_of(name)) in parts:
            parts[layer].append(name)
    return list(parts.values())
