"""Models registered by plugins: the facts about their layers that distribution, storage and forecasts need."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from muster.spec.errors import ConfigError
from muster.spec.suggest import did_you_mean

if TYPE_CHECKING:
    from muster.spec.model import ModelSpec

NamedShape = tuple[str, tuple[int, ...]]
"""Name of a parameter within its layer, and its shape."""


@dataclass(frozen=True, slots=True)
class MatmulShape:
    """`batch` matmuls of m × k by k × n."""

    m: int
    n: int
    k: int
    batch: int
    has_weight: bool
    """One operand is a parameter, so that one of its two backward matmuls makes a weight gradient."""


@dataclass(frozen=True, slots=True)
class LayerTrace:
    """Costs of a forward of one sequence through one layer on one rank, traced on meta tensors."""

    matmuls: tuple[MatmulShape, ...]
    attention_flops: int
    """FLOPs of fused attention, all scores counted."""
    streamed_bytes: int
    """Bytes read and written by all other kernels."""
    num_kernels: int
    """Number of those kernels."""
    saved_activation_bytes: int
    """Bytes that autograd saves for the backward, parameters excluded."""
    largest_tensor_bytes: int
    """Largest intermediate tensor."""
    num_tp_regions: int
    """Number of column-parallel regions that a hidden state enters, and of row-parallel ones that it leaves."""

    @property
    def flops(self) -> int:
        return self.attention_flops + sum(2 * one.m * one.n * one.k * one.batch for one in self.matmuls)


@dataclass(frozen=True, eq=False)
class PluginModel:
    """A model that a plugin registered."""

    name: str
    layer_class: Any
    """Class of its layers."""
    spec_values: Mapping[str, Any]
    """ModelSpec fields of that model, below those of a run file."""
    tensor_parallel: bool
    document_mask: bool
    trace_shapes: Callable[["PluginModel", "ModelSpec"], tuple[NamedShape, ...]]
    trace_layer: Callable[["PluginModel", "ModelSpec", int, int, str], LayerTrace]
    cache: dict[Any, Any] = field(default_factory=dict)

    def parameter_shapes(self, spec: "ModelSpec") -> tuple[NamedShape, ...]:
        """Return the parameters of each layer, in order. Raises ConfigError where the class can't serve as a layer."""
        if spec not in self.cache:
            self.cache[spec] = self.trace_shapes(self, spec)
        return self.cache[spec]

    def layer_trace(self, spec: "ModelSpec", seq_len: int, tp: int, precision: str) -> LayerTrace:
        """Return the costs for a sequence of `seq_len` tokens, with weights sharded over `tp` ranks. Raises ConfigError
        where the forward can't be traced."""
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
