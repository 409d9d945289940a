"""Router of sequences to paths by their first tokens: k-means over bags of tokens (DiPaCo, arXiv:2403.10616 §2.4)."""

from dataclasses import dataclass

import numpy as np

from muster.data.sample_order import random_key

DIMENSIONS = 64
"""Dimensions of features: bags of tokens, projected at random."""
ROUNDS = 25
"""Most rounds of Lloyd's algorithm."""


@dataclass(frozen=True, eq=False)
class PrefixRouter:
    """Nearest of some centroids to the bag of a few tokens, each of which stands for a fixed random vector."""

    vectors_VD: np.ndarray
    """Vector of each token id."""
    mean_D: np.ndarray
    """Mean of the features that the router was fitted to, which is subtracted from all."""
    centroids_KD: np.ndarray

    def route(self, tokens_NP: np.ndarray) -> np.ndarray:
        """Return the path of each row of tokens: int64 [N]."""
        features_ND = _features(self.vectors_VD, tokens_NP) - self.mean_D
        return _nearest(features_ND, self.centroids_KD)


def fit_router(tokens_NP: np.ndarray, paths: int, vocab_size: int, seed: int) -> PrefixRouter:
    """Return the router whose centroids k-means finds among rows of tokens (k-means++: D. Arthur and S. Vassilvitskii
    2007; S. Lloyd 1982). It is a pure function of its arguments, on machines of one kind."""
    draws = np.random.default_rng(random_key(seed, "router"))
    vectors_VD = draws.standard_normal((vocab_size, DIMENSIONS), np.float32)
    features_ND = _features(vectors_VD, tokens_NP)
    mean_D = features_ND.mean(0)
    features_ND -= mean_D
    centroids_KD = _first_centroids(features_ND, paths, draws)
    for _ in range(ROUNDS):
        chosen_N = _nearest(features_ND, centroids_KD)
        before_KD = centroids_KD.copy()
        for path in range(paths):
            if (own_ND := features_ND[chosen_N == path]).size:
                centroids_KD[path] = own_ND.mean(0)
        if np.array_equal(before_KD, centroids_KD):
            break
    return PrefixRouter(vectors_VD, mean_D, centroids_KD)


def _features(vectors_VD: np.ndarray, tokens_NP: np.ndarray) -> np.ndarray:
    """Return the directions of the sums of the tokens' vectors: float32 [N, D]."""
    features_ND = vectors_VD[tokens_NP].sum(1)
    return features_ND / np.maximum(np.linalg.norm(features_ND, axis=1, keepdims=True), 1e-12)


def _nearest(features_ND: np.ndarray, centroids_KD: np.ndarray) -> np.ndarray:
    return (np.square(centroids_KD).sum(1) - 2 * features_ND @ centroids_KD.T).argmin(1)


def _first_centroids(features_ND: np.ndarray, count: int, draws: np.random.Generator) -> np.ndarray:
    """Return features drawn one after another, in proportion to their squared distance from those before."""
    centroids = [features_ND[draws.integers(len(features_ND))]]
    while len(centroids) < count:
        squares_N = np.min([np.square(features_ND - one).sum(1) for one in centroids], axis=0).astype(np.float64)
        total = squares_N.sum()
        chances_N = squares_N / total if total else None
        centroids.append(features_ND[draws.choice(len(features_ND), p=chances_N)])
    return np.stack(centroids)
