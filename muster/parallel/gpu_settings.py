"""PyTorch's settings of a rank's GPU that no plan decides."""

import os

import torch

_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Names of the allocator's settings in newer and in older versions of PyTorch."""
EXPANDABLE_SEGMENTS = "expandable_segments:True"


def use_expandable_segments() -> None:
    """Let the allocator grow its segments in place, before it has any, unless the environment has settings of its own.

    Tensors of all sizes are made and freed in a step, and of segments of fixed sizes the rest behind a tensor is lost
    (docs.pytorch.org/docs/stable/notes/cuda.html, expandable_segments); forecasts assume that little is.
    """
    if torch.version.cuda is None or any(name in os.environ for name in _ALLOCATOR_VARIABLES):
        return
    if (apply := getattr(torch._C, "_accelerator_setAllocatorSettings", None)) is None:
        apply = torch.cuda.memory._set_allocator_settings
    apply(EXPANDABLE_SEGMENTS)


def use_full_float32() -> None:
    """Let float32 matmuls read float32, not TF32 with 10 bits of mantissa: plans of precision fp32 are what others are
    compared with, and predictions count the device's float32 rate."""
    torch.set_float32_matmul_precision("highest")
