"""Dataset that blends the samples of several sources."""

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np

from muster.data.blend import BlendOrder, BlendWeights
from muster.data.dataset import IGNORE_INDEX, Batch, Dataset, SampleStream
from muster.data.sample_order import permute, random_key


class BlendedDataset(SampleStream):
    """Samples of several sources in the proportions of `schedule`, each source in its own order.

    The validation samples are those of all sources, shuffled together.
    """

    def __init__(self, sources: Mapping[str, Dataset], schedule: Sequence[BlendWeights], seed: int) -> None:
        self.by_name = dict(sources)
        self._datasets = list(self.by_name.values())
        self.order = BlendOrder(schedule, seed)
        self._validation_before = np.cumsum([0, *(dataset.num_validation_samples for dataset in self._datasets)])

    @property
    def fingerprint(self) -> str:
        fingerprints = repr([(name, dataset.fingerprint) for name, dataset in self.by_name.items()])
        return f"mixture-{hashlib.sha256(fingerprints.encode()).hexdigest()[:16]}"

    @property
    def num_train_samples(self) -> int:
        """Number of samples of all sources together."""
        return sum(dataset.num_train_samples for dataset in self._datasets)

    @property
    def num_validation_samples(self) -> int:
        return int(self._validation_before[-1])

    @property
    def seq_len(self) -> int:
        return self._datasets[0].seq_len

    @property
    def sources(self) -> dict[str, SampleStream]:
        return dict(self.by_name)

    def rows(self, index: np.ndarray, validation: bool = False) -> Batch:
        source, local_index = self._locate(index, validation)
        batches = [dataset.rows(local_index[source == k], validation) for k, dataset in enumerate(self._datasets)]
        return self._merge_batches(source, batches)

    def lengths(self, index: np.ndarray, validation: bool = False) -> np.ndarray | None:
        source, local_index = self._locate(index, validation)
        lengths_B = np.zeros(len(index), np.int64)
        for k, dataset in enumerate(self._datasets):
            if (found := dataset.lengths(local_index[source == k], validation)) is None:
                return None
            lengths_B[source == k] = found
        return lengths_B

    def _locate(self, index: np.ndarray, validation: bool) -> tuple[np.ndarray, np.ndarray]:
        """Return the source of each sample and its index within that source.

        Validation samples beyond the last one get an index beyond the last of a source.
        """
        if not validation:
            first, end = (int(index.min()), int(index.max()) + 1) if len(index) else (0, 0)
            source, local_index = self.order.locate(first, end - first)
            return source[index - first], local_index[index - first]
        position = index.copy()
        inside = index < self.num_validation_samples
        position[inside] = permute(index[inside], self.num_validation_samples, random_key("held out"))
        source = np.searchsorted(self._validation_before, position, side="right") - 1
        source = np.minimum(source, len(self._datasets) - 1)
        return source, position - self._validation_before[source]

    def num_valid_tokens(self, first: int, count: int) -> int:
        source, index = self.order.locate(first, count)
        return sum(dataset.num_valid_tokens_at(index[source == k]) for k, dataset in enumerate(self._datasets))

    def _merge_batches(self, source: np.ndarray, batches: Sequence[Batch]) -> Batch:
        """Return one batch with the rows of each source's batch at the places that `source` says."""
        tokens_BS = np.zeros((len(source), self.seq_len), np.int64)
        labels_BS = np.full_like(tokens_BS, IGNORE_INDEX)
        positions_BS = None if batches[0].positions_BS is None else np.zeros(tokens_BS.shape, np.int32)
        for k, batch in enumerate(batches):
            rows = source == k
            tokens_BS[rows] = batch.tokens_BS
            labels_BS[rows] = batch.labels_BS
            if positions_BS is not None and batch.positions_BS is not None:
                positions_BS[rows] = batch.positions_BS
        return Batch(tokens_BS, labels_BS, sum(batch.num_valid_tokens for batch in batches), positions_BS)
