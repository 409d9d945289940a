"""Frozen linear layers whose weights are held in 4 bits (QLoRA, T. Dettmers et al., arXiv:2305.14314 §3).

An element is a number of NF4's codebook times its block's absolute maximum. A pass makes the weight of one layer at a
time in the precision that it computes in, and its backward makes it again. In plain PyTorch, or on a GPU by
bitsandbytes' kernel where that is installed.
"""

from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from muster.model.chunk_sizes import chunk_elements
from muster.model.dynamic_map import dynamic_values
from muster.spec.four_bit import (
    ABSMAX,
    BLOCK,
    CODES,
    NESTED,
    NESTED_BLOCK,
    four_bit_parts,
)

NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
"""Codebook NF4: means of neighbouring quantiles of a normal distribution, with an exact zero (appendix E)."""


class FourBitWeight:
    """Weight (out, in) of a linear layer that holds its parts; it stands where a frozen parameter would."""

    requires_grad = False

    def __init__(self, linear: nn.Module, rows: int, columns: int) -> None:
        self._linear = linear
        self.first_row, self.first_block, self._blocks_per_row = 0, 0, columns // BLOCK
        """Place of the rank's rows and of its columns' first block within the whole weight, and the blocks of a row
        there."""
        self._rows = rows

    def place(self, first_row: int, first_column: int) -> None:
        """Say where the rank's part begins within the whole weight."""
        self.first_row, self.first_block = first_row, first_column // BLOCK

    def __len__(self) -> int:
        return len(getattr(self._linear, CODES))

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Return the weight, in one precision."""
        codes, absmax, nested = (getattr(self._linear, name).detach() for name in (CODES, ABSMAX, NESTED))
        made = torch.empty(len(codes), 2 * codes.shape[1], dtype=dtype, device=codes.device)
        tables = tables_for(codes)
        rows = max(1, chunk_elements("codes", codes.device.type) // max(1, made.shape[1]))
        for start in range(0, len(codes), rows):
            own = slice(start, start + rows)
            group = nested_groups(absmax[own], self.first_row + start, self.first_block, self._blocks_per_row)
            scales = dequantize_absmax(absmax[own], nested.view(torch.float32), group, tables)
            dequantize_blocks_(made[own], codes[own], scales, tables)
        return made


def nested_groups(absmax: Tensor, first_row: int, first_block: int, blocks_per_row: int) -> Tensor:
    """Return the group of 256 blocks that each block of a part of a weight is in, in rows as `absmax`."""
    rows = torch.arange(first_row, first_row + absmax.shape[0], device=absmax.device).unsqueeze(1)
    blocks = torch.arange(first_block, first_block + absmax.shape[1], device=absmax.device)
    return (rows * blocks_per_row + blocks) // NESTED_BLOCK


class Tables(NamedTuple):
    """Numbers that codes stand for."""

    pairs: Tensor
    """Two numbers of NF4 for each byte of codes, the first of its upper half (256, 2)."""
    absmax: Tensor
    """Numbers of the codes of absolute maxima (256)."""


def tables_for(codes: Tensor) -> Tables:
    """Return the tables on the device of codes. They are kept, unless the codes are fake tensors."""
    return _kept_tables(codes.device) if type(codes) is Tensor else _new_tables(codes.device)


def _new_tables(device: torch.device) -> Tables:
    pairs = [(first, second) for first in NF4 for second in NF4]
    return Tables(torch.tensor(pairs, device=device), dynamic_values(is_signed=True, device=device))


_kept_tables = lru_cache(_new_tables)


def dequantize_absmax(absmax: Tensor, nested: Tensor, group: Tensor, tables: Tables) -> Tensor:
    """Return the absolute maxima of blocks in float32, of their codes, all scales and the mean behind these."""
    return tables.absmax[absmax.int()] * nested[group] + nested[-1]


def dequantize_blocks_(made: Tensor, codes: Tensor, absmax: Tensor, tables: Tables) -> None:
    """Set elements of whole rows to those that codes stand for, with the absolute maxima of their blocks."""
    if codes.is_cuda and (kernel := _library_kernel()) is not None:
        made.copy_(kernel(codes.flatten(), absmax.flatten(), BLOCK, "nf4", list(made.shape), made.dtype))
        return
    pairs = tables.pairs.index_select(0, codes.flatten().int())
    made.view(-1, BLOCK).copy_(pairs.view(-1, BLOCK).mul_(absmax.view(-1, 1)))


@lru_cache
def _library_kernel() -> Any:
    """Return bitsandbytes' operator, of which it has one for each kind of device; None where it isn't installed."""
    if find_spec("bitsandbytes") is None:
        return None
    import_module("bitsandbytes")  # registers the operator
    return torch.ops.bitsandbytes.dequantize_4bit


def quantize(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the parts of a whole weight (out, in): the nearest numbers of the codebook for the blocks' true absolute
    maxima, and these maxima less their mean as the nearest of 256 values for each group's largest."""
    blocks = weight.float().reshape(-1, BLOCK)
    absmax = blocks.abs().amax(1)
    tiny = torch.finfo(torch.float32).tiny
    book = torch.tensor(NF4, device=weight.device)
    code = torch.bucketize(blocks / absmax.clamp(min=tiny).unsqueeze(1), (book[:-1] + book[1:]) / 2, out_int32=True)
    code = code.to(torch.uint8).view(-1, 2)
    mean = absmax.double().mean().float()
    grouped = F.pad(absmax - mean, (0, -len(absmax) % NESTED_BLOCK)).view(-1, NESTED_BLOCK)
    scales = grouped.abs().amax(1)
    values = dynamic_values(is_signed=True, device=weight.device)
    unit = grouped / scales.clamp(min=tiny).unsqueeze(1)
    nearest = torch.bucketize(unit, (values[:-1] + values[1:]) / 2, out_int32=True).to(torch.uint8)
    nested = torch.cat((scales, mean.view(1))).view(torch.int32)
    shape = len(weight), -1
    return (code[:, 0] << 4 | code[:, 1]).view(shape), nearest.flatten()[: len(absmax)].view(shape), nested


