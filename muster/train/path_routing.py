"""Paths of a run's islands, and the samples that a router sends to each."""

from math import prod
from pathlib import Path

from muster.config.load_config import load_run_config
from muster.config.outer_config import OuterConfig
from muster.config.run_config import RunConfig
from muster.data.dataset import Dataset, SampleStream
from muster.data.path_stream import PathStream, SampleRouter, fit_sample_router, route_samples
from muster.layout.module_paths import ModulePaths
from muster.parallel.world import World
from muster.spec.errors import ConfigError
from muster.spec.plan import Plan
from muster.train.data import open_dataset


def module_paths(config: RunConfig, plan: Plan) -> ModulePaths:
    """Return the paths that the islands of a plan train: a single one but for dipaco."""
    outer = config.outer or OuterConfig()
    return ModulePaths(outer.modules if plan.islands > 1 else (1,), plan.islands, config.model.num_layers)


def path_stream(
    config: RunConfig, plan: Plan, world: World, dataset: SampleStream
) -> tuple[SampleStream, tuple[int, ...]]:
    """Return the samples of this rank's path, as rank 0 has routed them, and the number of training samples of each
    path; with one path, or no data, the dataset itself.

    Raises ConfigError for a dataset whose samples have no place in a token store.
    """
    paths = module_paths(config, plan)
    if paths.num_paths == 1 or dataset is None:
        return dataset, (1,) * paths.num_paths
    if not isinstance(dataset, Dataset):
        raise ConfigError("outer.method dipaco routes samples of a token store: expected a data.source that is one")
    own = _router_arguments(config)
    routing = world.broadcast_object(route_samples(dataset, *own) if world.rank == 0 else None)
    assert routing is not None
    return PathStream(dataset, routing, paths.path_of(world.at.island)), routing.sizes


def run_router(run_dir: Path) -> SampleRouter:
    """Return the router of a run that trained several paths, fitted anew to the run's training samples."""
    config = load_run_config(None, run_dir / "config.yaml", []).config
    dataset = open_dataset(config, run_dir)
    assert isinstance(dataset, Dataset)
    return fit_sample_router(dataset, *_router_arguments(config))


def _router_arguments(config: RunConfig) -> tuple[int, int, int, int, int]:
    outer = config.outer or OuterConfig()
    return prod(outer.modules), config.model.vocab_size, config.seed, outer.route_tokens, outer.reroute_every
