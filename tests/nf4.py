"""Weights in 4 bits, computed from the papers' formulas in float64 (arXiv:2305.14314 §3, arXiv:2110.02861 §1.3)."""

from statistics import NormalDist

import numpy as np
import torch
from torch import Tensor


def codebook() -> np.ndarray:
    """NF4: quantiles of a normal distribution, evenly spaced in probability, 8 above zero, 7 below it, and zero; the
    outermost probability is the mean of 1 − 1/30 and 1 − 1/32, as in the authors' code."""
    quantile, outermost = np.vectorize(NormalDist().inv_cdf), (2 - 1 / 30 - 1 / 32) / 2
    above = quantile(np.linspace(outermost, 0.5, 9)[:-1])
    below = -quantile(np.linspace(outermost, 0.5, 8)[:-1])
    return np.sort([*(above / above.max()), 0.0, *(below / above.max())])


def dynamic_book() -> np.ndarray:
    """Signed numbers of 8 bits: each power of ten from 10⁻⁶ on has twice as many as the one before."""
    found = [0.0, 1.0]
    for power in range(7):
        width = 0.9 / 2**power
        middles = [0.1 + width * (index + 0.5) for index in range(2**power)]
        found += [sign * middle * 10.0 ** (power - 6) for middle in middles for sign in (1, -1)]
    return np.sort(found)


def rounded(weight: Tensor) -> Tensor:
    """The numbers that a weight in 4 bits stands for, in float64."""
    blocks = weight.double().reshape(-1, 64).numpy()
    absmax = np.abs(blocks).max(1)
    codes = _nearest(codebook(), blocks / np.where(absmax, absmax, 1)[:, None])
    mean = absmax.mean()
    groups = np.pad(absmax - mean, (0, -len(absmax) % 256)).reshape(-1, 256)
    scale = np.abs(groups).max(1, keepdims=True)
    stored = _nearest(dynamic_book(), groups / np.where(scale, scale, 1)) * scale + mean
    return torch.from_numpy(codes * stored.reshape(-1)[: len(absmax), None]).view(weight.shape)


def _nearest(book: np.ndarray, values: np.ndarray) -> np.ndarray:
    return book[np.searchsorted((book[1:] + book[:-1]) / 2, values)]
