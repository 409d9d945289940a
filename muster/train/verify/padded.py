"""Data on which plans are compared: the run's own, with some labels ignored."""

import numpy as np

from muster.data.dataset import IGNORE_INDEX, Batch, SampleStream


class PaddedDataset(SampleStream):
    """Training samples of a dataset with the last labels of some of them ignored, as under padding.

    So sequences have unequal numbers of non-ignored tokens: a plan that counts padding, or takes a mean of means, gets
    another loss, which it would not on a stream that fills every window.
    """

    def __init__(self, dataset: SampleStream) -> None:
        self._dataset = dataset

    @property
    def fingerprint(self) -> str:
        return self._dataset.fingerprint

    @property
    def num_train_samples(self) -> int:
        return self._dataset.num_train_samples

    @property
    def num_validation_samples(self) -> int:
        return self._dataset.num_validation_samples

    @property
    def seq_len(self) -> int:
        return self._dataset.seq_len

    def rows(self, index: np.ndarray, validation: bool = False) -> Batch:
        """Return samples padded to whole sequences, whatever their lengths: hidden states are compared position by
        position."""
        batch = self._dataset.rows(index, validation)
        if validation:
            return batch
        for row, keep in enumerate(self._num_labels_kept(index)):
            batch.labels_BS[row, keep:] = IGNORE_INDEX
        return Batch(batch.tokens_BS, batch.labels_BS, int((batch.labels_BS != IGNORE_INDEX).sum()), batch.positions_BS)

    def num_valid_tokens(self, first: int, count: int) -> int:
        return self.train_batch(first, count).num_valid_tokens

    def _num_labels_kept(self, index: np.ndarray) -> np.ndarray:
        """Return the number of labels of each sample that count: all, 7/8, 6/8, 5/8 of a sequence, and again; at least
        one."""
        return np.maximum(self.seq_len * (8 - index % 4) // 8, 1)