def dequantize(codes: Tensor, absmax: Tensor, nested: Tensor) -> Tensor:
    """Return a whole weight in float32."""
    made = torch.empty(len(codes), 2 * codes.shape[1], device=codes.device)
    group = nested_groups(absmax, 0, 0, absmax.shape[1])
    tables = tables_for(codes)
    dequantize_blocks_(made, codes, dequantize_absmax(absmax, nested.view(torch.float32), group, tables), tables)
    return made


def hold_in_four_bits(linear: nn.Linear) -> None:
    """Give a linear layer the parts of its weight in the weight's place; they have no values yet."""
    rows, columns = linear.weight.shape
    device, bias = linear.weight.device, linear.bias
    del linear.weight
    del linear.bias
    for name, shape in four_bit_parts("weight", (rows, columns)):
        dtype = torch.int32 if name == NESTED else torch.uint8
        linear.register_parameter(
            name, nn.Parameter(torch.zeros(shape, dtype=dtype, device=device), requires_grad=False)
        )
    linear.register_parameter("bias", bias)
    linear.weight = FourBitWeight(linear, rows, columns)  # type: ignore[assignment]


class FourBitLinear(nn.Linear):
    """Linear layer without an adapter."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features, linear.bias is not None)
        hold_in_four_bits(self)

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


def dense(weight: Tensor | FourBitWeight, dtype: torch.dtype) -> Tensor:
    """Return a weight as a matrix; one in 4 bits is made anew, in this precision."""
    return weight.dense(dtype) if isinstance(weight, FourBitWeight) else weight


def linear(x: Tensor, weight: Tensor | FourBitWeight, bias: Tensor | None) -> Tensor:
    """Apply a linear layer whose weight may be held in 4 bits."""
    if not isinstance(weight, FourBitWeight):
        return F.linear(x, weight, bias)
    y: Tensor = _FourBitProduct.apply(x, weight)  # type: ignore[assignment]
    return y if bias is None else y + bias


class _FourBitProduct(torch.autograd.Function):
    """W x with a frozen W, which the backward makes once more."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: FourBitWeight) -> Tensor:
        ctx.weight = weight
        return F.linear(x, weight.dense(x.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] @ ctx.weight.dense(grads[0].dtype), None
