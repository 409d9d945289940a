"""Order of training samples: a pure function of (seed, global sample index).

The token stream is cut into windows, some of which are held out for validation. An epoch is a pseudorandom permutation
of the training windows that needs no table: any rank can ask for any sample, and resuming needs only a number.
"""

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
"""Smallest length of a validation block, where the validation split is as long as that."""


def random_key(*parts: int | str) -> int:
    """Return a 64-bit key for the draws of one purpose, such as `random_key(seed, "order", epoch)`."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "little")


@overload
def permute(index: int, size: int, key: int) -> int: ...
@overload
def permute(index: np.ndarray, size: int, key: int) -> np.ndarray: ...
def permute(index: int | np.ndarray, size: int, key: int) -> int | np.ndarray:
    """Return the image of `index` under the pseudorandom permutation of 0 … size − 1 that the 64-bit `key` selects.

    A generalised Feistel cipher (Black & Rogaway 2002, "Ciphers with arbitrary finite domains", §5). Write an index as
    a pair (left, right) on a grid of rows × columns just larger than `size`. Each round shifts one half by a hash of
    the other, which can be undone, so the whole is a permutation of the grid. A result outside `size` is ciphered again
    until it falls inside ("cycle walking"). Nothing is stored, and any index can be asked for alone.

    Example: size 10 has a grid of 4 × 3; an index that lands on 10 or 11 is ciphered again. Arrays are int64. Raises
    ValueError for an index out of range.
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
    """Return the positions in the stream of global samples first … first + count − 1, int64 [count].

    Each epoch visits all `num_samples` samples once, in an order of its own.
    """
    return positions_at(np.arange(first, first + count, dtype=np.int64), num_samples, seed)


def positions_at(index: np.ndarray, num_samples: int, seed: int) -> np.ndarray:
    """Return the positions in the stream of any global sample indices, as `sample_positions` does."""
    epochs, positions = np.divmod(index, num_samples)
    for epoch in np.unique(epochs).tolist():
        here = epochs == epoch
        positions[here] = permute(positions[here], num_samples, random_key(seed, "order", epoch))
    return positions


@dataclass(frozen=True)
class Windows:
    """Division of a token stream into windows of `seq_len` positions, for training or validation.

    Window w reads tokens w · seq_len … (w + 1) · seq_len − 1 and predicts each next token, so every token but the first
    is predicted by exactly one window; the last window may be shorter. The validation split consists of contiguous
    blocks of windows, evenly spread over the stream. They depend on the sizes alone: runs with different seeds validate
    on the same windows.
    """

    num_tokens: int
    seq_len: int
    validation_split: float = 0.0
    """Fraction of the windows that are held out for validation, 0 … 0.5; more than 0 means at least one window."""

    def __post_init__(self) -> None:
        self._require_fraction()
        needed = self.seq_len * (2 if self.validation_split else 1) + 1
        if self.num_tokens < needed:
            parts = "one window for training and one for validation" if self.validation_split else "one window"
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
        """Return the windows of training samples `positions` (0 … num_train − 1, in the order of the stream)."""
        train_before, validation_before = self._section_bounds
        return positions + validation_before[np.searchsorted(train_before, positions, side="right") - 1]

    def validation_windows(self, positions: np.ndarray) -> np.ndarray:
        """Return the windows of validation samples `positions` (0 … num_validation − 1, in the order of the stream)."""
        train_before, validation_before = self._section_bounds
        return positions + train_before[np.searchsorted(validation_before, positions, side="right")]

    def lengths(self, windows: np.ndarray) -> np.ndarray:
        """Return the number of tokens that each window predicts: seq_len for all but the last one."""
        return np.minimum(self.seq_len, self.num_tokens - 1 - windows * self.seq_len)

    def starts(self, windows: np.ndarray) -> np.ndarray:
        """Return the index of the first token that each window reads."""
        return windows * self.seq_len

    @cached_property
    def _section_bounds(self) -> tuple[np.ndarray, np.ndarray]:
        """Numbers of training and of validation windows before each section; a section ends with a validation block."""
        blocks = self.num_validation * self.seq_len // VALIDATION_BLOCK_TOKENS
        sections = max(1, min(blocks, MAX_VALIDATION_BLOCKS, self.num_validation))
        bound = np.arange(sections + 1, dtype=np.int64)
        validation_before = bound * self.num_validation // sections
        return bound * self.num_windows // sections - validation_before, validation_before


def _feistel(value: np.ndarray, size: int, key: int) -> np.ndarray:
    rows = np.uint64(isqrt(size - 1) + 1)
    columns = np.uint64(-(-size // int(rows)))
    keys = _splitmix64(np.array([(key + round_index) % (1 << 64) for round_index in range(FEISTEL_ROUNDS)], np.uint64))
    left, right = np.divmod(value, columns)
    for round_index in range(0, FEISTEL_ROUNDS, 2):
        left = (left + _splitmix64(right ^ keys[round_index]) % rows) % rows
        right = (right + _splitmix64(left ^ keys[round_index + 1]) % columns) % columns
    return left * columns + right


def _splitmix64(value: np.ndarray) -> np.ndarray:
    """Return a 64-bit hash of each value (finalizer of SplitMix64): each input bit affects every output bit."""
    value = value + np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))
