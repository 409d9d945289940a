"""Losses of training samples on each path, from which a router learns the path of a text."""

from collections.abc import Callable, Collection, Mapping
from functools import partial

import numpy as np
import torch

from muster.config.run_config import RunConfig
from muster.data.dataset import IGNORE_INDEX, Batch, Dataset, SampleStream
from muster.layout.mesh import dp_index_of
from muster.parallel.executor import Executor
from muster.parallel.stage import DecoderStage
from muster.parallel.world import World
from muster.schedule.build import build_program
from muster.schedule.program import Program
from muster.spec.errors import MusterError
from muster.spec.plan import Plan
from muster.train.batch_loader import BatchLoader
from muster.train.path_routing import module_paths

MakeExecutor = Callable[[Program], Executor]


class PathScores:
    """Forwards of the plan over some training samples, one after another on each data-parallel rank.

    As for validation, the instructions are those of a Program of forwards alone, beside the training's; what it
    communicates between islands is one sum of all losses at the end.
    """

    def __init__(
        self,
        config: RunConfig,
        plan: Plan,
        world: World,
        stages: Mapping[int, DecoderStage],
        make_executor: MakeExecutor,
    ) -> None:
        self._plan, self._world, self._stages = plan, world, stages
        config, program = _smallest_batch(config, plan, world)
        self._batch_size = config.train.global_batch_size
        self._paths = module_paths(config, plan)
        self._executor = make_executor(program)
        self._open_loader = partial(BatchLoader, config, plan, world, stages=stages)

    def losses(self, dataset: Dataset, count: int, prefix: int) -> np.ndarray:
        """Return the loss of each path on the last samples of the first epoch, which are trained on last, summed over
        the labels from `prefix` on: float64 [K, count]. All ranks call it, with the paths' present parameters."""
        plan, world, paths = self._plan, self._world, self._paths
        path, size = paths.path_of(world.at.island), self._batch_size // plan.islands
        ranges = [plan.sample_range(rank, size) for rank in range(plan.mesh(0).dp_size)]
        own = ranges[dp_index_of(plan, world.at)]
        stride = self._batch_size // paths.num_paths
        sums = torch.zeros(paths.num_paths, count, dtype=torch.float64, device=world.device)
        with torch.no_grad():
            for first in range(0, count, stride):
                for row in range(max(map(len, ranges))):
                    begin = first + paths.place_of(world.at.island) * size
                    counted = [begin + rows.start + row for rows in ranges if row < len(rows)]
                    loss = self._loss(_CountedSamples(dataset, count, prefix, counted), first * paths.num_paths)
                    at = begin + own.start + row
                    if row < len(own) and at < count:
                        sums[path, at] += loss
        for stage in self._stages.values():
            stage.reshard()
        losses_KN = world.all_reduce(sums).cpu().numpy()
        world.heartbeat.update("finish")
        return losses_KN

    def _loss(self, samples: SampleStream, first: int) -> torch.Tensor:
        """Return this rank's part of the loss of those samples of a batch that count."""
        self._world.heartbeat.update("validate")
        loader = self._open_loader(dataset=samples)
        loader.feed_stages(loader.read_batch(samples, first, self._batch_size, validation=True))
        self._executor.run()
        return torch.stack([stage.pop_losses()[0] for stage in self._stages.values()]).sum()


def _smallest_batch(config: RunConfig, plan: Plan, world: World) -> tuple[RunConfig, Program]:
    """Return the run with the fewest micro-batches that the plan's schedule has, and the Program of their forwards."""
    whole = plan.num_micro_batches(config.workload)
    rank, error = dp_index_of(plan, world.at), None
    for count in (n for n in range(1, whole + 1) if whole % n == 0):
        train = config.train.model_copy(update={"global_batch_size": config.train.global_batch_size * count // whole})
        smaller = config.model_copy(update={"train": train})
        try:
            return smaller, build_program(plan, config.model, smaller.workload, train=False, data_rank=rank)
        except MusterError as problem:
            error = problem
    assert error is not None
    raise error


class _CountedSamples(SampleStream):
    """The last training samples of an epoch, in place of validation samples; few of them have labels."""

    def __init__(self, dataset: Dataset, count: int, prefix: int, counted: Collection[int]) -> None:
        self._dataset, self._count, self._prefix, self._counted = dataset, count, prefix, counted

    @property
    def fingerprint(self) -> str:
        return self._dataset.fingerprint

    @property
    def num_train_samples(self) -> int:
        return 0

    @property
    def num_validation_samples(self) -> int:
        return self._count

    @property
    def seq_len(self) -> int:
        return self._dataset.seq_len

    def num_valid_tokens(self, first: int, count: int) -> int:
        return 0

    def rows(self, index: np.ndarray, validation: bool = False) -> Batch:
        first = self._dataset.num_train_samples - self._count
        batch = self._dataset.rows(first + index % self._count)
        labels_BS = np.where(np.isin(index, list(self._counted))[:, None], batch.labels_BS, IGNORE_INDEX)
        labels_BS[:, : self._prefix] = IGNORE_INDEX
        return Batch(batch.tokens_BS, labels_BS, int((labels_BS != IGNORE_INDEX).sum()), batch.positions_BS)
