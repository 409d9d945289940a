"""Samples of one path: the part of the stream that a router sends there, and validation samples by their parts."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from muster.data.dataset import IGNORE_INDEX, Batch, Dataset, SampleStream
from muster.data.prefix_router import PrefixRouter, fit_router
from muster.data.sample_order import positions_at
from muster.spec.errors import ConfigError

FITTED_SAMPLES = 20_000
"""Most training samples that a router is fitted to."""
_ROWS = 4096
"""Samples that are routed at a time."""


@dataclass(frozen=True, eq=False)
class SampleRouter:
    """Router of whole samples, and of the parts of validation samples."""

    router: PrefixRouter
    prefix: int
    """First tokens of a sample by which it is routed."""
    reroute_every: int
    """Positions of a validation sample after which its path is chosen anew, by the `prefix` tokens before."""

    @property
    def num_paths(self) -> int:
        """Number of paths."""
        return len(self.router.bias_K)

    def path_of(self, tokens: Sequence[int]) -> int:
        """Return the path of a text, by its first tokens; short ones are repeated, as in training."""
        return int(self.router.route(_prefix(np.asarray(tokens), self.prefix)[None])[0])

    def next_part(self, tokens: Sequence[int]) -> tuple[int, int]:
        """Return the path of the last position of a text, and the number of positions up to the end of its part."""
        part, place = divmod(len(tokens) - 1, self.reroute_every)
        first = part * self.reroute_every
        seen = tokens if part == 0 else tokens[first - self.prefix : first]
        return self.path_of(seen), self.reroute_every - place

    def every(self, positions: int | None) -> "SampleRouter":
        """Return the router that chooses anew after another number of positions; None: after as many as this.
        Raises ConfigError for fewer than it chooses by."""
        if positions is None:
            return self
        if positions < self.prefix:
            raise ConfigError(
                f"--reroute-every {positions} is shorter than the {self.prefix} tokens (outer.route_tokens) that a new"
                f" path is chosen by: expected {self.prefix} or more"
            )
        return SampleRouter(self.router, self.prefix, positions)

    def routes(self, tokens_BS: np.ndarray) -> np.ndarray:
        """Return the path of each position: none, −1, for the first tokens, by which the first part is routed, and for
        each later part that of the tokens before it (arXiv:2403.10616 §2.4.3)."""
        prefix, every = self.prefix, self.reroute_every
        routes_BS = np.full(tokens_BS.shape, -1)
        for first in range(0, tokens_BS.shape[1], every):
            seen = slice(0, prefix) if first == 0 else slice(first - prefix, first)
            chosen_B = self.router.route(tokens_BS[:, seen])
            routes_BS[:, max(first, prefix) : first + every] = chosen_B[:, None]
        return routes_BS

    def with_labels_of(self, path: int | None, batch: Batch) -> Batch:
        """Return a batch with the labels of those parts alone for which a path is chosen; None: any path."""
        routes_BS = self.routes(batch.tokens_BS)
        labels_BS = np.where(routes_BS >= 0 if path is None else routes_BS == path, batch.labels_BS, IGNORE_INDEX)
        return Batch(batch.tokens_BS, labels_BS, int((labels_BS != IGNORE_INDEX).sum()), batch.positions_BS)


@dataclass(frozen=True, eq=False)
class Routing(SampleRouter):
    """Path of each training sample, and the router of others."""

    paths_NT: np.ndarray
    """Paths that train each sample, the nearest first, in the order of the store: int16 [N, T]."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Training samples of each path."""
        return tuple(np.bincount(self.paths_NT.ravel(), minlength=self.num_paths).tolist())


def fit_sample_router(
    dataset: Dataset, paths: int, vocab_size: int, seed: int, prefix: int, reroute_every: int
) -> SampleRouter:
    """Fit a router to the training samples of a dataset, or to some of them where there are many."""
    count = dataset.num_train_samples
    fitted = np.unique(np.linspace(0, count - 1, min(count, FITTED_SAMPLES)).astype(np.int64))
    router = fit_router(prefixes_at(dataset, fitted, prefix), paths, vocab_size, seed)
    return SampleRouter(router, prefix, reroute_every)


