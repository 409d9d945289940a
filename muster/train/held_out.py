"""The loss on held-out samples, by all ranks under the run's own plan."""

from collections.abc import Callable

import torch

from muster.data.dataset import Samples
from muster.parallel.executor import Executor
from muster.train.feeding import Feeder


class HeldOut:
    """Runs the plan's forwards over held-out samples. `make_executor` makes what runs them; with False, it tells nobody
    what it begins, since the first run may compile for minutes."""

    def __init__(self, feeder: Feeder, make_executor: Callable[[bool], Executor]) -> None:
        self._feeder, self._make = feeder, make_executor
        self._executor = make_executor(False)
        self._has_run = False

    def loss(self, num_batches: int, source: str | None = None) -> float | None:
        """Mean loss over the first held-out batches, of one source or of all; None when there are too few held-out
        samples for one. All ranks call it."""
        feeder, world, stages = self._feeder, self._feeder.world, self._feeder.stages
        dataset: Samples = feeder.dataset if source is None else feeder.dataset.parts[source]
        batch_size = feeder.config.train.global_batch_size
        num_batches = min(num_batches, dataset.num_held_out_samples // batch_size)
        sums = torch.zeros(2, dtype=torch.float64, device=world.device)
        if not self._has_run:
            world.where.say("validate")
        with torch.no_grad():
            for index in range(num_batches):
                share = feeder.read(dataset, index * batch_size, batch_size, held_out=True)
                feeder.feed(share)
                self._executor.run()
                for stage in stages.values():
                    sums[0] += stage.take_losses()[0]
                    # Tensor-parallel neighbours have the same; a second replica is idle.
                    if stage.index == feeder.plan.depth - 1 and share.batch is not None and world.at.tp == 0:
                        sums[1] += share.batch.num_valid
        for stage in stages.values():
            stage.reshard()
        total, count = world.add_up(sums).tolist()
        world.where.say("finish")
        if num_batches and not self._has_run:
            self._has_run = True
            self._executor = self._make(True)
        return total / count if count else None
