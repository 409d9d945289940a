"""Blends of several sources: the source of each global sample, as a pure function of its index.

Samples come in blocks of `BLOCK_SAMPLES`. A block takes a fixed number from each source (its quota, the weight rounded
to 1/1,000) and shuffles them. So the proportions hold at any point of the run, nothing is drawn at random that would
have to be saved, and each source is read in order without gaps. Where the weights change, a new stage begins.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from muster.data.sample_order import permute, random_key

BLOCK_SAMPLES = 1_000
"""Samples of a block, within which the sources have exactly their proportions."""


@dataclass(frozen=True)
class BlendWeights:
    """Weights of the sources from global sample `first_sample` on."""

    first_sample: int
    weights: tuple[float, ...]


class BlendOrder:
    """Map from global samples to (source, sample of that source's stream).

    The stream of each source is read in order and without gaps, over all stages. Raises ValueError unless there is one
    weight per source and a positive one among them.
    """

    def __init__(self, schedule: Sequence[BlendWeights], seed: int | str) -> None:
        self._seed = seed
        self._firsts = np.array([stage.first_sample for stage in schedule])
        self._quotas = [block_quotas(stage.weights) for stage in schedule]
        self._before = [np.zeros(len(schedule[0].weights), np.int64)]
        """Number of samples of each source before each stage."""
        self._block = lru_cache(maxsize=8)(self._make_block)
        for stage, length in enumerate(np.diff(self._firsts).tolist()):
            self._before.append(self._before[-1] + self._samples_in_stage(stage, length))

    def locate(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return source and index within it of samples `first` … `first + count − 1`, int64 [count] each."""
        sources, indices = [], []
        while count > 0:
            stage = int(np.searchsorted(self._firsts, first, side="right")) - 1
            block, begin = divmod(first - int(self._firsts[stage]), BLOCK_SAMPLES)
            end = min(BLOCK_SAMPLES, begin + count)
            if stage + 1 < len(self._firsts):
                end = min(end, begin + int(self._firsts[stage + 1]) - first)
            source, ordinal = (part[begin:end] for part in self._block(stage, block))
            sources.append(source)
            indices.append((self._before[stage] + block * self._quotas[stage])[source] + ordinal)
            first, count = first + end - begin, count - (end - begin)
        return np.concatenate(sources), np.concatenate(indices)

    def samples_per_source(self, count: int) -> np.ndarray:
        """Return how many of the first `count` samples come from each source."""
        stage = int(np.searchsorted(self._firsts, count, side="right")) - 1
        return self._before[stage] + self._samples_in_stage(stage, count - int(self._firsts[stage]))

    def _samples_in_stage(self, stage: int, length: int) -> np.ndarray:
        """Return how many of the first `length` samples of a stage come from each source."""
        blocks, rest = divmod(length, BLOCK_SAMPLES)
        source = self._block(stage, blocks)[0][:rest]
        return blocks * self._quotas[stage] + np.bincount(source, minlength=len(self._quotas[stage]))

    def _make_block(self, stage: int, block: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the source of each sample of a block, and its rank among the block's samples of that source."""
        slots = permute(np.arange(BLOCK_SAMPLES), BLOCK_SAMPLES, random_key(self._seed, "mixture", stage, block))
        source = np.searchsorted(np.cumsum(self._quotas[stage]), slots, side="right")
        ordinal = np.empty(BLOCK_SAMPLES, np.int64)
        for index in range(len(self._quotas[stage])):
            here = source == index
            ordinal[here] = np.arange(here.sum())
        return source, ordinal


def block_quotas(weights: Sequence[float]) -> np.ndarray:
    """Return the number of samples of each source in a block.

    Proportional to the weights by largest remainders (Hamilton's method), but at least one for each positive weight.
    Raises ValueError unless weights are 0 or more and not all 0.
    """
    exact = np.array(weights, np.float64)
    if not exact.size or (exact < 0).any() or not exact.sum() > 0:
        raise ValueError("expected weights of 0 or more, not all of them 0")
    exact = exact / exact.sum() * BLOCK_SAMPLES
    quotas = np.maximum(np.floor(exact), exact > 0).astype(np.int64)
    order = np.argsort(quotas - exact, kind="stable")  # largest remainder first
    missing = BLOCK_SAMPLES - int(quotas.sum())
    step = 1 if missing > 0 else -1
    while missing:
        for source in order if step > 0 else order[::-1]:
            if missing and exact[source] > 0 and (step > 0 or quotas[source] > 1):
                quotas[source] += step
                missing -= step
    return quotas
