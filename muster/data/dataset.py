"""Datasets over token stores: training and validation batches by global sample index."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from muster.data.packing import PackedDocuments, SingleDocuments
from muster.data.sample_order import Windows, permute, positions_at, random_key
from muster.data.store import TokenStore
from muster.spec.errors import MusterError

IGNORE_INDEX = -100
"""Label of a position that is left out of the loss, as in torch.nn.functional.cross_entropy."""
_PROMPT_CANDIDATES = 64
"""Number of samples that `sample_prompt` searches for the beginning of a document."""
Packing = Literal["concatenate", "document_mask", "next_fit", "none"]


@dataclass(frozen=True, eq=False, slots=True)
class Batch:
    """Samples of a batch: input tokens, and the label to predict at each position."""

    tokens_BS: np.ndarray
    """Token ids, int64."""
    labels_BS: np.ndarray
    """Next token of each position, int64; IGNORE_INDEX where none is predicted."""
    num_valid_tokens: int
    """Number of labels that contribute to the loss."""
    positions_BS: np.ndarray | None = None
    """Position of each token in its document, int32, 0 where one begins; None: each sample is one document."""


def require_known_ids(batch: Batch, vocab_size: int) -> None:
    """Raise MusterError for a token id that a model has no embedding of; under tensor parallelism it would be taken for
    zeros."""
    largest = max(int(array.max(initial=0)) for array in (batch.tokens_BS, batch.labels_BS))
    if largest >= vocab_size:
        raise MusterError(
            f"the data have the token id {largest}, but the last of model.vocab_size {vocab_size} is {vocab_size - 1}:"
            " they were made with another tokenizer, or are damaged"
        )


class SampleStream(Protocol):
    """Endless stream of training samples, and a finite set of validation samples: the interface of training to data.

    Sample g of the stream is the same whoever reads it and however the stream is split over ranks.
    """

    @property
    def fingerprint(self) -> str:
        """Identifier that differs between streams of different tokens."""
        ...

    @property
    def num_train_samples(self) -> int:
        """Number of samples of one epoch; the training stream itself is endless."""
        ...

    @property
    def num_validation_samples(self) -> int: ...

    @property
    def seq_len(self) -> int:
        """Positions of each sample."""
        ...

    @property
    def sources(self) -> "dict[str, SampleStream]":
        """Sources of a blend by name; empty for a single source."""
        return {}

    def train_batch(self, first: int, count: int) -> Batch:
        """Return training samples `first` … `first + count − 1` of the global stream."""
        return self.rows(np.arange(first, first + count))

    def validation_batch(self, first: int, count: int) -> Batch:
        """Return validation samples `first` … `first + count − 1`; rows beyond the last one have no valid label.

        They are shuffled, in an order that is the same for every seed, so that the first n are a fair sample.
        """
        return self.rows(np.arange(first, first + count), validation=True)

    def num_valid_tokens(self, first: int, count: int) -> int:
        """Return the number of valid labels of training samples `first` … `first + count − 1`."""
        ...

    def lengths(self, index: np.ndarray, validation: bool = False) -> np.ndarray | None:
        """Return the number of positions that each sample fills, the rest being padding; None: don't bucket by length.

        `index` lists training samples, or validation samples.
        """
        return None

    def rows(self, index: np.ndarray, validation: bool = False) -> Batch:
        """Return any training or validation samples, by their indices.

        Validation samples beyond the last one come last, without a valid label.
        """
        ...


class Dataset(SampleStream):
    """Samples of a token store, of `seq_len` positions each, shuffled by `seed`.

    Packing decides how documents become samples:

    * `concatenate`: the token stream is cut every `seq_len` tokens, and a sample is read as one document;
    * `document_mask`: cut likewise, but attention and positions are confined to each document;
    * `next_fit`: likewise, and only documents longer than a sample are cut (`PackedDocuments`);
    * `none`: a sample is one document of at most `seq_len` positions (`SingleDocuments`).

    `validation_split` is the fraction of samples held out for validation. Raises ConfigError if the store is too small
    or the fraction is not within 0 … 0.5.
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
        """True if a sample holds several documents that don't attend to each other."""

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
        """Return the number of valid labels of a range of training samples.

        Where every token contributes to the loss, no token is read for it.
        """
        return self.num_valid_tokens_at(np.arange(first, first + count))

    def num_valid_tokens_at(self, index: np.ndarray) -> int:
        """Return the number of valid labels of any training samples."""
        return self._count_valid_tokens(self._window_indices(index, validation=False))

    def num_validation_valid_tokens(self, first: int, count: int) -> int:
        """Return the number of valid labels of a range of validation samples."""
        return self._count_valid_tokens(self._window_indices(np.arange(first, first + count), validation=True))

    def sample_prompt(self, count: int) -> np.ndarray:
        """Return at most `count` tokens from the beginning of a validation document, for a text sample.

        Without a validation split a training document is taken; where no document begins within the samples that are
        searched, the tokens come from inside one.
        """
        validation = self.num_validation_samples > 0
        num_samples = self.num_validation_samples if validation else self.num_train_samples
        windows = self._window_indices(np.arange(min(_PROMPT_CANDIDATES, num_samples)), validation)
        starts = self.windows.starts(windows)
        stops = starts + self.windows.lengths(windows)
        document_starts = self.store.document_starts
        candidates: list[tuple[bool, int, int]] = []
        for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
            document = int(np.searchsorted(document_starts, start))
            is_beginning = document < len(document_starts) and bool(document_starts[document] < stop)
            begin = int(document_starts[document]) if is_beginning else start
            following = int(np.searchsorted(document_starts, begin, side="right"))
            end = self.store.header.num_tokens - 1
            if following < len(document_starts):
                end = int(document_starts[following]) - 1
            candidates.append((is_beginning, min(end, stop, begin + count) - begin, begin))
        _, length, begin = max(candidates, key=lambda candidate: candidate[:2])
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
            labels_BS[row, offset - 1] = IGNORE_INDEX  # no token predicts the first of another document
            positions_BS, num_valid = self._positions(rows, lengths, row, offset), int(lengths.sum()) - len(row)
        if not self.store.has_full_loss:
            num_valid = self._apply_loss_mask(labels_BS, starts, lengths)
        return Batch(tokens_BS, labels_BS, num_valid, positions_BS)

    def _document_boundaries(self, starts: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (row, offset) of each document that begins within a window, after its first token.

        The offset is at most the window's length: there a document's first token is the last label.
        """
        document_starts = self.store.document_starts
        low = np.searchsorted(document_starts, starts, side="right")
        high = np.searchsorted(document_starts, starts + lengths, side="right")
        counts = high - low
        row = np.repeat(np.arange(len(starts)), counts)
        document = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts) + low[row]
        return row, document_starts[document] - starts[row]

    def _positions(self, rows: int, lengths: np.ndarray, row: np.ndarray, offset: np.ndarray) -> np.ndarray:
        """Return the position of each token in its document; the padding of a row counts as one more document.

        Write each document's offset where it begins, spread it to the right with a running maximum, and subtract it:
        documents at offsets 0 and 3 give 0 0 0 3 3 3, and 0 1 2 3 4 5 minus that is 0 1 2 0 1 2.
        """
        begin_BS = np.zeros((rows, self.seq_len), np.int32)
        inside = offset < self.seq_len
        begin_BS[row[inside], offset[inside]] = offset[inside]
        short = np.flatnonzero(lengths < self.seq_len)
        begin_BS[short, lengths[short]] = lengths[short]
        np.maximum.accumulate(begin_BS, axis=1, out=begin_BS)
        return np.subtract(np.arange(self.seq_len, dtype=np.int32), begin_BS, out=begin_BS)

    def _apply_loss_mask(self, labels_BS: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> int:
        """Apply the store's loss mask to labels, in place; return the number of valid labels that remain."""
        for row, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True)):
            loss_mask = self.store.read_loss_mask(start + 1, start + length + 1)
            if loss_mask is not None:
                labels_BS[row, :length][loss_mask == 0] = IGNORE_INDEX
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
            loss_mask = self.store.read_loss_mask(start + 1, start + length + 1)
            if loss_mask is not None:
                masked = loss_mask == 0
                total -= int(masked.sum()) - int(masked[offset[row == index] - 1].sum())
        return total


def sample_digest(tokens_S: np.ndarray) -> bytes:
    """Return a hash of one sample's tokens, the same on every machine."""
    return hashlib.sha256(np.ascontiguousarray(tokens_S, "<i8").data).digest()


class StreamHash:
    """Running hash of a stream of samples: h_k = sha256(h_{k−1} + digest of sample k).

    It depends only on the samples and their order, not on their division into steps.
    """

    START = hashlib.sha256(b"muster sample stream").hexdigest()

    def __init__(self, state: str = START) -> None:
        self.state = state
        """Hash so far, hexadecimal; a StreamHash made with it continues from here."""

    def update(self, digests: Iterable[bytes]) -> None:
        """Add the digests of samples, in global order."""
        state = bytes.fromhex(self.state)
        for digest in digests:
            state = hashlib.sha256(state + digest).digest()
        self.state = state.hex()
