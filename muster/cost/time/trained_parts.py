"""Parts of a stage that its backwards compute gradients of, where parameters are frozen (`optim.freeze`).

A frozen matrix has no weight gradient. Below the lowest trained layer, with the embedding frozen too, nothing needs a
gradient, so that there is no backward at all.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from muster.config.freezing import frozen_prefix, matches_pattern
from muster.config.optim_config import OptimConfig
from muster.spec.model import ModelSpec, layer_parameter_shapes, stage_parameter_shapes
from muster.spec.plan import Plan


@dataclass(frozen=True, slots=True)
class TrainedParts:
    """Trained parts of one stage."""

    layers: tuple[tuple[bool, float], ...]
    """For each layer whether it has a backward, and the share of its matrices' elements that are trained."""
    embedding: bool
    """True if the embedding is trained."""
    head: bool
    """True if the head is trained."""
    head_input: bool
    """True if the gradient of the head's input is needed."""
    gradient_share: float
    """Share of the elements of all parameters that have gradients."""
    layers_share: float
    """The same of the layers' parameters."""
    ends_share: float
    """The same of all others."""

    @property
    def backward_share(self) -> float:
        """Share of the layers that have a backward."""
        return sum(has for has, _ in self.layers) / max(1, len(self.layers))


def trained_parts(optim: OptimConfig | None, spec: ModelSpec, plan: Plan, stage: int) -> TrainedParts | None:
    """Return the trained parts of a stage; None where nothing is frozen."""
    if optim is None or not optim.freeze:
        return None
    layers = plan.layers(stage, spec.num_layers)
    return trained_parts_of(optim.freeze, spec, layers, plan.is_first(stage), plan.is_last(stage))


@lru_cache(maxsize=4096)
def trained_parts_of(
    patterns: tuple[str, ...], spec: ModelSpec, layers: range, first: bool, last: bool
) -> TrainedParts:
    """Return the trained parts of a run of layers where these patterns freeze parameters."""
    own = list(stage_parameter_shapes(spec, layers, first, last))
    head = "embed.weight" if spec.tied_embeddings else "head.weight"
    frozen_layers = frozen_prefix(patterns, spec)
    all_frozen_below = frozen_layers >= spec.num_layers
    return TrainedParts(
        layers=tuple((layer >= frozen_layers, _trained_share(patterns, _matrices(spec, layer))) for layer in layers),
        embedding=not matches_pattern(patterns, "embed.weight"),
        head=not matches_pattern(patterns, head),
        head_input=not (all_frozen_below and matches_pattern(patterns, "norm.weight")),
        gradient_share=_trained_share(patterns, own),
        layers_share=_trained_share(patterns, stage_parameter_shapes(spec, layers, False, False)),
        ends_share=_trained_share(patterns, stage_parameter_shapes(spec, range(0), first, last)),
    )


def _matrices(spec: ModelSpec, layer: int) -> Iterable[tuple[str, tuple[int, ...]]]:
    return ((name, shape) for name, shape in layer_parameter_shapes(spec, layer) if len(shape) > 1)


def _trained_share(patterns: tuple[str, ...], shapes: Iterable[tuple[str, tuple[int, ...]]]) -> float:
    sizes = [(prod(shape), not matches_pattern(patterns, name)) for name, shape in shapes]
    return sum(size for size, trained in sizes if trained) / max(1, sum(size for size, _ in sizes))
