"""Which part of the token stream each sample is: a pure function of (seed, global sample index)."""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from math import isqrt
from typing import overload

import numpy as np

from muster.spec.errors import ConfigError

ROUNDS = 8
MAX_HELD_OUT_BLOCKS = 64
HELD_OUT_BLOCK_TOKENS = 16_384
"""Held-out blocks are at least this long where the held-out part is."""


def key_of(*parts: int | str) -> int:
    """A 64-bit key for the draws of one purpose, such as `key_of(seed, "order", epoch)`."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "little")


@overload
def permute(index: int, size: int, key: int) -> int: ...
@overload
def permute(index: np.ndarray, size: int, key: int) -> np.ndarray: ...
def permute(index: int | np.ndarray, size: int, key: int) -> int | np.ndarray:
    """Where `index` goes under the permutation of 0 … size − 1 that the 64-bit `key` names; int64 for an array.

    A generalised Feistel cipher (Black & Rogaway 2002, "Ciphers with arbitrary finite domains", §5): numbers are pairs
    (left, right) of a grid just larger than `size`, each round moves one by a hash of the other, and a result outside
    `size` is ciphered again. So it needs no memory, and any index can be asked for alone. Raises ValueError where an
    index is outside the range.
    """
    value = np.atleast_1d(np.asarray(index, np.int64))
    if value.size and not 0 <= value.min() <= value.max() < size:
        raise ValueError(f"an index lies outside 0 … {size - 1}")
    if not value.size:
        return value
    value = _cipher(value.astype(np.uint64), size, key)
    while (outside := value >= size).any():
        value[outside] = _cipher(value[outside], size, key)
    return int(value[0]) if isinstance(index, int) else value.astype(np.int64)


def sample_positions(first: int, count: int, num_samples: int, seed: int) -> np.ndarray:
    """Which of `num_samples` samples the global sample indices first … first + count − 1 are, int64 [count].

    Each epoch goes through all samples once, in an order of its own.
    """
    return positions_of(np.arange(first, first + count, dtype=np.int64), num_samples, seed)


def positions_of(index: np.ndarray, num_samples: int, seed: int) -> np.ndarray:
    """As `sample_positions`, of any global sample indices."""
    epochs, positions = np.divmod(index, num_samples)
    for epoch in np.unique(epochs).tolist():
        here = epochs == epoch
        positions[here] = permute(positions[here], num_samples, key_of(seed, "order", epoch))
    return positions


@dataclass(frozen=True)
class Windows:
    """How a stream of tokens is cut into samples.

    Window w predicts tokens w · seq_len + 1 … (w + 1) · seq_len from those one before, so that every token but the
    first is predicted by exactly one window; the last window may be shorter. Some contiguous blocks of windows, evenly
    spread over the stream, are held out: they depend on the sizes alone, so runs with different seeds have the same.
    """

    num_tokens: int
    seq_len: int
    held_out: float = 0.0
    """Fraction of the windows, 0 … 0.5; more than 0 means one window at least."""

    def __post_init__(self) -> None:
        self._require_fraction()
        needed = self.seq_len * (2 if self.held_out else 1) + 1
        if self.num_tokens < needed:
            parts = "one window to train on and one held out" if self.held_out else "one window"
            raise ConfigError(
                f"data.source has {self.num_tokens:,} tokens, but {parts} of train.seq_len {self.seq_len:,} need"
                f" {needed:,}; give more text or a smaller train.seq_len"
            )

    def _require_fraction(self) -> None:
        if not 0 <= self.held_out <= 0.5:
            raise ConfigError(f"data.held_out is a fraction from 0 to 0.5, got {self.held_out}")

    @property
    def num_windows(self) -> int:
        return -(-(self.num_tokens - 1) // self.seq_len)

    @property
    def num_held_out(self) -> int:
        if not self.held_out:
            return 0
        return min(max(round(self.held_out * self.num_windows), 1), self.num_windows // 2)

    @property
    def num_train(self) -> int:
        return self.num_windows - self.num_held_out

    def train(self, positions: np.ndarray) -> np.ndarray:
        """The windows that are training samples `positions` (0 … num_train − 1, in the order of the stream)."""
        train_before, held_before = self._bounds
        return positions + held_before[np.searchsorted(train_before, positions, side="right") - 1]

    def held(self, positions: np.ndarray) -> np.ndarray:
        """The windows that are held-out samples `positions` (0 … num_held_out − 1, in the order of the stream)."""
        train_before, held_before = self._bounds
        return positions + train_before[np.searchsorted(held_before, positions, side="right")]

    def num_valid(self, windows: np.ndarray) -> np.ndarray:
        """How many tokens each window predicts: seq_len, but for the last one."""
        return np.minimum(self.seq_len, self.num_tokens - 1 - windows * self.seq_len)

    def starts(self, windows: np.ndarray) -> np.ndarray:
        """The first token that each window reads."""
        return windows * self.seq_len

    @cached_property
    def _bounds(self) -> tuple[np.ndarray, np.ndarray]:
        """Training and held-out windows before each section of the stream; a section ends with a held-out block."""
        blocks = self.num_held_out * self.seq_len // HELD_OUT_BLOCK_TOKENS
        sections = max(1, min(blocks, MAX_HELD_OUT_BLOCKS, self.num_held_out))
        bound = np.arange(sections + 1, dtype=np.int64)
        held_before = bound * self.num_held_out // sections
        return bound * self.num_windows // sections - held_before, held_before


def _cipher(value: np.ndarray, size: int, key: int) -> np.ndarray:
    rows = np.uint64(isqrt(size - 1) + 1)
    columns = np.uint64(-(-size // int(rows)))
    keys = _mix(np.array([(key + turn) % (1 << 64) for turn in range(ROUNDS)], np.uint64))
    left, right = np.divmod(value, columns)
    for turn in range(0, ROUNDS, 2):
        left = (left + _mix(right ^ keys[turn]) % rows) % rows
        right = (right + _mix(left ^ keys[turn + 1]) % columns) % columns
    return left * columns + right


def _mix(value: np.ndarray) -> np.ndarray:
    """A 64-bit hash in which each bit of `value` moves each bit of the result (the finaliser of SplitMix64)."""
    value = value + np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))
