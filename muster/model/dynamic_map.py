"""Table of 256 values between −1 and 1, of which there are more in each power of ten than in the one below (dynamic
quantization, T. Dettmers et al., arXiv:2110.02861 §1.3; github:bitsandbytes-foundation/bitsandbytes,
functional.create_dynamic_map)."""

from functools import lru_cache

import torch
from torch import Tensor

POWERS = 7
"""Powers of ten in the table."""


def dynamic_values(is_signed: bool, device: torch.device | None = None) -> Tensor:
    """Return the 256 values of the table, in rising order."""
    return torch.tensor(_numbers(is_signed), dtype=torch.float32, device=device)


@lru_cache
def _numbers(is_signed: bool) -> list[float]:
    values = [0.0, 1.0]
    for power in range(POWERS):
        count = 2**power if is_signed else 2 ** (power + 1)
        means = [(0.1 + 0.9 * (place + 0.5) / count) * 10.0 ** (power - POWERS + 1) for place in range(count)]
        values += means + ([-mean for mean in means] if is_signed else [])
    return sorted(values)