def route_samples(dataset: Dataset, router: SampleRouter, top: int = 1) -> Routing:
    """Route all training samples of a dataset by their first tokens, each to its `top` nearest paths. Raises
    ConfigError where a path gets none."""
    count, prefix = dataset.num_train_samples, router.prefix
    parts = (np.arange(first, min(first + _ROWS, count)) for first in range(0, count, _ROWS))
    scores_NK = np.concatenate([router.router.scores(prefixes_at(dataset, part, prefix)) for part in parts])
    paths_NT = np.argsort(-scores_NK, axis=1, kind="stable")[:, :top].astype(np.int16)
    routing = Routing(router.router, prefix, router.reroute_every, paths_NT)
    if min(routing.sizes) == 0:
        raise ConfigError(
            f"outer.modules make {router.num_paths} paths, but the router gives samples to"
            f" {np.count_nonzero(routing.sizes)} of them alone, among {count}: give fewer modules or more text"
        )
    return routing


def prefixes_at(dataset: Dataset, positions: np.ndarray, prefix: int) -> np.ndarray:
    """Return the first tokens of training samples, by their positions in the store; short ones are repeated."""
    windows = dataset.windows.train_windows(positions)
    starts, lengths = dataset.windows.starts(windows), np.minimum(dataset.windows.lengths(windows), prefix)
    rows = zip(starts.tolist(), lengths.tolist(), strict=True)
    return np.stack([_prefix(dataset.store.read(start, start + length), prefix) for start, length in rows])


def _prefix(tokens: np.ndarray, prefix: int) -> np.ndarray:
    """Return the first `prefix` tokens, repeated where there are fewer."""
    return np.resize(tokens[:prefix], prefix)


class PathStream(SampleStream):
    """The samples of one path, in the order of the whole stream. Validation samples are the same on all paths, with the
    labels of those parts alone for which a path is chosen."""

    def __init__(self, dataset: Dataset, routing: Routing, path: int) -> None:
        self.dataset, self.routing, self.path = dataset, routing, path
        self._epochs: dict[int, np.ndarray] = {}
        """Samples of this path within the last epochs that were read."""

    @property
    def fingerprint(self) -> str:
        return self.dataset.fingerprint

    @property
    def num_train_samples(self) -> int:
        return self.dataset.num_train_samples

    @property
    def num_validation_samples(self) -> int:
        return self.dataset.num_validation_samples

    @property
    def seq_len(self) -> int:
        return self.dataset.seq_len

    def num_valid_tokens(self, first: int, count: int) -> int:
        return self.dataset.num_valid_tokens_at(self.global_samples(np.arange(first, first + count)))

    def rows(self, index: np.ndarray, validation: bool = False) -> Batch:
        if not validation:
            return self.dataset.rows(self.global_samples(index))
        return self.routing.with_labels_of(self.path, self.dataset.rows(index, validation=True))

    def global_samples(self, index: np.ndarray) -> np.ndarray:
        """Return the indices in the whole stream of this path's samples, counted from 0."""
        size, count = self.routing.sizes[self.path], self.num_train_samples
        epochs, places = np.divmod(index, size)
        found = np.empty_like(index)
        for epoch in np.unique(epochs).tolist():
            here = epochs == epoch
            found[here] = epoch * count + self._of_epoch(epoch)[places[here]]
        return found

    def _of_epoch(self, epoch: int) -> np.ndarray:
        if epoch not in self._epochs:
            count = self.num_train_samples
            order = positions_at(np.arange(epoch * count, (epoch + 1) * count), count, self.dataset.seed)
            kept = {old: samples for old, samples in self._epochs.items() if old == epoch - 1}
            self._epochs = kept | {epoch: np.flatnonzero((self.routing.paths_NT[order] == self.path).any(1))}
        return self._epochs[epoch]
