"""Samples from several sources, mixed."""

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np

from muster.data.dataset import NOT_COUNTED, Batch, Dataset, Samples
from muster.data.mixture import MixStage, MixtureOrder
from muster.data.order import key_of, permute


class MixedDataset(Samples):
    """The samples of several sources, in the proportions of `stages`; each source in the order of its own.

    The held-out samples are all those of the sources, mixed by their numbers.
    """

    def __init__(self, sources: Mapping[str, Dataset], stages: Sequence[MixStage], seed: int) -> None:
        self.sources = dict(sources)
        self._list = list(self.sources.values())
        self.order = MixtureOrder(stages, seed)
        self._held_before = np.cumsum([0, *(source.num_held_out_samples for source in self._list)])

    @property
    def fingerprint(self) -> str:
        said = repr([(name, source.fingerprint) for name, source in self.sources.items()])
        return f"mixture-{hashlib.sha256(said.encode()).hexdigest()[:16]}"

    @property
    def num_train_samples(self) -> int:
        """Of all sources together."""
        return sum(source.num_train_samples for source in self._list)

    @property
    def num_held_out_samples(self) -> int:
        return int(self._held_before[-1])

    @property
    def seq_len(self) -> int:
        return self._list[0].seq_len

    @property
    def parts(self) -> dict[str, Samples]:
        return dict(self.sources)

    def train_batch(self, first: int, count: int) -> Batch:
        source, index = self.order.locate(first, count)
        return self._gather(source, [one.train_samples(index[source == k]) for k, one in enumerate(self._list)])

    def held_out_batch(self, first: int, count: int) -> Batch:
        total = self.num_held_out_samples
        index = np.arange(first, first + count)
        place = permute(index[index < total], total, key_of("held out")) if total else index[:0]
        place = np.append(place, np.arange(total, total + count - len(place)))
        source = np.minimum(np.searchsorted(self._held_before, place, side="right") - 1, len(self._list) - 1)
        own = place - self._held_before[source]
        return self._gather(source, [one.held_out_samples(own[source == k]) for k, one in enumerate(self._list)])

    def num_valid(self, first: int, count: int) -> int:
        source, index = self.order.locate(first, count)
        return sum(one.num_valid_of(index[source == k]) for k, one in enumerate(self._list))

    def _gather(self, source: np.ndarray, batches: Sequence[Batch]) -> Batch:
        """The rows of each source's batch in the places of the whole one's."""
        tokens_BS = np.zeros((len(source), self.seq_len), np.int64)
        labels_BS = np.full_like(tokens_BS, NOT_COUNTED)
        positions_BS = None if batches[0].positions_BS is None else np.zeros(tokens_BS.shape, np.int32)
        for k, batch in enumerate(batches):
            rows = source == k
            tokens_BS[rows], labels_BS[rows] = batch.tokens_BS, batch.labels_BS
            if positions_BS is not None and batch.positions_BS is not None:
                positions_BS[rows] = batch.positions_BS
        return Batch(tokens_BS, labels_BS, sum(batch.num_valid for batch in batches), positions_BS)
