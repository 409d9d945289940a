"""Matrices of experts in MXFP4, as gpt-oss is published: two tensors in the place of one, read as bfloat16.

A matrix (experts, input, output) is stored by outputs: `…_blocks` (experts, output, input / 32, 16) has two numbers of
four bits in each byte, the earlier one in the lower half, and `…_scales` (experts, output, input / 32) the exponent of
each 32 numbers, plus 127 (OCP Microscaling Formats 1.0, §5.3 and 5.4; `transformers.integrations.mxfp4`).
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from muster.checkpoint.tensors import TensorMeta, TensorSource
from muster.layout.tensor_layout import Box

BLOCKS, SCALES = "_blocks", "_scales"
BLOCK = 32
"""Numbers that share a scale."""
_EXPONENT_BIAS = 127
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of the lower three bits; the fourth is the sign."""


def with_unpacked(stored: TensorSource) -> TensorSource:
    """Return stored tensors, of which those in MXFP4 are read as bfloat16."""
    has_packed = any(has_blocks(name, stored.metas) for name in stored.metas)
    return Mxfp4Tensors(stored) if has_packed else stored


class Mxfp4Tensors:
    """Stored tensors (a `TensorSource`), pairs of blocks and scales as one bfloat16 tensor without their suffixes."""

    def __init__(self, stored: TensorSource) -> None:
        self._stored = stored
        self._packed = {name.removesuffix(BLOCKS) for name in stored.metas if has_blocks(name, stored.metas)}
        pairs = {name + suffix for name in self._packed for suffix in (BLOCKS, SCALES)}
        self.metas: Mapping[str, TensorMeta] = {
            **{name: meta for name, meta in stored.metas.items() if name not in pairs},
            **{name: self._meta(name) for name in self._packed},
        }

    def _meta(self, name: str) -> TensorMeta:
        experts, outputs, groups, _ = self._stored.metas[name + BLOCKS].shape
        return TensorMeta((experts, groups * BLOCK, outputs), torch.bfloat16)

    def read(self, name: str, box: Box) -> Tensor:
        if name not in self._packed:
            return self._stored.read(name, box)
        (expert, row, column), (experts, rows, columns) = box.start, box.size
        first, last = row // BLOCK, -(-(row + rows) // BLOCK)
        start, size = (expert, column, first), (experts, columns, last - first)
        blocks = self._stored.read(name + BLOCKS, Box((*start, 0), (*size, BLOCK // 2)))
        found_EOI = unpack(blocks, self._stored.read(name + SCALES, Box(start, size)))
        return found_EOI[..., row - first * BLOCK :][..., :rows].transpose(1, 2).contiguous()


def has_blocks(name: str, metas: Mapping[str, TensorMeta]) -> bool:
    """Return True for the name of blocks that have scales beside them."""
    meta, scales = metas[name], metas.get(name.removesuffix(BLOCKS) + SCALES)
    is_pair = name.endswith(BLOCKS) and scales is not None and len(meta.shape) == 4
    return is_pair and meta.shape[-1] == BLOCK // 2 and scales is not None and scales.shape == meta.shape[:-1]


def unpack(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return the numbers (…, groups · 32) of blocks (…, groups, 16) and scales (…, groups), in bfloat16, which has all
    of them."""
    values = torch.tensor((*_MAGNITUDES, *(-value for value in _MAGNITUDES)), dtype=torch.bfloat16)
    halves = torch.stack((blocks & 0xF, blocks >> 4), -1).flatten(-2)
    return torch.ldexp(values[halves.int()], (scales.int() - _EXPONENT_BIAS).unsqueeze(-1)).to(values.dtype).flatten(-2)
