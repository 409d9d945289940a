"""Router of sequences to paths by their first tokens: k-means over bags of tokens, or a classifier that has learnt
which path predicts a sequence best (DiPaCo, arXiv:2403.10616 §2.4)."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any

import numpy as np

from muster.data.sample_order import random_key
from muster.spec.errors import ConfigError

DIMENSIONS = 64
"""Dimensions of features: bags of tokens, projected at random."""
ROUNDS = 25
"""Most rounds of Lloyd's algorithm."""
RIDGE = 1.0
"""Weight of the squared weights of a classifier beside the sum of its samples' losses."""
CLASSIFIER_STEPS = 500
"""Steps in which a classifier is fitted."""


@dataclass(frozen=True, eq=False)
class PrefixRouter:
    """Linear classifier of the bag of a few tokens, each of which stands for a fixed random vector. To choose the
    nearest of some centroids is one, too: −|x − c|² is 2 c · x − |c|², up to a term that is the same for all of them.
    """

    vectors_VD: np.ndarray
    """Vector of each token id."""
    mean_D: np.ndarray
    """Mean of the features that the router was fitted to, which is subtracted from all."""
    weights_KD: np.ndarray
    bias_K: np.ndarray

    def route(self, tokens_NP: np.ndarray) -> np.ndarray:
        """Return the path of each row of tokens: int64 [N]."""
        return self.scores(tokens_NP).argmax(1)

    def scores(self, tokens_NP: np.ndarray) -> np.ndarray:
        """Return how well each path fits each row of tokens: float32 [N, K]."""
        return self.features(tokens_NP) @ self.weights_KD.T + self.bias_K

    def features(self, tokens_NP: np.ndarray) -> np.ndarray:
        """Return what is classified of each row of tokens: float32 [N, D]."""
        return _features(self.vectors_VD, tokens_NP) - self.mean_D

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps: all but the vectors of the tokens, which their seed makes anew, with a digest
        of them."""
        digest = sha256(self.vectors_VD.tobytes()).hexdigest()[:16]
        parts = {"mean": self.mean_D, "weights": self.weights_KD, "bias": self.bias_K}
        return {name: part.tolist() for name, part in parts.items()} | {"vectors": digest}


def saved_router(state: Mapping[str, Any], vocab_size: int, seed: int) -> PrefixRouter:
    """Return the router with a state. Raises ConfigError where its tokens had other vectors."""
    mean_D, weights_KD, bias_K = (np.array(state[name], np.float32) for name in ("mean", "weights", "bias"))
    vectors_VD = _token_vectors(vocab_size, np.random.default_rng(random_key(seed, "router")))
    router = PrefixRouter(vectors_VD, mean_D, weights_KD, bias_K)
    if (now := router.state()["vectors"]) != state["vectors"]:
        raise ConfigError(
            f"the checkpoint's router reads tokens by other vectors ({state['vectors']}, now {now}): give the same seed"
            " and tokenizer, and the version of numpy that began the run"
        )
    return router


def fit_router(tokens_NP: np.ndarray, paths: int, vocab_size: int, seed: int) -> PrefixRouter:
    """Return the router whose centroids k-means finds among rows of tokens (k-means++: D. Arthur and S. Vassilvitskii
    2007; S. Lloyd 1982). It is a pure function of its arguments, on machines of one kind."""
    draws = np.random.default_rng(random_key(seed, "router"))
    vectors_VD = _token_vectors(vocab_size, draws)
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
    return PrefixRouter(vectors_VD, mean_D, 2 * centroids_KD, -np.square(centroids_KD).sum(1))


def fit_classifier(router: PrefixRouter, tokens_NP: np.ndarray, best_N: np.ndarray) -> PrefixRouter:
    """Return the router that predicts the best path of rows of tokens from a router's features: multinomial logistic
    regression, by steps with a bound of its Hessian, of which none raises the loss (D. Böhning 1992)."""
    features_ND = router.features(tokens_NP).astype(np.float64)
    inputs_NI = np.concatenate([features_ND, np.ones((len(features_ND), 1))], 1)
    targets_NK = np.eye(len(router.bias_K))[best_N]
    ridge_II = RIDGE * np.diag([1.0] * features_ND.shape[1] + [0.0])
    step_II = np.linalg.inv(0.5 * inputs_NI.T @ inputs_NI + ridge_II)
    weights_IK = np.zeros((inputs_NI.shape[1], targets_NK.shape[1]))
    for _ in range(CLASSIFIER_STEPS):
        logits_NK = inputs_NI @ weights_IK
        chances_NK = np.exp(logits_NK - logits_NK.max(1, keepdims=True))
        chances_NK /= chances_NK.sum(1, keepdims=True)
        weights_IK += step_II @ (inputs_NI.T @ (targets_NK - chances_NK) - ridge_II @ weights_IK)
    weights_IK = weights_IK.astype(np.float32)
    return replace(router, weights_KD=weights_IK[:-1].T, bias_K=weights_IK[-1])


def _token_vectors(vocab_size: int, draws: np.random.Generator) -> np.ndarray:
    return draws.standard_normal((vocab_size, DIMENSIONS), np.float32)


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
