"""AdamW whose moments are kept in 8 bits: block-wise dynamic quantization (T. Dettmers et al., arXiv:2110.02861 §2).

Each block of a flattened matrix is divided by its largest magnitude, which is stored, and each element becomes the
nearest of 256 values between −1 and 1 (0 and 1 for squares), of which there are as many in each power of ten: small
elements keep their order of magnitude.
"""

import torch
from torch import Tensor

from muster.config.optimizers import QUANTIZED_BLOCK
from muster.model.dynamic_map import dynamic_values
from muster.optim.owned_matrices import OwnedMatrixOptimizer


class AdamW8bit(OwnedMatrixOptimizer):
    """AdamW over one rank's local tensors, with moments of matrices in 8 bits."""

    def matrix_update(self, name: str, gradient: Tensor, state: dict[str, Tensor], step: int) -> Tensor:
        moments = [
            dequantize(state[kind], state[f"{kind}_scale"], is_signed).to(gradient.dtype)
            for kind, is_signed in (("exp_avg", True), ("exp_avg_sq", False))
        ]
        update = self.adam_direction(gradient, moments[0], moments[1], step)
        for kind, moment, is_signed in zip(("exp_avg", "exp_avg_sq"), moments, (True, False), strict=True):
            quantize_(moment, state[kind], state[f"{kind}_scale"], is_signed)
        return update


def quantize_(matrix: Tensor, codes: Tensor, scales: Tensor, is_signed: bool) -> None:
    """Set codes (the matrix's shape) and scales (a block's each) to those nearest to a matrix."""
    flat = matrix.flatten().float()
    missing = -len(flat) % QUANTIZED_BLOCK
    blocks = torch.nn.functional.pad(flat, (0, missing)).view(-1, QUANTIZED_BLOCK)
    scales.copy_(blocks.abs().amax(1))
    table = dynamic_values(is_signed, matrix.device)
    bounds = (table[:-1] + table[1:]) / 2
    unit = blocks / scales.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(1)
    codes.copy_(torch.bucketize(unit, bounds, out_int32=True).flatten()[: len(flat)].view(matrix.shape))


def dequantize(codes: Tensor, scales: Tensor, is_signed: bool) -> Tensor:
    """Return the matrix in float32 that codes and scales stand for."""
    values = dynamic_values(is_signed, codes.device)[codes.flatten().int()]
    return (values * scales.repeat_interleave(QUANTIZED_BLOCK)[: len(values)]).view(codes.shape)
