"""Validation loss by all ranks under the run's own plan."""

from collections.abc import Callable

import torch

from muster.data.dataset import SampleStream
from muster.parallel.executor import Executor
from muster.train.batch_loader import BatchLoader


class Evaluator:
    """Runs the plan's forwards over validation samples.

    `make_executor(has_heartbeat, micro_batches)` makes the executor; the first run has no heartbeat, since it may
    compile for minutes.
    """

    def __init__(self, batch_loader: BatchLoader, make_executor: Callable[[bool, int], Executor]) -> None:
        self._batch_loader = batch_loader
        self._make_executor = make_executor
        self._executors: dict[int, Executor] = {}
        """Executors by their number of micro-batches."""
        self._has_run = False

    def _executor(self) -> Executor:
        count = self._batch_loader.num_fed_micro_batches
        if count not in self._executors:
            self._executors[count] = self._make_executor(self._has_run, count)
        return self._executors[count]

    def mean_loss(self, num_batches: int, source: str | None = None) -> float | None:
        """Return the mean loss over the first `num_batches` validation batches, of one source or of all.

        None when there are too few validation samples for one batch. All ranks call it.
        """
        loader = self._batch_loader
        world = loader.world
        stages = loader.stages
        dataset: SampleStream = loader.dataset if source is None else loader.dataset.sources[source]
        batch_size = loader.config.train.global_batch_size
        num_batches = min(num_batches, dataset.num_validation_samples // batch_size)
        sums = torch.zeros(2, dtype=torch.float64, device=world.device)
        if not self._has_run:
            world.heartbeat.update("validate")
        with torch.no_grad():
            # Each path reads all samples, for the labels that are its own.
            for index in range(num_batches * loader.paths.num_paths):
                batch = loader.read_batch(dataset, index * batch_size, batch_size, validation=True)
                loader.feed_stages(batch)
                self._executor().run()
                for stage in stages.values():
                    sums[0] += stage.pop_losses()[0]
                    # Tensor- and context-parallel ranks have the same samples, but groups have parts of them; a second
                    # replica is idle.
                    counts = world.at.tp == 0 and (world.at.cp == 0 or batch.groups is not None)
                    if stage.index == loader.plan.stages_per_replica - 1 and counts:
                        sums[1] += batch.num_local_valid
        for stage in stages.values():
            stage.reshard()
        total, count = world.all_reduce(sums).tolist()
        world.heartbeat.update("finish")
        if num_batches and not self._has_run:
            self._has_run = True
            self._executors.clear()
        return total / count if count else None
