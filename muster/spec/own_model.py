"""A model that a plugin registers: what must be known of its layers to spread, store and forecast them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from muster.spec.parts import part_of

if TYPE_CHECKING:
    from muster.spec.model import ModelSpec

Shape = tuple[str, tuple[int, ...]]
"""A parameter's name within its layer, and its shape."""


@dataclass(frozen=True, slots=True)
class Product:
    """`batch` matrix products of m × k by k × n."""

    m: int
    n: int
    k: int
    batch: int
    has_weight: bool
    """Whether one side is a parameter, so that of its two products in the backward one makes a weight's gradient."""


@dataclass(frozen=True, slots=True)
class LayerFacts:
    """Of a forward of one sequence through one layer on one rank, as counted on tensors without memory."""

    products: tuple[Product, ...]
    attention_flops: int
    """Of fused attention, all scores counted."""
    streamed_bytes: int
    """Read and written by all other kernels."""
    kernels: int
    """Their number."""
    kept_bytes: int
    """What autograd keeps for the backward, parameters left out."""
    largest_bytes: int
    """The largest tensor that is made on the way."""
    spreads: int
    """How often a hidden state comes to column-parallel products, and leaves row-parallel ones."""

    @property
    def flops(self) -> int:
        return self.attention_flops + sum(2 * one.m * one.n * one.k * one.batch for one in self.products)


@dataclass(frozen=True, eq=False)
class OwnModel:
    """What was registered."""

    name: str
    layer: Any
    """The class of its layers."""
    values: Mapping[str, Any]
    """What a ModelSpec of that name has, beside what a run file says."""
    tensor_parallel: bool
    documents: bool
    count_shapes: Callable[["OwnModel", "ModelSpec"], tuple[Shape, ...]]
    count_facts: Callable[["OwnModel", "ModelSpec", int, int, str], LayerFacts]
    known: dict[Any, Any] = field(default_factory=dict)

    def shapes(self, spec: "ModelSpec") -> tuple[Shape, ...]:
        """The parameters of each layer, in order. Raises ConfigError where the layer can't be one."""
        if spec not in self.known:
            self.known[spec] = self.count_shapes(self, spec)
        return self.known[spec]

    def facts(self, spec: "ModelSpec", seq_len: int, tp: int, precision: str) -> LayerFacts:
        """Of a sequence of `seq_len` tokens, where weights are cut over `tp` ranks. Raises ConfigError where its
        forward can't be followed."""
        key = spec, seq_len, tp, precision
        if key not in self.known:
            self.known[key] = self.count_facts(self, spec, seq_len, tp, precision)
        return self.known[key]


def own_model(spec: "ModelSpec") -> OwnModel | None:
    """What a plugin registered for the layers of a model; None for Muster's decoder. Raises ConfigError where no plugin
    did."""
    return None if spec.architecture is None else part_of("model", spec.architecture)
