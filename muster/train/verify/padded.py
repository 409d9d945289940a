"""The data that plans are compared on: the run's own, with some labels that don't count."""

import numpy as np

from muster.data.dataset import IGNORE_INDEX, Batch, SampleStream


class PaddedDataset(SampleStream):
    """The training samples of a dataset, the last labels of some of which don't count, as under padding.

    So sequences have unequal numbers of counted tokens: a plan that counts padding, or that takes a mean of means,
    gets another loss, which it would not on a stream that fills every window.
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
        """Padded to whole sequences, whatever `lengths` its own have: hidden states are compared place by place."""
        batch = self._dataset.rows(index, validation)
        if validation:
            return batch
        for row, keep in enumerate(self._num_labels_kept(index)):
            batch.labels_BS[row, keep:] = IGNORE_INDEX
        return Batch(batch.tokens_BS, batch.labels_BS, int((batch.labels_BS != IGNORE_INDEX).sum()), batch.positions_BS)

    def num_valid_tokens(self, first: int, count: int) -> int:
        return self.train_batch(first, count).num_valid_tokens

    def _num_labels_kept(self, index: np.ndarray) -> np.ndarray:
        """How many labels of each sample may count: all, 7/8, 6/8, 5/8 of a sequence, and again; one at least."""
        return np.maximum(self.seq_len * (8 - index % 4) // 8, 1)
