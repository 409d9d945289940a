"""Low-rank layers of stored models: factors of whole weights, and products of factors."""

from collections.abc import Callable

import torch
from torch import Tensor

from muster.checkpoint.tensors import TensorMeta, TensorSource
from muster.layout.tensor_layout import Box
from muster.spec.low_rank import is_low_rank, low_rank_module
from muster.spec.model import ModelSpec, parameter_shapes


class DecomposedTensors:
    """Weights, some of which come as parts that follow from a whole matrix (a `TensorSource`).

    A matrix is read and decomposed whole, in float32 at least; all ranks find the same.
    """

    def __init__(
        self,
        weights: TensorSource,
        metas: dict[str, TensorMeta],
        module_of: Callable[[str], tuple[str, str] | None],
        decompose: Callable[[str, Tensor], dict[str, Tensor]],
    ) -> None:
        """`module_of` gives the linear layer and the part that a name stands for, None for what stays as it is;
        `decompose` the parts of a layer's weight."""
        self._weights, self._module_of, self._decompose = weights, module_of, decompose
        self.metas = metas
        self._last: tuple[str, dict[str, Tensor]] = ("", {})

    def read(self, name: str, box: Box) -> Tensor:
        found = self._module_of(name)
        if found is None:
            return self._weights.read(name, box)
        module, place = found
        if self._last[0] != module:
            meta = self._weights.metas[f"{module}.weight"]
            weight = self._weights.read(f"{module}.weight", meta.whole).to(
                torch.promote_types(meta.dtype, torch.float32)
            )
            self._last = module, self._decompose(module, weight)
        return self._last[1][place][box.slices].to(self.metas[name].dtype).clone()


def factorized(weights: TensorSource, spec: ModelSpec) -> TensorSource:
    """Return the parameters of a model with low-rank layers, made of whole weights: with U S Vᵀ the largest singular
    values of W, B = U √S and A = √S Vᵀ, whose product is the nearest of its rank (C. Eckart and G. Young, 1936). Those
    of solver random aren't among them."""
    assert spec.low_rank is not None
    shapes = dict(parameter_shapes(spec))
    factors = {name: shape for name, shape in shapes.items() if is_low_rank(name)}
    metas = {name: meta for name, meta in weights.metas.items() if name in shapes}
    if spec.low_rank.solver == "svd":
        wide = {name: weights.metas[f"{low_rank_module(name)[0]}.weight"].dtype for name in factors}
        metas |= {name: TensorMeta(shape, wide[name]) for name, shape in factors.items()}

    def decompose(module: str, weight: Tensor) -> dict[str, Tensor]:
        left, values, right = torch.linalg.svd(weight, full_matrices=False)
        r = factors[f"{module}.low_rank_A.weight"][0]
        root = values[:r].sqrt()
        return {"low_rank_A": root.unsqueeze(1) * right[:r], "low_rank_B": left[:, :r] * root}

    return DecomposedTensors(
        weights, metas, lambda name: low_rank_module(name) if is_low_rank(name) else None, decompose
    )


class ProductTensors:
    """Weights with whole matrices in the place of low-rank factors (a `TensorSource`), multiplied in float32 at
    least."""

    def __init__(self, weights: TensorSource) -> None:
        self._weights = weights
        self.metas: dict[str, TensorMeta] = {}
        for name, meta in weights.metas.items():
            if not is_low_rank(name):
                self.metas[name] = meta
            elif name.endswith("_A.weight"):
                module, _ = low_rank_module(name)
                outputs = weights.metas[f"{module}.low_rank_B.weight"].shape[0]
                self.metas[f"{module}.weight"] = TensorMeta((outputs, meta.shape[1]), meta.dtype)

    def read(self, name: str, box: Box) -> Tensor:
        if name in self._weights.metas:
            return self._weights.read(name, box)
        module = name.removesuffix(".weight")
        (r, _), dtype = self._weights.metas[f"{module}.low_rank_A.weight"].shape, self.metas[name].dtype
        (row, column), (rows, columns) = box.start, box.size
        wide = torch.promote_types(dtype, torch.float32)
        a = self._weights.read(f"{module}.low_rank_A.weight", Box((0, column), (r, columns))).to(wide)
        b = self._weights.read(f"{module}.low_rank_B.weight", Box((row, 0), (rows, r))).to(wide)
        return (b @ a).to(dtype)
