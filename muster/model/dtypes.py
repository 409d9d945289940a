"""Torch dtypes of the precisions that plans and run files name."""

import torch

DTYPES: dict[str, torch.dtype] = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.bfloat16,  # of everything but the matmuls of blocks (`muster.model.float8`)
}
