"""Samples out of a token store: training batches by global sample index, and held-out ones."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from muster.data.order import Windows, key_of, permute, sample_positions
from muster.data.store import TokenStore

NOT_COUNTED = -100
"""The label of a position that is not counted in the loss."""


@dataclass(frozen=True, eq=False, slots=True)
class Batch:
    """Some samples: the tokens that are read, and the ones to predict at the same positions."""

    tokens_BS: np.ndarray
    """int64."""
    labels_BS: np.ndarray
    """int64; −100 where nothing is predicted."""
    num_valid: int
    """Labels that count."""


class Dataset:
    """The samples of a store, cut in windows of `seq_len`, in an order that `seed` names.

    Sample g of the training stream is the same whoever reads it and however the stream is split over ranks. Raises
    ConfigError where the store is too small for `seq_len`, or `held_out` (the fraction of held-out windows) is not
    within 0 … 0.5.
    """

    def __init__(self, store: TokenStore, seq_len: int, seed: int = 0, held_out: float = 0.0) -> None:
        self.store, self.seed = store, seed
        self.windows = Windows(store.header.num_tokens, seq_len, held_out)

    @property
    def num_train_samples(self) -> int:
        """Samples of one epoch; the training stream itself has no end."""
        return self.windows.num_train

    @property
    def num_held_out_samples(self) -> int:
        return self.windows.num_held_out

    def train_batch(self, first: int, count: int) -> Batch:
        """Training samples `first` … `first + count − 1` of the global stream."""
        return self._read(self._train_windows(first, count), count)

    def held_out_batch(self, first: int, count: int) -> Batch:
        """Held-out samples `first` … `first + count − 1`; rows after the last one have no valid label.

        Their order is the same for every seed and mixes the whole stream, so that any first part is a fair sample.
        """
        return self._read(self._held_out_windows(first, count), count)

    def num_valid(self, first: int, count: int) -> int:
        """Labels that count in a range of training samples, without reading a token."""
        return int(self.windows.num_valid(self._train_windows(first, count)).sum())

    def num_held_out_valid(self, first: int, count: int) -> int:
        """Labels that count in a range of held-out samples, without reading a token."""
        return int(self.windows.num_valid(self._held_out_windows(first, count)).sum())

    def _train_windows(self, first: int, count: int) -> np.ndarray:
        return self.windows.train(sample_positions(first, count, self.num_train_samples, self.seed))

    def _held_out_windows(self, first: int, count: int) -> np.ndarray:
        index = np.arange(first, min(first + count, self.num_held_out_samples))
        return self.windows.held(permute(index, self.num_held_out_samples, key_of("held out")))

    def _read(self, windows: np.ndarray, rows: int) -> Batch:
        tokens_BS = np.zeros((rows, self.windows.seq_len), np.int64)
        labels_BS = np.full_like(tokens_BS, NOT_COUNTED)
        valid = self.windows.num_valid(windows)
        for row, (window, length) in enumerate(zip(windows.tolist(), valid.tolist(), strict=True)):
            start = window * self.windows.seq_len
            tokens = self.store.read(start, start + length + 1)
            tokens_BS[row, :length] = tokens[:-1]
            labels_BS[row, :length] = tokens[1:]
        return Batch(tokens_BS, labels_BS, int(valid.sum()))


def sample_digest(tokens_S: np.ndarray) -> bytes:
    """A hash of one sample's tokens, the same on every machine."""
    return hashlib.sha256(np.ascontiguousarray(tokens_S, "<i8").data).digest()


class StreamHash:
    """The hash of a stream of samples so far: h_k = sha256(h_{k−1} + digest of sample k).

    It depends on the samples and their order alone, not on how they are grouped in steps.
    """

    START = hashlib.sha256(b"muster sample stream").hexdigest()

    def __init__(self, state: str = START) -> None:
        self.state = state
        """Hexadecimal; a StreamHash made with it goes on from here."""

    def update(self, digests: Iterable[bytes]) -> None:
        """Adds samples in global order."""
        state = bytes.fromhex(self.state)
        for digest in digests:
            state = hashlib.sha256(state + digest).digest()
        self.state = state.hex()
