"""How documents lie in samples: whole as far as they fit, or each alone."""

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from muster.data.sample_order import Windows
from muster.spec.errors import ConfigError


@dataclass(frozen=True, eq=False)
class PackedDocuments(Windows):
    """Samples of whole documents that follow on one another, as many as fit in `seq_len` positions; only a document
    longer than that is cut.

    Next-fit over the stream of documents: a pure function of their lengths, made when the store is opened, in about two
    seconds per million samples. The last token of a sample is predicted and not read, so a document of `seq_len` + 1
    tokens fits.
    """

    document_starts: np.ndarray = field(default_factory=lambda: np.zeros(1, np.int64))

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self._spans

    @property
    def num_windows(self) -> int:
        return len(self._spans[0])

    def lengths(self, windows: np.ndarray) -> np.ndarray:
        """How many positions of each sample are filled."""
        return self._spans[1][windows]

    def starts(self, windows: np.ndarray) -> np.ndarray:
        return self._spans[0][windows]

    @cached_property
    def _spans(self) -> tuple[np.ndarray, np.ndarray]:
        """First token and filled positions of each sample."""
        ends = np.append(self.document_starts[1:], self.num_tokens)
        starts, lengths, at, document = [], [], 0, 0
        while document < len(ends):
            fitting = int(np.searchsorted(ends, at + self.seq_len + 1, side="right"))
            if fitting > document:
                last, document = int(ends[fitting - 1]), fitting
                if last - at > 1:  # else only the end is left of a document that was cut, which has been predicted
                    starts.append(at)
                    lengths.append(last - at - 1)
                at = last
            else:
                starts.append(at)
                lengths.append(self.seq_len)
                at += self.seq_len
        return np.array(starts, np.int64), np.array(lengths, np.int64)


@dataclass(frozen=True, eq=False)
class SingleDocuments(Windows):
    """Samples of one document each; of one that is longer than `seq_len` positions, a sample for each piece of so many.
    The last token of a document is predicted and not read."""

    document_starts: np.ndarray = field(default_factory=lambda: np.zeros(1, np.int64))

    def __post_init__(self) -> None:
        needed = 2 if self.validation_split else 1
        self._require_fraction()
        if self.num_windows < needed:
            raise ConfigError(
                f"data.source has {self.num_windows} documents to learn, but data.packing none needs {needed}: one to"
                " train on" + (" and one held out" if self.validation_split else "")
            )

    @property
    def num_windows(self) -> int:
        return int(self._samples_before[-1])

    def lengths(self, windows: np.ndarray) -> np.ndarray:
        """How many positions each sample has."""
        document, start = self._locate(windows)
        return np.minimum(self.seq_len, self._ends[document] - 1 - start)

    def starts(self, windows: np.ndarray) -> np.ndarray:
        return self._locate(windows)[1]

    def _locate(self, windows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The document of each sample, and the first token that it reads."""
        document = np.searchsorted(self._samples_before, windows, side="right") - 1
        return document, self.document_starts[document] + (windows - self._samples_before[document]) * self.seq_len

    @cached_property
    def _ends(self) -> np.ndarray:
        return np.append(self.document_starts[1:], self.num_tokens)

    @cached_property
    def _samples_before(self) -> np.ndarray:
        """Samples before each document, and in all. A document of one token has nothing to predict."""
        pieces = -(-(self._ends - self.document_starts - 1) // self.seq_len)
        return np.concatenate(([0], np.cumsum(pieces)))
