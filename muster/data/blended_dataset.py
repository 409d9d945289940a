"""Samples from several sources, mixed."""

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np

from muster.data.blend import BlendOrder, BlendWeights
from muster.data.dataset import IGNORE_INDEX, Batch, Dataset, SampleStream
from muster.data.sample_order import permute, random_key


class BlendedDataset(SampleStream):
    """The samples of several sources, in the proportions of `stages`; each source in the order of its own.

    The held-out samples are all those of the sources, mixed by their numbers.
    """

    def __init__(self, sources: Mapping[str, Dataset], schedule: Sequence[BlendWeights], seed: int) -> None:
        self.by_name = dict(sources)
        self._datasets = list(self.by_name.values())
        self.order = BlendOrder(schedule, seed)
        self._validation_before = np.cumsum([0, *(source.num_validation_samples for source in self._datasets)])

    @property
    def fingerprint(self) -> str:
        said = repr([(name, source.fingerprint) for name, source in self.by_name.items()])
        return f"mixture-{hashlib.sha256(said.encode()).hexdigest()[:16]}"

    @property
    def num_train_samples(self) -> int:
        """Of all sources together."""
        return sum(source.num_train_samples for source in self._datasets)

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
        source, own = self._locate(index, validation)
        return self._merge_batches(
            source, [one.rows(own[source == k], validation) for k, one in enumerate(self._datasets)]
        )

    def lengths(self, index: np.ndarray, validation: bool = False) -> np.ndarray | None:
        source, own = self._locate(index, validation)
        lengths_B = np.zeros(len(index), np.int64)
        for k, one in enumerate(self._datasets):
            if (found := one.lengths(own[source == k], validation)) is None:
                return None
            lengths_B[source == k] = found
        return lengths_B

    def _locate(self, index: np.ndarray, validation: bool) -> tuple[np.ndarray, np.ndarray]:
        """Source of each sample, and its index within it; held-out ones after the last get one beyond its own."""
        if not validation:
            first, end = (int(index.min()), int(index.max()) + 1) if len(index) else (0, 0)
            source, own = self.order.locate(first, end - first)
            return source[index - first], own[index - first]
        place, inside = index.copy(), index < self.num_validation_samples
        place[inside] = permute(index[inside], self.num_validation_samples, random_key("held out"))
        source = np.minimum(np.searchsorted(self._validation_before, place, side="right") - 1, len(self._datasets) - 1)
        return source, place - self._validation_before[source]

    def num_valid_tokens(self, first: int, count: int) -> int:
        source, index = self.order.locate(first, count)
        return sum(one.num_valid_tokens_at(index[source == k]) for k, one in enumerate(self._datasets))

    def _merge_batches(self, source: np.ndarray, batches: Sequence[Batch]) -> Batch:
        """The rows of each source's batch in the places of the whole one's."""
        tokens_BS = np.zeros((len(source), self.seq_len), np.int64)
        labels_BS = np.full_like(tokens_BS, IGNORE_INDEX)
        positions_BS = None if batches[0].positions_BS is None else np.zeros(tokens_BS.shape, np.int32)
        for k, batch in enumerate(batches):
            rows = source == k
            tokens_BS[rows], labels_BS[rows] = batch.tokens_BS, batch.labels_BS
            if positions_BS is not None and batch.positions_BS is not None:
                positions_BS[rows] = batch.positions_BS
        return Batch(tokens_BS, labels_BS, sum(batch.num_valid_tokens for batch in batches), positions_BS)
