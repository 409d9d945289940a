"""SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, OOPSLA 2014) as a hash of counters.

The n-th output of the generator with a key is a function of key and n, so draws are counted, not carried: nothing is
stored, and ranks that need the same numbers draw the same. Integers alone are computed with, so that every device has
the same bits.
"""

import torch
from torch import Tensor

_ALL_BITS = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))


def signed(bits: int) -> int:
    """Return the int64 with these 64 bits."""
    return bits - (1 << 64) if bits >> 63 else bits


def key_of(seed: int, purpose: int) -> Tensor:
    """Return the key (1), int64, of the draws of a run for one purpose, apart from those of others."""
    return mix_(torch.tensor([signed((seed ^ purpose) & _ALL_BITS)]))


def counted(keys: Tensor, counters: Tensor | int) -> Tensor:
    """Return the outputs of the generators with these keys (…) at their counters."""
    if isinstance(counters, int):
        return mix_(keys + signed((counters + 1) * _GAMMA & _ALL_BITS))
    return mix_(keys + (counters + 1) * signed(_GAMMA))


def mix_(x: Tensor) -> Tensor:
    """Replace each int64 by its hash; distinct ones stay distinct."""
    for bits, factor in _ROUNDS:
        x.bitwise_xor_(_shifted(x, bits)).mul_(signed(factor))
    return x.bitwise_xor_(_shifted(x, 31))


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Return x shifted right with zeros, which int64 fills with copies of the sign."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)
