"""The data that plans are compared on: the run's own, with some labels that don't count."""

import numpy as np

from muster.data.dataset import NOT_COUNTED, Batch, Samples


class PaddedDataset(Samples):
    """The training samples of a dataset, the last labels of some of which don't count, as under padding.

    So sequences have unequal numbers of counted tokens: a plan that counts padding, or that takes a mean of means,
    gets another loss, which it would not on a stream that fills every window.
    """

    def __init__(self, dataset: Samples) -> None:
        self._own = dataset

    @property
    def fingerprint(self) -> str:
        return self._own.fingerprint

    @property
    def num_train_samples(self) -> int:
        return self._own.num_train_samples

    @property
    def num_held_out_samples(self) -> int:
        return self._own.num_held_out_samples

    @property
    def seq_len(self) -> int:
        return self._own.seq_len

    def rows(self, index: np.ndarray, held_out: bool = False) -> Batch:
        """Padded to whole sequences, whatever `lengths` its own have: hidden states are compared place by place."""
        batch = self._own.rows(index, held_out)
        if held_out:
            return batch
        for row, keep in enumerate(self._kept(index)):
            batch.labels_BS[row, keep:] = NOT_COUNTED
        return Batch(batch.tokens_BS, batch.labels_BS, int((batch.labels_BS != NOT_COUNTED).sum()), batch.positions_BS)

    def num_valid(self, first: int, count: int) -> int:
        return self.train_batch(first, count).num_valid

    def _kept(self, index: np.ndarray) -> np.ndarray:
        """How many labels of each sample may count: all, 7/8, 6/8, 5/8 of a sequence, and again; one at least."""
        return np.maximum(self.seq_len * (8 - index % 4) // 8, 1)
