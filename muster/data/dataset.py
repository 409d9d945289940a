"""Samples out of token stores: training batches by global sample index, and held-out ones."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from muster.data.packing import PackedDocuments, SingleDocuments
from muster.data.sample_order import Windows, permute, positions_at, random_key
from muster.data.store import TokenStore

IGNORE_INDEX = -100
"""The label of a position that is not counted in the loss."""
_PROMPT_CANDIDATES = 64
"""Samples among which one with a document's beginning is looked for."""
Packing = Literal["concatenate", "document_mask", "next_fit", "none"]


@dataclass(frozen=True, eq=False, slots=True)
class Batch:
    """Some samples: the tokens that are read, and the ones to predict at the same positions."""

    tokens_BS: np.ndarray
    """int64."""
    labels_BS: np.ndarray
    """int64; −100 where nothing is predicted."""
    num_valid_tokens: int
    """Labels that count."""
    positions_BS: np.ndarray | None = None
    """int32: each token's place in its document, 0 where one begins; None: a sample is one document."""


class SampleStream(Protocol):
    """A stream of training samples without an end, and held-out samples: what training asks of its data.

    Sample g of the stream is the same whoever reads it and however the stream is split over ranks.
    """

    @property
    def fingerprint(self) -> str:
        """Differs between streams of other tokens."""
        ...

    @property
    def num_train_samples(self) -> int:
        """Samples of one epoch; the training stream itself has no end."""
        ...

    @property
    def num_validation_samples(self) -> int: ...

    @property
    def seq_len(self) -> int:
        """Positions of each sample."""
        ...

    @property
    def sources(self) -> "dict[str, SampleStream]":
        """The sources of a mixture by name; of a single source none."""
        return {}

    def train_batch(self, first: int, count: int) -> Batch:
        """Training samples `first` … `first + count − 1` of the global stream."""
        return self.rows(np.arange(first, first + count))

    def validation_batch(self, first: int, count: int) -> Batch:
        """Held-out samples `first` … `first + count − 1`; rows after the last one have no valid label.

        Their order is the same for every seed and mixes the whole stream, so that any first part is a fair sample.
        """
        return self.rows(np.arange(first, first + count), validation=True)

    def num_valid_tokens(self, first: int, count: int) -> int:
        """Labels that count in a range of training samples."""
        ...

    def lengths(self, index: np.ndarray, validation: bool = False) -> np.ndarray | None:
        """How many positions each of any training or held-out samples fills, the rest being padding at its end; None
        where micro-batches are not to be cut to what is filled."""
        return None

    def rows(self, index: np.ndarray, validation: bool = False) -> Batch:
        """Any training or held-out samples, by their indices in the streams; held-out ones after the last come last,
        without a valid label."""
        ...


