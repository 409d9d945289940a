"""Mixtures: which source each sample of the global stream comes from, as a pure function of its index."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from muster.data.sample_order import permute, random_key

BLOCK_SAMPLES = 1_000
"""Samples in each run of so many come from the sources in exactly their proportion, to 1/1,000; in an order of their
own."""


@dataclass(frozen=True)
class BlendWeights:
    """From global sample `first` on, sources are drawn by these weights."""

    first_sample: int
    weights: tuple[float, ...]


class BlendOrder:
    """The source of each global sample, and which sample of that source's own stream it is.

    Every source's stream is gone through in order, without a gap, over all stages. Raises ValueError where weights are
    not one per source, or all 0.
    """

    def __init__(self, schedule: Sequence[BlendWeights], seed: int | str) -> None:
        self._seed = seed
        self._firsts = np.array([stage.first_sample for stage in schedule])
        self._quotas = [block_quotas(stage.weights) for stage in schedule]
        self._before = [np.zeros(len(schedule[0].weights), np.int64)]
        """Samples of each source before each stage."""
        self._block = lru_cache(maxsize=8)(self._make_block)
        for stage, length in enumerate(np.diff(self._firsts).tolist()):
            self._before.append(self._before[-1] + self._samples_in_stage(stage, length))

    def locate(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Source and index within it of samples `first` … `first + count − 1`, int64 [count] each."""
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
        """How many of the first `count` samples come from each source."""
        stage = int(np.searchsorted(self._firsts, count, side="right")) - 1
        return self._before[stage] + self._samples_in_stage(stage, count - int(self._firsts[stage]))

    def _samples_in_stage(self, stage: int, length: int) -> np.ndarray:
        """The same of the first `length` samples of a stage."""
        blocks, rest = divmod(length, BLOCK_SAMPLES)
        source = self._block(stage, blocks)[0][:rest]
        return blocks * self._quotas[stage] + np.bincount(source, minlength=len(self._quotas[stage]))

    def _make_block(self, stage: int, block: int) -> tuple[np.ndarray, np.ndarray]:
        """The source of each sample of a block, and how many of the block come from it before."""
        slots = permute(np.arange(BLOCK_SAMPLES), BLOCK_SAMPLES, random_key(self._seed, "mixture", stage, block))
        source = np.searchsorted(np.cumsum(self._quotas[stage]), slots, side="right")
        ordinal = np.empty(BLOCK_SAMPLES, np.int64)
        for one in range(len(self._quotas[stage])):
            here = source == one
            ordinal[here] = np.arange(here.sum())
        return source, ordinal


def block_quotas(weights: Sequence[float]) -> np.ndarray:
    """Samples of each source in a block: in proportion to the weights by largest remainders, one at least of each that
    has a weight."""
    share = np.array(weights, np.float64)
    if not share.size or (share < 0).any() or not share.sum() > 0:
        raise ValueError("expected weights of 0 or more, not all of them 0")
    share = share / share.sum() * BLOCK_SAMPLES
    whole = np.maximum(np.floor(share), share > 0).astype(np.int64)
    order = np.argsort(whole - share, kind="stable")  # those that lack most come first
    missing = BLOCK_SAMPLES - int(whole.sum())
    step = 1 if missing > 0 else -1
    while missing:
        for one in order if step > 0 else order[::-1]:
            if missing and share[one] > 0 and (step > 0 or whole[one] > 1):
                whole[one] += step
                missing -= step
    return whole
