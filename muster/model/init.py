"""Initial weights as a function of (seed, name) alone, so that every plan begins with the same values."""

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import torch
from torch import Tensor, nn

from muster.layout.tensor_layout import Box, TensorLayout
from muster.model.four_bit import dequantize, quantize
from muster.model.mersenne_twister import generators_at
from muster.spec.adapters import MAGNITUDE, adapted_module, is_adapter
from muster.spec.four_bit import four_bit_parts, has_four_bits, is_four_bit_part, weight_of_part
from muster.spec.low_rank import is_low_rank, low_rank_module
from muster.spec.model import ModelSpec, parameter_shapes

BLOCK = 16
"""Elements that PyTorch's CPU kernel draws together, from as many words of its generator (aten/src/ATen/native/cpu/
DistributionTemplates.h, `normal_fill`)."""
FEW_WORDS = 1 << 16
"""Words that are sooner drawn than jumped over."""
JUMPED_AT_ONCE = 64


_INTO_RESIDUAL = ("attn.o.weight", "mlp.down.weight", "mlp.experts.down.weight", "mlp.shared.down.weight")
"""Weights that write to the residual stream."""


def keyed_generator(seed: int, key: str) -> torch.Generator:
    """Return a CPU generator whose draws depend on (seed, key) alone, not on earlier draws."""
    digest = hashlib.sha256(f"{seed}/{key}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def draw(name: str, shape: tuple[int, ...], seed: int, std: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """Draw the whole tensor `name` from a normal distribution, in float32 whatever `dtype` is, so that all precisions
    agree."""
    values = torch.empty(shape, dtype=torch.float32, device="cpu")
    return values.normal_(0.0, std, generator=keyed_generator(seed, f"init/{name}")).to(dtype)


def initial_value(
    spec: ModelSpec, name: str, shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return the whole initial tensor of one parameter: ones for norms (zeros with `norm_unit_offset`), zeros for
    biases and for B of an adapter, uniform values up to 1 / √(input width) for its A (PEFT's), lengths of its
    layer's rows for its magnitudes, else normal.

    With `scaled_residual`, weights that write to the residual stream are scaled by 1 / sqrt(2 · layers), since that
    many terms add up there (GPT-2, section 2.3); with k sub-layers side by side by 1 / sqrt(2 · layers · k), as in the
    program of Kraken's authors. Both factors of a low-rank layer have the standard deviation that gives the elements of
    their product that of a whole weight.
    """
    if is_four_bit_part(name):
        return _initial_parts(spec, weight_of_part(name), seed)[name]
    if name.endswith("norm.weight"):
        return torch.full(shape, 0.0 if spec.norm_unit_offset else 1.0, dtype=dtype, device="cpu")
    if is_adapter(name) and name.endswith(".lora_A.weight"):
        bound = shape[1] ** -0.5
        values = torch.empty(shape, dtype=torch.float32, device="cpu")
        return values.uniform_(-bound, bound, generator=keyed_generator(seed, f"init/{name}")).to(dtype)
    if name.endswith(f".{MAGNITUDE}.weight"):
        weight = f"{adapted_module(name)[0]}.weight"
        value = initial_value(spec, weight, dict(parameter_shapes(spec))[weight], seed)
        value = dequantize(*quantize(value)) if has_four_bits(spec, weight) else value
        return value.norm(dim=1).to(dtype)
    if is_adapter(name) or name.endswith((".bias", ".expert_bias")):
        return torch.zeros(shape, dtype=dtype, device="cpu")
    return draw(name, shape, seed, _std(spec, name, shape), dtype)


@lru_cache(maxsize=1)
def _initial_parts(spec: ModelSpec, weight: str, seed: int) -> dict[str, Tensor]:
    """Return the parts of a weight in 4 bits by name; the parts of one are asked for one after another."""
    shape = dict(parameter_shapes(spec))[weight]
    names = (name for name, _ in four_bit_parts(weight, shape))
    return dict(zip(names, quantize(initial_value(spec, weight, shape, seed)), strict=True))


def _std(spec: ModelSpec, name: str, shape: tuple[int, ...]) -> float:
    if is_low_rank(name):  # each of r terms has the product of two variances
        return (_std(spec, f"{low_rank_module(name)[0]}.weight", shape) ** 2 / min(shape)) ** 0.25
    residual = spec.scaled_residual and name.endswith(_INTO_RESIDUAL)
    return spec.init_std / (2 * spec.num_layers * spec.parallel_sublayers) ** 0.5 if residual else spec.init_std


def init_stage(module: nn.Module, spec: ModelSpec, seed: int) -> None:
    """Set every parameter of an unsharded Decoder; one on the meta device moves to the CPU first. Where the decoder
    holds weights whole that `spec` has in 4 bits, they are the numbers that these stand for."""
    if any(parameter.is_meta for parameter in module.parameters()):
        module.to_empty(device="cpu")
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            value = initial_value(spec, name, tuple(parameter.shape), seed)
            parameter.copy_(dequantize(*quantize(value)) if has_four_bits(spec, name) else value)


# ----------------------------------------------------------------------------------------------------------------------
# A rank's parts


@dataclass(frozen=True)
class _Rows:
    """Consecutive elements of a whole tensor in row-major order, which hold a box of it."""

    start: int
    stop: int
    numel: int
    """Elements of the whole tensor."""

    @property
    def first_word(self) -> int:
        """Word of the generator that drawing begins with."""
        first = self.start // BLOCK * BLOCK
        return first if first >= FEW_WORDS and self.numel >= BLOCK else 0


def fill_initial_parts(
    spec: ModelSpec, layouts: Mapping[str, TensorLayout], parameters: Mapping[str, Tensor], seed: int
) -> None:
    """Set a rank's part of each parameter to the values that `initial_value` has there, without drawing the rest.

    Elements that lie between the rows of the part are drawn, too: its columns are cut out. As many threads draw as
    PyTorch may use.
    """
    by_word: dict[int, list[tuple[str, _Rows, Box, Tensor]]] = defaultdict(list)
    for name, layout in layouts.items():
        if not layout.boxes:
            continue
        # Norms, biases and adapters, which are small in any case, and weights in 4 bits, which follow from the whole.
        if len(layout.shape) < 2 or name.endswith(".bias") or is_adapter(name) or is_four_bit_part(name):
            value = initial_value(spec, name, layout.shape, seed)
            for box, part in _box_parts(layout, parameters[name]):
                part.copy_(value[box.slices])
        else:
            for box, part in _box_parts(layout, parameters[name]):
                rows = _rows_of(box, layout.shape)
                by_word[rows.first_word].append((name, rows, box, part))

    def fill(name: str, rows: _Rows, box: Box, part: Tensor, generator: torch.Generator) -> None:
        values = _draw_rows(name, rows, seed, _std(spec, name, layouts[name].shape), generator)
        whole_rows = values.view(box.size[0], *layouts[name].shape[1:])
        part.copy_(whole_rows[:, *box.slices[1:]])

    with torch.no_grad(), ThreadPoolExecutor(max(1, torch.get_num_threads())) as pool:
        for word, found in by_word.items():
            for at in range(0, len(found), JUMPED_AT_ONCE):
                batch = found[at : at + JUMPED_AT_ONCE]
                generators = [keyed_generator(seed, f"init/{name}") for name, *_ in batch]
                generators_at(generators, word)
                list(pool.map(fill, *zip(*batch, strict=True), generators))


def _box_parts(layout: TensorLayout, local: Tensor) -> Iterator[tuple[Box, Tensor]]:
    """Yield each box with the part of the local tensor that holds it: rows, one box after another."""
    first = 0
    for box in layout.boxes:
        yield box, local[first : first + box.size[0]]
        first += box.size[0]


def _rows_of(box: Box, shape: tuple[int, ...]) -> _Rows:
    width = prod(shape[1:])
    return _Rows(box.start[0] * width, (box.start[0] + box.size[0]) * width, prod(shape))


def _draw_rows(name: str, rows: _Rows, seed: int, std: float, generator: torch.Generator) -> Tensor:
    """Return the elements `rows` of a whole tensor from a generator that is at their first word.

    The kernel draws whole blocks; where the tensor's end isn't one, it draws its last 16 elements once more, from the
    words that follow.
    """
    first, numel = rows.first_word, rows.numel
    if numel < BLOCK:
        return draw(name, (numel,), seed, std)[rows.start : rows.stop]
    end = min(-(-rows.stop // BLOCK) * BLOCK, numel // BLOCK * BLOCK)
    values = torch.empty(max(rows.stop, end) - first, dtype=torch.float32, device="cpu")
    if end > first:
        values[: end - first].normal_(0.0, std, generator=generator)
    if numel % BLOCK and rows.stop > numel - BLOCK:
        last = keyed_generator(seed, f"init/{name}")
        generators_at([last], numel)
        tail = torch.empty(BLOCK, dtype=torch.float32, device="cpu").normal_(0.0, std, generator=last)
        tail_start = numel - BLOCK
        start = max(first, tail_start)
        values[start - first : rows.stop - first] = tail[start - tail_start : rows.stop - tail_start]
    return values[rows.start - first : rows.stop - first]
