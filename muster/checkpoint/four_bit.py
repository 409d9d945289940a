"""Weights of linear layers in 4 bits, made of stored ones, and the numbers that they stand for."""

import torch
from torch import Tensor

from muster.checkpoint.tensors import TensorMeta, TensorSource
from muster.layout.tensor_layout import Box
from muster.model.four_bit import dequantize, quantize
from muster.spec.four_bit import NESTED, four_bit_parts, has_four_bits, is_four_bit_part, weight_of_part
from muster.spec.model import ModelSpec, parameter_shapes


class FourBitTensors:
    """Weights of which a run holds some in 4 bits (a `TensorSource`). A matrix is read and quantized whole; all
    ranks find the same."""

    def __init__(self, weights: TensorSource, spec: ModelSpec) -> None:
        self._weights = weights
        self.metas: dict[str, TensorMeta] = {}
        for name, meta in weights.metas.items():
            if has_four_bits(spec, name):
                for part, shape in four_bit_parts(name, meta.shape):
                    self.metas[part] = TensorMeta(shape, torch.int32 if part.endswith(NESTED) else torch.uint8)
            else:
                self.metas[name] = meta
        self._last: tuple[str, dict[str, Tensor]] = ("", {})

    def read(self, name: str, box: Box) -> Tensor:
        if not is_four_bit_part(name):
            return self._weights.read(name, box)
        if self._last[0] != (weight := weight_of_part(name)):
            meta = self._weights.metas[weight]
            parts = (part for part, _ in four_bit_parts(weight, meta.shape))
            found = quantize(self._weights.read(weight, meta.whole))
            self._last = weight, dict(zip(parts, found, strict=True))
        return self._last[1][name][box.slices].clone()


class DequantizedTensors:
    """Parameters of a model, in float32 those that `weights` has in 4 bits (a `TensorSource`)."""

    def __init__(self, weights: TensorSource, spec: ModelSpec) -> None:
        self._weights = weights
        self._parts = {
            name: [part for part, _ in four_bit_parts(name, shape)]
            for name, shape in parameter_shapes(spec)
            if has_four_bits(spec, name)
        }
        shapes = {name: shape for name, shape in parameter_shapes(spec) if name in self._parts}
        kept = {name: meta for name, meta in weights.metas.items() if not is_four_bit_part(name)}
        self.metas: dict[str, TensorMeta] = {
            **kept,
            **{name: TensorMeta(shape, torch.float32) for name, shape in shapes.items()},
        }
        self._last: tuple[str, Tensor] = ("", torch.empty(0))

    def read(self, name: str, box: Box) -> Tensor:
        if name not in self._parts:
            return self._weights.read(name, box)
        if self._last[0] != name:
            parts = (self._weights.read(part, self._weights.metas[part].whole) for part in self._parts[name])
            self._last = name, dequantize(*parts)
        return self._last[1][box.slices].clone()
