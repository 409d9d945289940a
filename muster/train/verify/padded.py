"""The data that plans are compared on: the run's own, with some labels that don't count."""

import numpy as np

from muster.data.dataset import NOT_COUNTED, Batch, Dataset


class PaddedDataset(Dataset):
    """The training samples of a dataset, the last labels of some of which don't count, as under padding.

    So sequences have unequal numbers of counted tokens: a plan that counts padding, or that takes a mean of means,
    gets another loss, which it would not on a stream that fills every window.
    """

    def __init__(self, dataset: Dataset) -> None:
        self.store, self.seed, self.windows = dataset.store, dataset.seed, dataset.windows

    def train_batch(self, first: int, count: int) -> Batch:
        batch = super().train_batch(first, count)
        for row, keep in enumerate(self._kept(first, count)):
            batch.labels_BS[row, keep:] = NOT_COUNTED
        return Batch(batch.tokens_BS, batch.labels_BS, int((batch.labels_BS != NOT_COUNTED).sum()))

    def num_valid(self, first: int, count: int) -> int:
        lengths = self.windows.num_valid(self._train_windows(first, count))
        return int(np.minimum(lengths, self._kept(first, count)).sum())

    def _kept(self, first: int, count: int) -> np.ndarray:
        """How many labels of each sample may count: all, 7/8, 6/8, 5/8 of a sequence, and again; one at least."""
        eighths = 8 - np.arange(first, first + count) % 4
        return np.maximum(self.windows.seq_len * eighths // 8, 1)
