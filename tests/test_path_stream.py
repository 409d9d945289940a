"""Samples of paths: which of the stream each path trains on, and which labels of a validation sample it predicts."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from muster.data.dataset import IGNORE_INDEX, Dataset
from muster.data.path_stream import PathStream, Routing, fit_sample_router, route_samples
from muster.data.prefix_router import RIDGE, PrefixRouter, fit_classifier, fit_router, saved_router
from muster.layout.module_paths import ModulePaths
from muster.spec.errors import ConfigError
from tests.parity import open_data, small_run


def routed(data: Dataset, paths: int) -> Routing:
    return route_samples(data, fit_sample_router(data, paths, 257, 0, 4, 8))


def test_routers_find_kinds_of_text_that_share_no_tokens() -> None:
    draws = np.random.default_rng(1)
    kinds_N = np.arange(300) % 3
    tokens_NP = 40 * kinds_N[:, None] + draws.integers(0, 40, (300, 32))
    router = fit_router(tokens_NP, 3, 120, seed=7)
    paths_N = router.route(tokens_NP)
    assert [len(set(paths_N[kinds_N == kind].tolist())) for kind in range(3)] == [1, 1, 1]
    assert len(set(paths_N.tolist())) == 3
    again = fit_router(tokens_NP, 3, 120, seed=7)
    assert np.array_equal(again.route(tokens_NP), paths_N)
    distances_NK = [np.square(router.features(tokens_NP) - one).sum(1) for one in router.weights_KD / 2]
    assert np.array_equal(np.argmin(distances_NK, 0), paths_N)  # of k-means, each kind's own centroid is the nearest


def test_classifiers_learn_the_best_path() -> None:
    draws = np.random.default_rng(1)
    tokens_NP = draws.integers(0, 120, (300, 32))
    router = fit_router(tokens_NP, 3, 120, seed=7)
    learnt = fit_classifier(router, tokens_NP, best_N := (tokens_NP[:, 0] % 3))
    scores_NK = torch.from_numpy(learnt.scores(tokens_NP).astype(np.float64))
    weights_KD = torch.from_numpy(learnt.weights_KD.astype(np.float64)).requires_grad_()
    bias_K = torch.from_numpy(learnt.bias_K.astype(np.float64)).requires_grad_()
    logits_NK = torch.from_numpy(router.features(tokens_NP).astype(np.float64)) @ weights_KD.T + bias_K
    assert torch.allclose(logits_NK, scores_NK, atol=1e-4)
    loss = cross_entropy(logits_NK, torch.from_numpy(best_N), reduction="sum") + RIDGE / 2 * weights_KD.square().sum()
    loss.backward()
    assert weights_KD.grad is not None
    assert bias_K.grad is not None
    assert max(weights_KD.grad.abs().max(), bias_K.grad.abs().max()) < 1e-3  # of a convex loss this is the minimum
    assert (learnt.route(tokens_NP) == best_N).mean() > 1.3 * (router.route(tokens_NP) == best_N).mean()


def test_samples_go_to_their_nearest_paths(tmp_path: Path) -> None:
    data = open_data(small_run(), str(tmp_path))
    router = fit_sample_router(data, 3, 257, 0, 4, 8)
    one, two = route_samples(data, router), route_samples(data, router, top=2)
    assert np.array_equal(one.paths_NT[:, 0], two.paths_NT[:, 0])
    assert (two.paths_NT[:, 0] != two.paths_NT[:, 1]).all()
    assert sum(two.sizes) == 2 * data.num_train_samples
    every = np.concatenate(
        [PathStream(data, two, path).global_samples(np.arange(two.sizes[path])) for path in range(3)]
    )
    assert np.array_equal(np.sort(every), np.repeat(np.arange(data.num_train_samples), 2))


def test_routers_are_kept_and_refuse_tokens_with_other_vectors() -> None:
    tokens_NP = np.random.default_rng(1).integers(0, 120, (300, 32))
    router = fit_router(tokens_NP, 3, 120, seed=7)
    state = json.loads(json.dumps(router.state()))
    assert np.array_equal(saved_router(state, 120, 7).scores(tokens_NP), router.scores(tokens_NP))
    for vocab_size, seed in ((121, 7), (120, 8)):
        with pytest.raises(ConfigError, match="the checkpoint's router reads tokens by other vectors"):
            saved_router(state, vocab_size, seed)


def test_paths_share_out_the_samples_of_each_epoch(tmp_path: Path) -> None:
    data = open_data(small_run(), str(tmp_path))
    routing = routed(data, 3)
    streams = [PathStream(data, routing, path) for path in range(3)]
    count = data.num_train_samples
    assert sum(routing.sizes) == count
    for epoch in (0, 1):
        seen = [
            stream.global_samples(np.arange(epoch * size, (epoch + 1) * size))
            for stream, size in zip(streams, routing.sizes, strict=True)
        ]
        assert all((np.diff(samples) > 0).all() for samples in seen)  # in the order of the whole stream
        assert np.array_equal(np.sort(np.concatenate(seen)), np.arange(epoch * count, (epoch + 1) * count))
    own = streams[1].rows(np.arange(5))
    assert routing.router.route(own.tokens_BS[:, :4]).tolist() == [1] * 5
    assert streams[1].num_valid_tokens(0, 5) == own.num_valid_tokens


def test_each_label_of_a_validation_sample_is_predicted_on_one_path(tmp_path: Path) -> None:
    data = open_data(small_run(), str(tmp_path))
    routing = routed(data, 2)
    index = np.arange(6)
    whole = data.rows(index, validation=True)
    parts = [PathStream(data, routing, path).rows(index, validation=True) for path in range(2)]
    kept = np.stack([part.labels_BS != IGNORE_INDEX for part in parts])
    assert (kept.sum(0)[:, 4:] == 1).all()
    assert not kept[:, :, :4].any()  # these tokens choose the path
    assert [part.num_valid_tokens for part in parts] == kept.sum((1, 2)).tolist()
    for row in range(6):
        first, second = (int(routing.router.route(whole.tokens_BS[row : row + 1, at : at + 4])[0]) for at in (0, 4))
        assert kept[first, row, 4:8].all()
        assert kept[second, row, 8:16].all()


def test_paths_without_samples_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fit(*args: Any) -> PrefixRouter:
        router = fit_router(*args)
        return replace(router, bias_K=router.bias_K + np.array([1e3, 0.0]))

    monkeypatch.setattr("muster.data.path_stream.fit_router", fit)
    with pytest.raises(ConfigError, match="make 2 paths, but the router gives samples to 1 of them alone"):
        routed(open_data(small_run(), str(tmp_path)), 2)


def test_modules_make_paths() -> None:
    paths = ModulePaths((1, 2, 2), 8, 6)
    assert paths.num_paths == 4
    names = [f"layers.{layer}.attn.q.weight" for layer in range(6)]
    assert [[paths.module_of(island, name) for name in names] for island in (0, 1, 2, 7)] == [
        [0, 0, 0, 0, 0, 0],
        [0, 0, 1, 1, 0, 0],
        [0, 0, 0, 0, 1, 1],
        [0, 0, 1, 1, 1, 1],
    ]
    assert paths.members(1, names[2]) == (1, 3, 5, 7)
    assert [paths.paths_through(name) for name in (names[0], names[2], names[5], "head.weight")] == [4, 2, 2, 4]
    assert paths.place_of(5) == 1
    private = ModulePaths((1, 2), 2, 2)
    assert private.exchanged(["embed.weight", "layers.0.x", "layers.1.x"]) == [["embed.weight"], ["layers.0.x"]]
    assert ModulePaths((1,), 2, 2).exchanged(names) == [names]
