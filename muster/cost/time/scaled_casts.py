"""Casts to 8 and 4 bits, and rates of the matmuls that read them, by recipe, as Transformer Engine does them.

An operand is read in bf16 and written twice, along its rows and along its columns, as one matmul sums over either
(github:NVIDIA/TransformerEngine docs/features/low_precision_training). What differs between recipes are the passes that
find the largest values, the layouts that a device's matmuls take, and the scales that are written too:

* delayed: the scale is that of earlier steps; the cast finds the largest value beside. A norm writes 8 bits itself,
  instead of 16, and a later kernel the transpose.
* tensorwise (current scaling): one more read for the largest value, which a norm finds itself.
* rowwise, blockwise (128), mxfp8 (32): each block is read once; rows and columns have scales of their own.
* nvfp4 (16 elements): one more read, since a tensor has a scale, too; columns are rotated by Hadamard matrices in the
  kernel that casts them (arXiv:2509.25149).

Blackwell's matmuls read a tensor with one scale along rows and columns, so that one copy serves both; Hopper's don't.
"""

from muster.cost.precision_bytes import NVFP4_BYTES
from muster.spec.device import DeviceSpec
from muster.spec.plan import Float8Recipe, Precision

_READ_BYTES = 2
_BLOCK_SIZES: dict[Float8Recipe, int] = {"blockwise": 128, "mxfp8": 32}
_SCALE_BYTES: dict[Float8Recipe, int] = {"blockwise": 4, "mxfp8": 1}
BLOCK_CAST_RATE = 0.8
"""Rate of kernels that find the largest values of blocks along rows and columns, relative to streaming ones: mxfp8
and nvfp4 took as long beside matmuls on B300 as if they moved 4.5 and 4.4 TB/s (github:NVIDIA/TransformerEngine
docs/examples/gemm_profiling), where long streaming kernels reach 5.6 TB/s."""
BLOCKWISE_RATE = 0.84
"""Rate of matmuls by blocks of 128 relative to those with one scale, on devices that multiply by scales beside their
tensor cores: 0.84 of Transformer Engine's on H200 (same source, casts deducted), 0.76 of FBGEMM's on H100
(github:pytorch/FBGEMM pull 2546), 0.93 of the best on H800 (github:deepseek-ai/DeepGEMM pull 81)."""


def operand_cast_bytes(precision: Precision, recipe: Float8Recipe, device: DeviceSpec, normed: bool = False) -> float:
    """Return the bytes that streaming kernels would move while an element of an input or gradient is cast, for both
    matmuls that read it.

    `normed`: a norm wrote it just before, whose kernel does a part of the work.
    """
    if precision == "nvfp4":
        return ((1 if normed else 2) * _READ_BYTES + 2 * NVFP4_BYTES) / BLOCK_CAST_RATE
    copies = 1 if device.block_scaled_fp8 and recipe in ("delayed", "tensorwise") else 2
    if recipe == "delayed":
        return (2 * copies - 3) if normed else _READ_BYTES + copies
    if recipe == "tensorwise":
        return (1 if normed else 2) * _READ_BYTES + copies
    scale = _SCALE_BYTES.get(recipe, 0) / _BLOCK_SIZES.get(recipe, 1)
    return (_READ_BYTES + copies * (1 + scale)) / BLOCK_CAST_RATE


def matmul_rate(recipe: Float8Recipe, device: DeviceSpec) -> float:
    """Return the rate of matmuls in fp8 by a recipe relative to those with one scale for each tensor."""
    return BLOCKWISE_RATE if recipe == "blockwise" and not device.block_scaled_fp8 else 1.0
