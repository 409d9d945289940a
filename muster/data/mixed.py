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

    def rows(self, index: np.ndarray, held_out: bool = False) -> Batch:
        source, own = self._places(index, held_out)
        return self._gather(source, [one.rows(own[source == k], held_out) for k, one in enumerate(self._list)])

    def lengths(self, index: np.ndarray, held_out: bool = False) -> np.ndarray | None:
        source, own = self._places(index, held_out)
        lengths_B = np.zeros(len(index), np.int64)
        for k, one in enumerate(self._list):
            if (found := one.lengths(own[source == k], held_out)) is None:
                return None
            lengths_B[source == k] = found
        return lengths_B

    def _places(self, index: np.ndarray, held_out: bool) -> tuple[np.ndarray, np.ndarray]:
        """Source of each sample, and its index within it; held-out ones after the last get one beyond its own."""
        if not held_out:
            first, end = (int(index.min()), int(index.max()) + 1) if len(index) else (0, 0)
            source, own = self.order.locate(first, end - first)
            return source[index - first], own[index - first]
        place, inside = index.copy(), index < self.num_held_out_samples
        place[inside] = permute(index[inside], self.num_held_out_samples, key_of("held out"))
        source = np.minimum(np.searchsorted(self._held_before, place, side="right") - 1, len(self._list) - 1)
        return source, place - self._held_before[source]

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
