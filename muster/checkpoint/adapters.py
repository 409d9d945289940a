"""Adapters of stored models: weights without them, and weights that they are merged into."""

from dataclasses import replace

import torch
from torch import Tensor

from muster.checkpoint.four_bit import DequantizedTensors, FourBitTensors
from muster.checkpoint.low_rank import DecomposedTensors, ProductTensors, factorized
from muster.checkpoint.model_directory import ModelDirectory, held_weights, model_weights
from muster.checkpoint.remapped import JoinedTensors
from muster.checkpoint.tensors import TensorMeta, TensorSource
from muster.layout.tensor_layout import Box
from muster.spec.adapters import MAGNITUDE, AdapterSpec, adapted_module, is_adapter
from muster.spec.model import ModelSpec, parameter_shapes


def merged_model(spec: ModelSpec) -> ModelSpec:
    """Return the model without adapters and low-rank layers."""
    return spec.model_copy(update={"adapter": None, "low_rank": None})


def merged_weights(directory: ModelDirectory) -> TensorSource:
    """Return the parameters of a model that does without adapters and low-rank layers what this one does with them.

    Raises as `model_weights` does.
    """
    weights, model = model_weights(directory), directory.model
    assert model is not None
    if model.low_rank is not None:
        return ProductTensors(weights)
    return weights if model.adapter is None else MergedTensors(weights, model.adapter)


def weights_for(directory: ModelDirectory, spec: ModelSpec) -> TensorSource:
    """Return the parameters of a directory as a run with the model `spec` begins with them: with the directory's
    adapters where they are the run's, else merged; new adapters aren't among them. Weights that the run holds in 4 bits
    come by their parts, unchanged where the directory has them. The factors of low-rank layers are the directory's
    where their ranks are the run's, else made of whole weights.

    Raises as `model_weights` does.
    """
    model = merged_model(spec) if directory.model is None else directory.model
    adapter, stored = spec.adapter, model.adapter
    found = replace(directory, model=spec.model_copy(update={"adapter": stored, "low_rank": model.low_rank}))
    if spec.low_rank is not None:
        goes_on = model.low_rank_ranks == spec.low_rank_ranks
        return model_weights(found) if goes_on and stored is None else factorized(merged_weights(found), spec)
    if adapter is None or model.low_rank is not None:
        return merged_weights(found)
    goes_on = stored is not None and stored.is_continued_by(adapter)
    if goes_on and stored is not None and stored.load_in_4bit and adapter.load_in_4bit:
        return held_weights(found)
    weights = model_weights(found) if goes_on else merged_weights(found)
    if not goes_on and adapter.kind in ("pissa", "hd_pissa"):
        weights = pissa_weights(weights, spec)
    held = FourBitTensors(weights, spec) if adapter.load_in_4bit else weights
    if not goes_on and adapter.kind == "dora":
        return JoinedTensors((held, RowLengths(DequantizedTensors(held, spec), spec)))
    return held


class RowLengths:
    """DoRA's magnitudes of weights, which begin as the lengths of their rows (a `TensorSource`)."""

    def __init__(self, weights: TensorSource, spec: ModelSpec) -> None:
        self._weights = weights
        self._modules = {n: adapted_module(n)[0] for n, _ in parameter_shapes(spec) if f".{MAGNITUDE}." in n}
        stored = {name: weights.metas[f"{module}.weight"] for name, module in self._modules.items()}
        self.metas: dict[str, TensorMeta] = {
            name: TensorMeta(meta.shape[:1], meta.dtype) for name, meta in stored.items()
        }

    def read(self, name: str, box: Box) -> Tensor:
        weight = f"{self._modules[name]}.weight"
        return _row_lengths(self._weights.read(weight, _whole_rows(self._weights.metas[weight], box)))


def _whole_rows(meta: TensorMeta, box: Box) -> Box:
    """Return the box of all columns of a matrix in the rows of a box."""
    return Box((box.start[0], 0), (box.size[0], meta.shape[1]))


def _row_lengths(rows: Tensor) -> Tensor:
    return rows.to(torch.promote_types(rows.dtype, torch.float32)).norm(dim=1).to(rows.dtype)


