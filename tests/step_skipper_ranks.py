"""Ranks in the tests of skipped steps: train while gradients go wrong on the last rank alone."""

import gc
import weakref
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

from muster.config.run_config import EvalConfig, RunConfig
from muster.data.dataset import Dataset
from muster.parallel.world import open_world
from muster.schedule.action import Action
from muster.spec.errors import MusterError
from muster.spec.plan import Plan
from muster.spec.plan_name import parse_plan_name
from muster.train.loop import TrainingLoop
from muster.train.memory_limit import limit_of_run
from muster.train.trainer import Trainer
from tests.parity import open_data, small_run


class PoisonedTrainer(Trainer):
    """Multiplies the last rank's gradients by `factors[step]`."""

    factors: dict[int, float] = {}

    def _reduce_norm(self, action: Action) -> None:
        factor = self.factors.get(self.step_count + 1)
        if factor is not None and self.world.rank == self.world.size - 1:
            for stage in self.stages.values():
                stage.attach_local_gradients()
            for parameter in self.updater.parameters.values():
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)
        super()._reduce_norm(action)


def run_cases(rank: int, world_size: int, store: dist.Store, payload: dict[str, Any]) -> list[str]:
    """Runs the attempts of `payload["attempts"]` in turn; by attempt, the sentence that it ended with."""
    return [
        _attempt(rank, world_size, store, index, payload["folder"], **attempt)
        for index, attempt in enumerate(payload["attempts"])
    ]


def _attempt(
    rank: int,
    world_size: int,
    store: dist.Store,
    generation: int,
    folder: str,
    run: str,
    plan: str,
    factors: dict[str, float],
    stop_after: int = 0,
    **train: Any,
) -> str:
    config = _config(train)
    run_dir = Path(folder) / run
    run_dir.mkdir(exist_ok=True)
    full_plan = parse_plan_name(plan, Plan(precision="fp64", micro_batch_size=1))
    with (
        open_world(store, rank, world_size, full_plan, generation) as world,
        patch("muster.train.loop.Trainer", PoisonedTrainer),
        patch.object(PoisonedTrainer, "factors", {int(step): factor for step, factor in factors.items()}),
    ):
        body = TrainingLoop(
            config, full_plan, world, _data(config, folder), run_dir, limit_of_run(config, full_plan, world)
        )
        if stop_after:
            _stop(body, stop_after)
        try:
            said = str(body.run())
        except MusterError as error:
            said = str(error)
        left = weakref.ref(body)
        del body
        gc.collect()
        assert left() is None, "its tensors would lie beside those of the next generation"
        return said


def _stop(run: TrainingLoop, step: int) -> None:
    """Asks for the end of the run while it makes step `step`, and for the rest of its life not again."""
    trainer, made = run.trainer, run.trainer.step

    def step_and_ask() -> Any:
        run.carried.stop_requested = trainer.step_count + 1 == step
        return made()

    trainer.step = step_and_ask  # type: ignore[method-assign]


def _config(train: dict[str, Any]) -> RunConfig:
    config = small_run(steps=12, layers=2)
    quick = {"sample_tokens": 0, **train}
    data = config.data.model_copy(update={"hash_samples": True})
    return config.model_copy(
        update={"train": config.train.model_copy(update=quick), "eval": EvalConfig(batches=0), "data": data}
    )


def _data(config: RunConfig, folder: str) -> Dataset:
    return open_data(config, folder + "/data")
