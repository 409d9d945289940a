"""Which part of the token stream each sample is: a pure function of (seed, global sample index)."""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from math import isqrt
from typing import overload

import numpy as np

from muster.spec.errors import ConfigError

FEISTEL_ROUNDS = 8
MAX_VALIDATION_BLOCKS = 64
VALIDATION_BLOCK_TOKENS = 16_384
"""Held-out blocks are at least this long where the held-out part is."""


def random_key(*parts: int | str) -> int:
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
    value = _feistel(value.astype(np.uint64), size, key)
    while (outside := value >= size).any():
        value[outside] = _feistel(value[outside], size, key)
    return int(value[0]) if isinstance(index, int) else value.astype(np.int64)


def sample_positions(first: int, count: int, num_samples: int, seed: int) -> np.ndarray:
    """Which of `num_samples` samples the global sample indices first … first + count − 1 are, int64 [count].

    Each epoch goes through all samples once, in an order of its own.
    """
    return positions_at(np.arange(first, first + count, dtype=np.int64), num_samples, seed)


def positions_at(index: np.ndarray, num_samples: int, seed: int) -> np.ndarray:
    """As `sample_positions`, of any global sample indices."""
    epochs, positions = np.divmod(index, num_samples)
    for epoch in np.unique(epochs).tolist():
        here = epochs == epoch
        positions[here] = permute(positions[here], num_samples, random_key(seed, "order", epoch))
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
    validation_split: float = 0.0
    """Fraction of the windows, 0 … 0.5; more than 0 means one window at least."""

    def __post_init__(self) -> None:
        self._require_fraction()
        needed = self.seq_len * (2 if self.validation_split else 1) + 1
        if self.num_tokens < needed:
            parts = "one window to train on and one held out" if self.validation_split else "one window"
            raise ConfigError(
                f"data.source has {self.num_tokens:,} tokens, but {parts} of train.seq_len {self.seq_len:,} need"
                f" {needed:,}; give more text or a smaller train.seq_len"
            )

    def _require_fraction(self) -> None:
        if not 0 <= self.validation_split <= 0.5:
            raise ConfigError(f"data.validation_split is a fraction from 0 to 0.5, got {self.validation_split}")

    @property
    def num_windows(self) -> int:
        return -(-(self.num_tokens - 1) // self.seq_len)

    @property
    def num_validation(self) -> int:
        if not self.validation_split:
            return 0
        return min(max(round(self.validation_split * self.num_windows), 1), self.num_windows // 2)

    @property
    def num_train(self) -> int:
        return self.num_windows - self.num_validation

    def train_windows(self, positions: np.ndarray) -> np.ndarray:
        """The windows that are training samples `positions` (0 … num_train − 1, in the order of the stream)."""
        train_before, held_before = self._section_bounds
        return positions + held_before[np.searchsorted(train_before, positions, side="right") - 1]

    def validation_windows(self, positions: np.ndarray) -> np.ndarray:
        """The windows that are held-out samples `positions` (0 … num_held_out − 1, in the order of the stream)."""
        train_before, held_before = self._section_bounds
        return positions + train_before[np.searchsorted(held_before, positions, side="right")]

    def lengths(self, windows: np.ndarray) -> np.ndarray:
        """How many tokens each window predicts: seq_len, but for the last one."""
        return np.minimum(self.seq_len, self.num_tokens - 1 - windows * self.seq_len)

    def starts(self, windows: np.ndarray) -> np.ndarray:
        """The first token that each window reads."""
        return windows * self.seq_len

    @cached_property
    def _section_bounds(self) -> tuple[np.ndarray, np.ndarray]:
        """Training and held-out windows before each section of the stream; a section ends with a held-out block."""
        blocks = self.num_validation * self.seq_len // VALIDATION_BLOCK_TOKENS
        sections = max(1, min(blocks, MAX_VALIDATION_BLOCKS, self.num_validation))
        bound = np.arange(sections + 1, dtype=np.int64)
        held_before = bound * self.num_validation // sections
        return bound * self.num_windows // sections - held_before, held_before


def _feistel(value: np.ndarray, size: int, key: int) -> np.ndarray:
    rows = np.uint64(isqrt(size - 1) + 1)
    columns = np.uint64(-(-size // int(rows)))
    keys = _splitmix64(np.array([(key + turn) % (1 << 64) for turn in range(FEISTEL_ROUNDS)], np.uint64))
    left, right = np.divmod(value, columns)
    for turn in range(0, FEISTEL_ROUNDS, 2):
        left = (left + _splitmix64(right ^ keys[turn]) % rows) % rows
        right = (right + _splitmix64(left ^ keys[turn + 1]) % columns) % columns
    return left * columns + right


def _splitmix64(value: np.ndarray) -> np.ndarray:
    """A 64-bit hash in which each bit of `value` moves each bit of the result (the finaliser of SplitMix64)."""
    value = value + np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))
