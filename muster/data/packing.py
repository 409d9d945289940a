"""Packing of documents into samples: several whole documents a sample, or one document each."""

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from muster.data.sample_order import Windows
from muster.spec.errors import ConfigError


@dataclass(frozen=True, eq=False)
class PackedDocuments(Windows):
    """Samples that hold as many whole documents as fit in `seq_len` positions.

    Next-fit bin packing over the stream of documents: each document goes into the current sample or opens the next
    one; only a document longer than a sample is cut. The packing is a pure function of the documents' lengths, computed
    when the store is opened, in about two seconds per million samples. The last token of a sample is predicted but not
    read, so documents of `seq_len` + 1 tokens in all fit. With `seq_len` 4 and documents of 3, 2 and 4 tokens:

        sample 0: documents 0 and 1 (5 tokens, 4 positions)
        sample 1: document 2 (4 tokens, 3 positions, 1 of padding)
    """

    document_starts: np.ndarray = field(default_factory=lambda: np.zeros(1, np.int64))

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self._spans

    @property
    def num_windows(self) -> int:
        return len(self._spans[0])

    def lengths(self, windows: np.ndarray) -> np.ndarray:
        """Return the number of filled positions of each sample."""
        return self._spans[1][windows]

    def starts(self, windows: np.ndarray) -> np.ndarray:
        return self._spans[0][windows]

    @cached_property
    def _spans(self) -> tuple[np.ndarray, np.ndarray]:
        """First token and number of filled positions of each sample."""
        ends = np.append(self.document_starts[1:], self.num_tokens)
        starts: list[int] = []
        lengths: list[int] = []
        begin = 0
        document = 0
        while document < len(ends):
            next_document = int(np.searchsorted(ends, begin + self.seq_len + 1, side="right"))
            if next_document > document:
                document = next_document
                end = int(ends[document - 1])
                # A rest of one token is the end of a document that was cut: the sample before has predicted it.
                if end - begin > 1:
                    starts.append(begin)
                    lengths.append(end - begin - 1)
                begin = end
            else:
                starts.append(begin)
                lengths.append(self.seq_len)
                begin += self.seq_len
        return np.array(starts, np.int64), np.array(lengths, np.int64)


@dataclass(frozen=True, eq=False)
class SingleDocuments(Windows):
    """Samples of one document each.

    A document of more than `seq_len` positions becomes several samples. The last token of a document is predicted but
    not read.
    """

    document_starts: np.ndarray = field(default_factory=lambda: np.zeros(1, np.int64))

    def __post_init__(self) -> None:
        self._require_fraction()
        needed = 2 if self.validation_split else 1
        if self.num_windows < needed:
            raise ConfigError(
                f"data.source has {self.num_windows} documents to train on, but data.packing none needs {needed}: one"
                " for training" + (" and one for validation" if self.validation_split else "")
            )

    @property
    def num_windows(self) -> int:
        return int(self._samples_before[-1])

    def lengths(self, windows: np.ndarray) -> np.ndarray:
        """Return the number of positions of each sample."""
        document, start = self._locate(windows)
        return np.minimum(self.seq_len, self._ends[document] - 1 - start)

    def starts(self, windows: np.ndarray) -> np.ndarray:
        return self._locate(windows)[1]

    def _locate(self, windows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the document of each sample, and the first token that the sample reads."""
        document = np.searchsorted(self._samples_before, windows, side="right") - 1
        return document, self.document_starts[document] + (windows - self._samples_before[document]) * self.seq_len

    @cached_property
    def _ends(self) -> np.ndarray:
        return np.append(self.document_starts[1:], self.num_tokens)

    @cached_property
    def _samples_before(self) -> np.ndarray:
        """Number of samples before each document, followed by the number of all.

        A document of one token has nothing to predict, and no sample.
        """
        samples = -(-(self._ends - self.document_starts - 1) // self.seq_len)
        return np.concatenate(([0], np.cumsum(samples)))