class Dataset(SampleStream):
    """The samples of a store, of `seq_len` positions each, in an order that `seed` names.

    packing `concatenate`: the stream of tokens is cut every `seq_len`, and what a sample holds is read as one document.
    `documents`: cut alike, but each document in it stands for itself. `whole`: likewise, and only documents that are
    longer than a sample are cut. `none`: a sample is one document of at most `seq_len` positions. Raises ConfigError
    where the store is too small, or `held_out` (the fraction of held-out windows) is not within 0 … 0.5.
    """

    def __init__(
        self,
        store: TokenStore,
        seq_len: int,
        seed: int = 0,
        validation_split: float = 0.0,
        packing: Packing = "concatenate",
    ) -> None:
        self.store, self.seed, self.packing = store, seed, packing
        self.windows = Windows(store.header.num_tokens, seq_len, validation_split)
        if packing == "next_fit":
            self.windows = PackedDocuments(store.header.num_tokens, seq_len, validation_split, store.document_starts)
        elif packing == "none":
            self.windows = SingleDocuments(store.header.num_tokens, seq_len, validation_split, store.document_starts)
        self._masks_documents = packing in ("document_mask", "next_fit")
        """Several documents in a sample, each of which sees itself alone."""

    @property
    def fingerprint(self) -> str:
        return self.store.fingerprint

    @property
    def num_train_samples(self) -> int:
        return self.windows.num_train

    @property
    def num_validation_samples(self) -> int:
        return self.windows.num_validation

    @property
    def seq_len(self) -> int:
        return self.windows.seq_len

    def rows(self, index: np.ndarray, validation: bool = False) -> Batch:
        return self._read_windows(self._window_indices(index, validation), len(index))

    def lengths(self, index: np.ndarray, validation: bool = False) -> np.ndarray | None:
        return None if self.packing != "none" else self.windows.lengths(self._window_indices(index, validation))

    def num_valid_tokens(self, first: int, count: int) -> int:
        """Labels that count in a range of training samples; where every token is learnt, without reading one."""
        return self.num_valid_tokens_at(np.arange(first, first + count))

    def num_valid_tokens_at(self, index: np.ndarray) -> int:
        """Labels that count in any training samples."""
        return self._count_valid_tokens(self._window_indices(index, validation=False))

    def num_validation_valid_tokens(self, first: int, count: int) -> int:
        """Labels that count in a range of held-out samples."""
        return self._count_valid_tokens(self._window_indices(np.arange(first, first + count), validation=True))

    def sample_prompt(self, count: int) -> np.ndarray:
        """At most `count` tokens from where a held-out document begins, or a training one if none is held out; from
        inside one if none begins there."""
        is_held_out = self.num_validation_samples > 0
        num_samples = self.num_validation_samples if is_held_out else self.num_train_samples
        windows = self._window_indices(np.arange(min(_PROMPT_CANDIDATES, num_samples)), is_held_out)
        stops = self.windows.starts(windows) + self.windows.lengths(windows)
        firsts, found = self.store.document_starts, []
        for start, stop in zip(self.windows.starts(windows).tolist(), stops.tolist(), strict=True):
            document = int(np.searchsorted(firsts, start))
            begins = document < len(firsts) and firsts[document] < stop
            begin = int(firsts[document]) if begins else start
            following = int(np.searchsorted(firsts, begin, side="right"))
            end = int(firsts[following]) - 1 if following < len(firsts) else self.store.header.num_tokens - 1
            found.append((begins, min(end, stop, begin + count) - begin, begin))
        _, length, begin = max(found, key=lambda one: one[:2])
        return self.store.read(begin, begin + length)

    def _window_indices(self, index: np.ndarray, validation: bool) -> np.ndarray:
        if not validation:
            return self.windows.train_windows(positions_at(index, self.num_train_samples, self.seed))
        index = index[index < self.num_validation_samples]
        return self.windows.validation_windows(permute(index, self.num_validation_samples, random_key("held out")))

    def _read_windows(self, windows: np.ndarray, rows: int) -> Batch:
        tokens_BS = np.zeros((rows, self.seq_len), np.int64)
        labels_BS = np.full_like(tokens_BS, IGNORE_INDEX)
        starts, lengths = self.windows.starts(windows), self.windows.lengths(windows)
        for row, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True)):
            tokens = self.store.read(start, start + length + 1)
            tokens_BS[row, :length] = tokens[:-1]
            labels_BS[row, :length] = tokens[1:]
        if not self._masks_documents:
            positions_BS, num_valid = None, int(lengths.sum())
        else:
            row, offset = self._document_boundaries(starts, lengths)
            labels_BS[row, offset - 1] = IGNORE_INDEX  # nothing before a document tells how it begins
            positions_BS, num_valid = self._positions(rows, lengths, row, offset), int(lengths.sum()) - len(row)
        if not self.store.has_full_loss:
            num_valid = self._apply_loss_mask(labels_BS, starts, lengths)
        return Batch(tokens_BS, labels_BS, num_valid, positions_BS)

    def _document_boundaries(self, starts: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Row and offset of each document that begins after the first token of a window, and at its last label the
        latest."""
        firsts = self.store.document_starts
        low, high = (np.searchsorted(firsts, starts + bound, side="right") for bound in (0, lengths))
        counts = high - low
        row = np.repeat(np.arange(len(starts)), counts)
        document = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts) + low[row]
        return row, firsts[document] - starts[row]

    def _positions(self, rows: int, lengths: np.ndarray, row: np.ndarray, offset: np.ndarray) -> np.ndarray:
        """Places in documents; what fills a row up counts as one more."""
        begun_BS = np.zeros((rows, self.seq_len), np.int32)
        inside = offset < self.seq_len
        begun_BS[row[inside], offset[inside]] = offset[inside]
        short = np.flatnonzero(lengths < self.seq_len)
        begun_BS[short, lengths[short]] = lengths[short]
        np.maximum.accumulate(begun_BS, axis=1, out=begun_BS)
        return np.subtract(np.arange(self.seq_len, dtype=np.int32), begun_BS, out=begun_BS)

    def _apply_loss_mask(self, labels_BS: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> int:
        """Takes labels out that are not to be learnt; the number of those that are."""
        for row, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True)):
            counted = self.store.read_loss_mask(start + 1, start + length + 1)
            if counted is not None:
                labels_BS[row, :length][counted == 0] = IGNORE_INDEX
        return int((labels_BS != IGNORE_INDEX).sum())

    def _count_valid_tokens(self, windows: np.ndarray) -> int:
        starts, lengths = self.windows.starts(windows), self.windows.lengths(windows)
        row = offset = np.zeros(0, np.int64)
        if self._masks_documents:
            row, offset = self._document_boundaries(starts, lengths)
        total = int(lengths.sum()) - len(row)
        if self.store.has_full_loss:
            return total
        for index, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True)):
            counted = self.store.read_loss_mask(start + 1, start + length + 1)
            if counted is not None:
                left_out = counted == 0
                total -= int(left_out.sum()) - int(left_out[offset[row == index] - 1].sum())
        return total


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
