"""How documents lie in samples: cut where a sample ends, or whole as far as they fit."""

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from muster.data.order import Windows


@dataclass(frozen=True, eq=False)
class WholeDocuments(Windows):
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

    def num_valid(self, windows: np.ndarray) -> np.ndarray:
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