def pissa_weights(weights: TensorSource, spec: ModelSpec) -> TensorSource:
    """Return weights of which adapters take over the largest singular values: with U S Vᵀ these of W, scaling · B A
    begins as U S Vᵀ, evenly divided between B = U √(S / scaling) and A = √(S / scaling) Vᵀ, and what is left is frozen
    (F. Meng et al., PiSSA, arXiv:2404.02948 §3). HD-PiSSA leaves W whole."""
    adapter = spec.adapter
    assert adapter is not None
    adapters = {name: shape for name, shape in parameter_shapes(spec) if is_adapter(name)}
    modules = {adapted_module(name)[0] for name in adapters}
    wide = {name: weights.metas[f"{adapted_module(name)[0]}.weight"].dtype for name in adapters}
    metas = {**weights.metas, **{name: TensorMeta(shape, wide[name]) for name, shape in adapters.items()}}

    def module_of(name: str) -> tuple[str, str] | None:
        found = adapted_module(name) if is_adapter(name) else (name.removesuffix(".weight"), "weight")
        return found if found[0] in modules else None

    def decompose(_: str, weight: Tensor) -> dict[str, Tensor]:
        left, values, right = torch.linalg.svd(weight, full_matrices=False)
        r = adapter.width
        root = (values[:r] / adapter.scaling).sqrt()
        a, b = root.unsqueeze(1) * right[:r], left[:, :r] * root
        if not adapter.changes_weights:
            weight = torch.addmm(weight, b, a, alpha=-adapter.scaling)
        return {"lora_A": a, "lora_B": b, "weight": weight}

    return DecomposedTensors(weights, metas, module_of, decompose)


class MergedTensors:
    """Weights with the products of their adapters' matrices added (a `TensorSource`), computed in float32 at least."""

    def __init__(self, weights: TensorSource, adapter: AdapterSpec) -> None:
        self._weights, self._scaling, self._are_merged = weights, adapter.scaling, adapter.changes_weights
        self.metas: dict[str, TensorMeta] = {name: meta for name, meta in weights.metas.items() if not is_adapter(name)}

    def read(self, name: str, box: Box) -> Tensor:
        weight, module = self._weights.read(name, box), name.removesuffix(".weight")
        has_adapter = name.endswith(".weight") and f"{module}.lora_A.weight" in self._weights.metas
        if not has_adapter or self._are_merged:
            return weight
        (r, _), wide = (
            self._weights.metas[f"{module}.lora_A.weight"].shape,
            torch.promote_types(weight.dtype, torch.float32),
        )
        (row, column), (rows, columns) = box.start, box.size
        if f"{module}.{MAGNITUDE}.weight" in self._weights.metas:
            return self._scaled_rows(module, box, wide).to(weight.dtype)
        a = self._weights.read(f"{module}.lora_A.weight", Box((0, column), (r, columns))).to(wide)
        b = self._weights.read(f"{module}.lora_B.weight", Box((row, 0), (rows, r))).to(wide)
        return torch.addmm(weight.to(wide), b, a, alpha=self._scaling).to(weight.dtype)

    def _scaled_rows(self, module: str, box: Box, wide: torch.dtype) -> Tensor:
        """Return a part of a matrix whose rows DoRA scales to its magnitudes, which takes all of these rows."""
        metas = self._weights.metas
        rows = self._weights.read(f"{module}.weight", _whole_rows(metas[f"{module}.weight"], box)).to(wide)
        a = self._weights.read(f"{module}.lora_A.weight", metas[f"{module}.lora_A.weight"].whole).to(wide)
        r = a.shape[0]
        b = self._weights.read(f"{module}.lora_B.weight", Box((box.start[0], 0), (box.size[0], r))).to(wide)
        lengths = self._weights.read(f"{module}.{MAGNITUDE}.weight", Box(box.start[:1], box.size[:1])).to(wide)
        rows = torch.addmm(rows, b, a, alpha=self._scaling)
        rows *= (lengths / rows.norm(dim=1)).unsqueeze(1)
        return rows[:, box.start[1] : box.start[1] + box.size[1]].contiguous()
