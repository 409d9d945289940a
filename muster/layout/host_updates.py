"""Parts in which the host updates the parameters of a stage, whose optimizer state it keeps."""

from collections.abc import Iterable, Sequence
from math import prod

from muster.spec.device_update_rules import updates_fetched_state
from muster.spec.layer_strategy import is_updated_on_device
from muster.spec.model import ModelSpec, parameter_shapes
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


def device_updates(plan: Plan, num_layers: int, stage: int) -> tuple[bool, ...]:
    """Return for each of these parts whether the device updates it, with state that comes from host memory; empty where
    the plan has no such updates."""
    if not updates_fetched_state(plan):
        return ()
    parts = plan.host_updated_layers(stage, num_layers)
    return tuple(layer is not None and is_updated_on_device(layer, plan.strategy(layer)) for layer in parts)


def relative_part_sizes(plan: Plan, spec: ModelSpec, stage: int) -> tuple[float, ...]:
    """Return the elements of each of these parts as a multiple of the mean of those that the same processor updates,
    the host or the device; empty where the host updates all."""
    on_device = device_updates(plan, spec.num_layers, stage)
    if not on_device:
        return ()
    names = [name for name, _ in parameter_shapes(spec)]
    if not plan.vocab_parallel:
        ends = {"embed": plan.is_first(stage), "other": plan.is_last(stage)}
        names = [n for n in names if layer_of(n) is not None or ends["embed" if n.startswith("embed.") else "other"]]
    shapes = dict(parameter_shapes(spec))
    sizes = [sum(prod(shapes[name]) for name in part) for part in host_update_parts(plan, spec, stage, names)]
    means = {
        here: _mean([size for size, own in zip(sizes, on_device, strict=True) if own is here]) for here in (True, False)
    }
    return tuple(size / means[here] for size, here in zip(sizes, on_device, strict=True))


def part_sizes_of(spec: ModelSpec, plan: Plan) -> dict[int, tuple[float, ...]]:
    """Return stage → `relative_part_sizes`; empty where the host updates all."""
    found = {stage: relative_part_sizes(plan, spec, stage) for stage in range(plan.num_stages)}
    return {stage: sizes for stage, sizes in found.items() if sizes}


def _mean(sizes: Sequence[int]) -> float:
    return sum(sizes) / max(1, len(sizes)) or 1.0
