"""A model that a plugin registers: what must be known of its layers to spread, store and forecast them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from muster.spec.errors import ConfigError
from muster.spec.suggest import did_you_mean

if TYPE_CHECKING:
    from muster.spec.model import ModelSpec

NamedShape = tuple[str, tuple[int, ...]]
"""A parameter's name within its layer, and its shape."""


@dataclass(frozen=True, slots=True)
class MatmulShape:
    """`batch` matrix products of m × k by k × n."""

    m: int
    n: int
    k: int
    batch: int
    has_weight: bool
    """Whether one side is a parameter, so that of its two products in the backward one makes a weight's gradient."""


@dataclass(frozen=True, slots=True)
class LayerTrace:
    """Of a forward of one sequence through one layer on one rank, as counted on tensors without memory."""

    matmuls: tuple[MatmulShape, ...]
    attention_flops: int
    """Of fused attention, all scores counted."""
    streamed_bytes: int
    """Read and written by all other kernels."""
    num_kernels: int
    """Their number."""
    saved_activation_bytes: int
    """What autograd keeps for the backward, parameters left out."""
    largest_tensor_bytes: int
    """The largest tensor that is made on the way."""
    num_tp_regions: int
    """How often a hidden state comes to column-parallel products, and leaves row-parallel ones."""

    @property
    def flops(self) -> int:
        return self.attention_flops + sum(2 * one.m * one.n * one.k * one.batch for one in self.matmuls)


@dataclass(frozen=True, eq=False)
class PluginModel:
    """What was registered."""

    name: str
    layer_class: Any
    """The class of its layers."""
    spec_values: Mapping[str, Any]
    """What a ModelSpec of that name has, beside what a run file says."""
    tensor_parallel: bool
    document_mask: bool
    trace_shapes: Callable[["PluginModel", "ModelSpec"], tuple[NamedShape, ...]]
    trace_layer: Callable[["PluginModel", "ModelSpec", int, int, str], LayerTrace]
    cache: dict[Any, Any] = field(default_factory=dict)

    def parameter_shapes(self, spec: "ModelSpec") -> tuple[NamedShape, ...]:
        """The parameters of each layer, in order. Raises ConfigError where the layer can't be one."""
        if spec not in self.cache:
            self.cache[spec] = self.trace_shapes(self, spec)
        return self.cache[spec]

    def layer_trace(self, spec: "ModelSpec", seq_len: int, tp: int, precision: str) -> LayerTrace:
        """Of a sequence of `seq_len` tokens, where weights are cut over `tp` ranks. Raises ConfigError where its
        forward can't be followed."""
        key = spec, seq_len, tp, precision
        if key not in self.cache:
            self.cache[key] = self.trace_layer(self, spec, seq_len, tp, precision)
        return self.cache[key]


PLUGIN_MODELS: dict[str, PluginModel] = {}
"""Models that plugins have registered, by name; `muster.plugins.registry` fills it."""


def plugin_model(spec: "ModelSpec") -> PluginModel | None:
    """Return the plugin's model that a spec's layers are of; None for Muster's decoder.

    Raises ConfigError where no plugin has registered it.
    """
    name = spec.architecture
    if name is None or name in PLUGIN_MODELS:
        return None if name is None else PLUGIN_MODELS[name]
    known = f"there are {', '.join(PLUGIN_MODELS)}" if PLUGIN_MODELS else "none is registered"
    hint = did_you_mean(name, PLUGIN_MODELS)
    raise ConfigError(f"there is no model '{name}'{hint} ({known}: add the file that registers it to plugins)")
