"""Jumps within the random numbers of a CPU generator, so that a part of a tensor is drawn without what lies before it.

PyTorch's CPU generator is MT19937 (Matsumoto and Nishimura, "Mersenne Twister", ACM TOMACS 8(1), 1998), one 32-bit
word for each float32 of a normal distribution. Its state is linear over GF(2) with a known characteristic polynomial p,
so the state after k words is a fixed sum of the first states: that of the coefficients of x^k mod p (Haramoto et al.,
"Efficient Jump Ahead for F2-Linear Random Number Generators", INFORMS J. Comput. 20(3), 2008). A jump costs
milliseconds, whatever its length.
"""

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch

_N, _M, _LOWER_BITS, _MATRIX = 624, 397, 31, 0x9908B0DF
_DEGREE = 32 * _N - _LOWER_BITS
_STATE_OFFSET, _LEFT_OFFSET, _NEXT_OFFSET = 24, 8, 16
"""Bytes before parts of a generator's state: its words as 64-bit numbers, the number of words left before the next
round, and the place of the next (aten/src/ATen/CPUGeneratorImpl.cpp, CPUGeneratorImplStateLegacy)."""


def generators_at(generators: Sequence[torch.Generator], num_words: int) -> None:
    """Let freshly seeded CPU generators go on as if they had given `num_words` words."""
    if not num_words or not generators:
        return
    states = [generator.get_state() for generator in generators]
    words_TN = np.stack([_words(state) for state in states])
    for generator, state, words_N in zip(generators, states, _jump(words_TN, num_words), strict=True):
        raw = state.numpy()
        raw[_STATE_OFFSET:].view(np.uint8)[: 8 * _N] = words_N.astype(np.uint64).view(np.uint8)
        generator.set_state(state)


def _words(state: torch.Tensor) -> np.ndarray:
    """Return the words of a generator that has given none: its first word starts a new round."""
    raw = state.numpy()
    left, place = (int(raw[at : at + 4].view(np.int32)[0]) for at in (_LEFT_OFFSET, _NEXT_OFFSET))
    assert (left, place) == (1, 0), "only a freshly seeded generator can jump"
    return raw[_STATE_OFFSET : _STATE_OFFSET + 8 * _N].view(np.uint64).astype(np.uint32)


def _jump(words_TN: np.ndarray, num_words: int) -> np.ndarray:
    """Return the states (T, 624) that follow `num_words` words after these."""
    sequence = _sequence(words_TN)
    found = np.zeros_like(words_TN)
    for power in _set_bits(_power_of_x(num_words)):
        found ^= sequence[:, power : power + _N]
    return found


def _sequence(words_TN: np.ndarray) -> np.ndarray:
    """Return states as the words with which they begin, (T, 19937 + 624): state i is words i … i + 623."""
    total = _DEGREE + _N
    found = np.empty((len(words_TN), total), np.uint32)
    found[:, :_N] = words_TN
    step = _N - _M  # words of a vector that don't depend on each other
    for start in range(0, total - _N, step):
        count = min(step, total - _N - start)
        high, low = found[:, start : start + count], found[:, start + 1 : start + 1 + count]
        mixed = (high & np.uint32(0x80000000)) | (low & np.uint32(0x7FFFFFFF))
        twisted = (mixed >> np.uint32(1)) ^ ((mixed & np.uint32(1)) * np.uint32(_MATRIX))
        found[:, start + _N : start + _N + count] = found[:, start + _M : start + _M + count] ^ twisted
    return found


# ----------------------------------------------------------------------------------------------------------------------
# Polynomials over GF(2), as whole numbers whose bit i is the coefficient of x^i


@cache
def _power_of_x(exponent: int) -> int:
    """Return x^exponent modulo the characteristic polynomial."""
    found = 1
    for bit in bin(exponent)[2:]:
        found = _remainder(_square(found) << int(bit))
    return found


def _square(polynomial: int) -> int:
    """Return the square: over GF(2) the coefficients move apart, and no product of two of them is left."""
    return int("0".join(bin(polynomial)[2:]), 2)


def _remainder(polynomial: int) -> int:
    while high := polynomial >> _DEGREE:
        polynomial ^= high << _DEGREE
        for exponent in _lower_exponents():
            polynomial ^= high << exponent
    return polynomial


@cache
def _lower_exponents() -> tuple[int, ...]:
    """Return the exponents of the characteristic polynomial but for the largest (Matsumoto and Nishimura, appendix)."""
    whole, upper = (1 << _N) | (1 << _M), (1 << _N - 1) | (1 << _M - 1)
    polynomial = 0
    for bit in range(32):  # coefficients of the matrix, from the lowest
        is_set = _MATRIX >> bit & 1
        if not is_set:
            continue
        term = whole if bit < _LOWER_BITS else 1
        for _ in range(max(0, _LOWER_BITS - 1 - bit)):
            term = _product(term, upper)
        polynomial ^= term
    last = whole
    for _ in range(_LOWER_BITS):
        last = _product(last, upper)
    polynomial ^= last
    return tuple(_set_bits(polynomial ^ (1 << _DEGREE)))


def _product(one: int, other: int) -> int:
    found = 0
    for bit in _set_bits(other):
        found ^= one << bit
    return found


def _set_bits(number: int) -> list[int]:
    digits = np.frombuffer(bin(number)[:1:-1].encode(), np.uint8)
    return np.flatnonzero(digits == ord("1")).tolist()
