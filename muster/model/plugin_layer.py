"""Layers of a plugin's model: construction, and their parameters and operations, found without allocating memory."""

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from muster.layout.tensor_layout import tp_shard
from muster.model.dtypes import DTYPES
from muster.model.positions import PositionState
from muster.plugins.loader import error_location
from muster.spec.errors import ConfigError
from muster.spec.model import ModelSpec
from muster.spec.plugin_model import LayerTrace, MatmulShape, NamedShape, PluginModel

PROJECT_IN = ("project_in", "spread")
"""Attributes of a module through which the hidden state enters its linear layers; the second name is that of plugins
written for version 0.1."""
PROJECT_OUT = ("project_out", "join")
"""Attributes through which a linear layer's output returns to the hidden state; the second name as in `PROJECT_IN`."""


def make_plugin_layer(plugin: PluginModel, spec: ModelSpec, layer: int) -> nn.Module:
    """Build one layer on torch's current device. Raises ConfigError, with file and line, if that fails."""
    try:
        made = plugin.layer_class(spec, layer)
    except Exception as error:
        raise _failed(plugin, "can't be made", error) from error
    if not isinstance(made, nn.Module):
        raise ConfigError(
            f"model {plugin.name}: expected layers that are a torch.nn.Module, got a {type(made).__name__}"
        )
    return made


def parameter_shapes(plugin: PluginModel, spec: ModelSpec) -> tuple[NamedShape, ...]:
    """Return the parameters of each layer. Raises ConfigError if layers differ, or hold state that checkpoints
    don't."""
    with torch.device("meta"):
        first, last = (make_plugin_layer(plugin, spec, layer) for layer in (0, spec.num_layers - 1))
    shapes, others = (tuple((n, tuple(p.shape)) for n, p in one.named_parameters()) for one in (first, last))
    if not shapes or shapes != others:
        problem = "have other parameters than the first" if shapes else "have no parameters"
        raise ConfigError(f"model {plugin.name}: its layers {problem}; expected the same parameters in all")
    if buffers := [name for name, _ in first.named_buffers()]:
        raise ConfigError(
            f"model {plugin.name}: its layer has the buffer {buffers[0]}, which checkpoints don't hold: make it a"
            " parameter, or compute it in forward"
        )
    return shapes


def trace_layer(plugin: PluginModel, spec: ModelSpec, seq_len: int, tp: int, precision: str) -> LayerTrace:
    """Trace the forward of one sequence. Raises ConfigError if it can't run on tensors without memory."""
    dtype = DTYPES.get(precision, torch.bfloat16)
    with FakeTensorMode():
        layer = make_plugin_layer(plugin, spec, 0)
        _shard_weights(layer, spec, tp, dtype)
        calls = _count_projections(layer)
        x_BSD = torch.empty(1, seq_len, spec.hidden_size, dtype=dtype, requires_grad=True)
        where = PositionState(spec)
        window = getattr(getattr(layer, "attn", None), "window", None)
        shared = *where.rotary_cos_sin(x_BSD), where.mask(window, x_BSD)
        given = [*layer.parameters(), *(one for one in shared if one is not None)]
        tracer = _OpTracer({_storage(one) for one in given})
        try:
            with torch.autograd.graph.saved_tensors_hooks(tracer.save, lambda kept: kept), tracer:
                y_BSD = layer(x_BSD, *shared)
        except Exception as error:
            raise _failed(plugin, "can't be traced on tensors without memory", error) from error
    if not isinstance(y_BSD, Tensor) or y_BSD.shape != x_BSD.shape or y_BSD.dtype != dtype:
        got = f"{tuple(y_BSD.shape)}, {y_BSD.dtype}" if isinstance(y_BSD, Tensor) else type(y_BSD).__name__
        raise ConfigError(
            f"model {plugin.name}: its layer returns {got} for a hidden state {tuple(x_BSD.shape)}, {dtype}:"
            " expected the same shape and dtype"
        )
    return LayerTrace(
        tuple(tracer.matmuls),
        tracer.attention_flops,
        tracer.streamed_bytes,
        tracer.kernels,
        sum(tracer.saved_bytes.values()),
        tracer.largest_bytes,
        sum(calls[name] for name in PROJECT_IN),
    )


class _OpTracer(TorchDispatchMode):
    """Records the kernels that run in its context, and the tensors that autograd saves."""

    def __init__(self, given: set[int]) -> None:
        super().__init__()
        self._given = given
        """Storages of parameters and of constants that all layers share."""
        self.matmuls: list[MatmulShape] = []
        self.saved_bytes: dict[int, int] = {}
        self.attention_flops = self.streamed_bytes = self.kernels = self.largest_bytes = 0

    def save(self, tensor: Tensor) -> Tensor:
        if (place := _storage(tensor)) not in self._given:
            self.saved_bytes[place] = tensor.untyped_storage().nbytes()
        return tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if func.namespace != "aten" or func.is_view or name.startswith(("empty", "new_empty", "detach")):
            return result
        tensors = [item for item in args if isinstance(item, Tensor)]
        if name in ("mm", "bmm", "addmm", "baddbmm"):
            self._multiply(*tensors[-2:])
        elif name.startswith("_scaled_dot_product"):
            query, key, value = tensors[:3]
            width = query.shape[-1] + value.shape[-1]
            self.attention_flops += 2 * query.shape[:-1].numel() * key.shape[-2] * width
        else:
            outputs = result if isinstance(result, tuple | list) else (result,)
            self.streamed_bytes += sum(item.nbytes for item in [*tensors, *outputs] if isinstance(item, Tensor))
            self.kernels += 1
        for item in result if isinstance(result, tuple | list) else (result,):
            if isinstance(item, Tensor):
                self.largest_bytes = max(self.largest_bytes, item.nbytes)
        return result

    def _multiply(self, left: Tensor, right: Tensor) -> None:
        has_weight = bool({_storage(left), _storage(right)} & self._given)
        batch = left.shape[0] if left.ndim == 3 else 1
        self.matmuls.append(MatmulShape(left.shape[-2], right.shape[-1], left.shape[-1], batch, has_weight))


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _shard_weights(layer: nn.Module, spec: ModelSpec, tp: int, dtype: torch.dtype) -> None:
    """Give a layer the weight shapes of the first of `tp` tensor-parallel ranks."""
    for name, parameter in list(layer.named_parameters()):
        box, *_ = tp_shard(spec, f"layers.0.{name}", tuple(parameter.shape), tp, 0)
        owner, _, leaf = name.rpartition(".")
        setattr(layer.get_submodule(owner), leaf, nn.Parameter(parameter.new_empty(box.size, dtype=dtype)))


def _count_projections(layer: nn.Module) -> Counter[str]:
    """Count the calls of the layer's input and output projections."""
    counts: Counter[str] = Counter()

    def counted(name: str, do: Any, *args: Any) -> Any:
        counts[name] += 1
        return do(*args)

    for part in layer.modules():
        for name in (*PROJECT_IN, *PROJECT_OUT):
            if hasattr(part, name):
                setattr(part, name, partial(counted, name, getattr(part, name)))
    return counts


def _failed(plugin: PluginModel, problem: str, error: Exception) -> ConfigError:
    code = getattr(getattr(plugin.layer_class, "forward", None), "__code__", None)
    where = error_location(Path(code.co_filename), error) if code is not None else plugin.name
    return ConfigError(f"model {plugin.name}: its layer {problem}: {where}: {type(error).__name__}: {error}")
