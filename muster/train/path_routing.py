"""Paths of a run's islands, and the samples that a router sends to each."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from muster.checkpoint.manifest import read_manifest
from muster.config.load_config import load_run_config
from muster.config.outer_config import OuterConfig
from muster.config.run_config import RunConfig
from muster.data.dataset import Dataset, SampleStream
from muster.data.path_stream import (
    PathStream,
    Routing,
    SampleRouter,
    fit_sample_router,
    prefixes_at,
    route_samples,
)
from muster.data.prefix_router import fit_classifier, saved_router
from muster.data.sample_order import positions_at
from muster.layout.module_paths import ModulePaths
from muster.parallel.world import World
from muster.spec.errors import ConfigError
from muster.spec.plan import Plan


def module_paths(config: RunConfig, plan: Plan) -> ModulePaths:
    """Return the paths that the islands of a plan train: a single one but for dipaco."""
    outer = config.outer or OuterConfig()
    return ModulePaths(outer.modules if plan.islands > 1 else (1,), plan.islands, config.model.num_layers)


class PathRouting:
    """The router of a run with several paths, and the samples that it sends to the path of this rank."""

    def __init__(self, config: RunConfig, plan: Plan, world: World, dataset: SampleStream) -> None:
        """With one path, or no data, the samples are the dataset. Raises ConfigError for a dataset whose samples have
        no place in a token store."""
        self.config, self.world, self.dataset = config, world, dataset
        self.paths = module_paths(config, plan)
        self.stream = dataset
        """Samples of this rank's path."""
        self.sizes: tuple[int, ...] = (1,) * self.paths.num_paths
        """Training samples of each path."""
        self._router: Routing | None = None
        self._note = ""
        if self.paths.num_paths == 1 or dataset is None:
            return
        if not isinstance(dataset, Dataset):
            raise ConfigError("outer.method dipaco routes samples of a token store: expected a data.source that is one")
        self._use(self._route(fit_run_router(config, dataset)) if world.rank == 0 else None)

    @property
    def _config(self) -> OuterConfig:
        return self.config.outer or OuterConfig()

    def _route(self, router: SampleRouter) -> Routing:
        assert isinstance(self.dataset, Dataset)
        return route_samples(self.dataset, router, self._config.route_top)

    def _use(self, routing: Routing | None) -> None:
        """Go on with the routing of rank 0; all ranks call it."""
        assert isinstance(self.dataset, Dataset)
        routing = self.world.broadcast_object(routing)
        assert routing is not None
        self._router, self.sizes = routing, routing.sizes
        self.stream = PathStream(self.dataset, routing, self.paths.path_of(self.world.at.island))

    def counters(self) -> dict[str, Any]:
        """Return the router for a checkpoint's manifest."""
        return {} if self._router is None else {"router": self._router.router.state()}

    def restore(self, counters: Mapping[str, Any]) -> None:
        """Go on with the router of a checkpoint, where it has one; all ranks call it. Raises ConfigError for a router
        that reads other tokens."""
        if self._router is None or (state := counters.get("router")) is None:
            return
        if state != self._router.router.state():
            router = _saved(self.config, state)
            self._use(self._route(router) if self.world.rank == 0 else None)

    def reshards_after(self, step: int) -> bool:
        """Return whether the samples are shared out anew after a step."""
        return self._router is not None and step in self._config.reshard_at

    def reshard(self, losses_of: Callable[[Dataset, int, int], np.ndarray]) -> None:
        """Let a router learn which path predicts a text best, and share the samples out by it; all ranks call it.

        `losses_of` gives the losses of a number of the last samples on each path, behind their first tokens. The best
        path of a sample is that of the lowest loss beside the path's own mean: of paths that have hardly parted, one is
        the best of all otherwise, and gets all samples. Where a path would still get none, the router stays.
        """
        assert isinstance(self.dataset, Dataset)
        assert self._router is not None
        prefix, total = self._config.route_tokens, self.dataset.num_train_samples
        count = min(self._config.scored_samples, total)
        losses_KN = losses_of(self.dataset, count, prefix)
        routing: Routing | None = None
        if self.world.rank == 0:
            places = positions_at(np.arange(total - count, total), total, self.dataset.seed)
            tokens_NP = prefixes_at(self.dataset, places, prefix)
            best_N = (losses_KN - losses_KN.mean(1, keepdims=True)).argmin(0)
            router = fit_classifier(self._router.router, tokens_NP, best_N)
            with suppress(ConfigError):
                routing = self._route(replace(self._router, router=router))
            routing = routing or self._router
            kept = " stays, since another would leave a path without samples" if routing is self._router else ""
            shares = ", ".join(f"{one / sum(routing.sizes):.0%}" for one in routing.sizes)
            few = f" from all {count} samples that there are" if count < self._config.scored_samples else ""
            self._note = f"the router of samples{kept or f' has learnt{few}, and sends {shares} of them to the paths'}"
        self._use(routing)

    def pop_note(self) -> str:
        """Return what became of the router since the last call, on rank 0."""
        note, self._note = self._note, ""
        return note


def fit_run_router(config: RunConfig, dataset: Dataset) -> SampleRouter:
    """Fit the router with which a run of several paths begins to its training samples."""
    outer = config.outer or OuterConfig()
    own = prod(outer.modules), config.model.vocab_size, config.seed, outer.route_tokens, outer.reroute_every
    return fit_sample_router(dataset, *own)


def read_router(checkpoint: Path) -> SampleRouter:
    """Return the router in a checkpoint of a run that trained several paths. Raises ConfigError where there is none."""
    config = load_run_config(None, checkpoint.parent.parent / "config.yaml", []).config
    if (state := read_manifest(checkpoint).counters.get("router")) is None:
        raise ConfigError(f"{checkpoint} has no router, which chooses the path of a text: choose it with --path N")
    return _saved(config, state)


def _saved(config: RunConfig, state: Mapping[str, Any]) -> SampleRouter:
    outer = config.outer or OuterConfig()
    router = saved_router(state, config.model.vocab_size, config.seed)
    return SampleRouter(router, outer.route_tokens, outer.reroute_every)
