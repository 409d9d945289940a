"""Hidden states in 8 bits on their way to experts: each row with a scale of its own (DeepEP's and MegaScale-MoE's
dispatch in fp8, arXiv:2505.11432).

A row is divided by a scale that makes its largest element just fit, and rounded. fp8 (e4m3) keeps 3 bits behind an
element's first: its error is at most a 16th of the element, or 2⁻¹⁰ · row's largest / 448 for the smallest ones. int8
rounds to 127 steps: its error is at most a 254th of the row's largest element. Suffixes: R rows, D hidden width.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from muster.spec.expert_kinds import ROW_SCALE_BYTES, DispatchDtype

_LEAST_SCALE = 2.0**-100


class RowCast(NamedTuple):
    """A way to send rows in 8 bits."""

    dtype: torch.dtype
    largest: float

    def pack(self, x_RD: Tensor) -> Tensor:
        """Return rows in 8 bits and behind each its scale in float32, as bytes (R, D + 4)."""
        scale_R1 = torch.linalg.vector_norm(x_RD, torch.inf, dim=1, keepdim=True).float() / self.largest
        scale_R1 = scale_R1.clamp(min=_LEAST_SCALE)
        scaled_RD = x_RD / scale_R1
        if self.dtype == torch.int8:
            scaled_RD = scaled_RD.round_()
        values_RD = scaled_RD.clamp_(-self.largest, self.largest).to(self.dtype)
        return torch.cat([values_RD.view(torch.uint8), scale_R1.view(torch.uint8)], 1)

    def unpack(self, packed: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the rows that `pack` packed, rounded (R, D)."""
        values, scale = packed.split([packed.shape[1] - ROW_SCALE_BYTES, ROW_SCALE_BYTES], 1)
        scale_R1 = scale.contiguous().view(torch.float32)
        return (values.contiguous().view(self.dtype).to(torch.float32) * scale_R1).to(dtype)


def row_cast(dtype: DispatchDtype) -> RowCast | None:
    """Return the way to send rows; None: as they are."""
    if dtype == "none":
        return None
    return RowCast(torch.int8, 127.0) if dtype == "int8" else RowCast(torch.float8_e4m3fn, 448.0)
