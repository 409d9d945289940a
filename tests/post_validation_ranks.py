"""Work of each rank in the tests of post-validation: training with and without it while some gradients are wrong."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from muster.config.run_config import EvalConfig, RunConfig
from muster.parallel.world import open_world
from muster.spec.errors import MusterError
from muster.spec.nearest_plans import require_runnable
from muster.spec.plan import Plan
from muster.spec.plan_name import parse_plan_name
from muster.train.loop import TrainingLoop
from muster.train.memory_limit import limit_of_run
from muster.train.parameter_updater import ParameterUpdater
from muster.train.post_validation import PostValidation
from muster.train.step_state import StepState
from muster.train.trainer import Trainer
from tests.parity import open_data, small_run


class RoughUpdater(ParameterUpdater):
    """Multiplies one rank's gradients by `factors[step]`: the last rank's, or the first one's at odd steps."""

    factors: dict[int, float] = {}

    def local_statistics(self) -> Tensor:
        step = self.state.step
        if step in self.factors and self.world.rank == (0 if step % 2 else self.world.size - 1):
            for stage in self.stages.values():
                stage.attach_local_gradients()
                for local in stage.parameters.values():
                    if local.grad is not None:
                        local.grad.mul_(self.factors[step])
        return super().local_statistics()


class RoughTrainer(Trainer):
    updater_type = RoughUpdater


@contextmanager
def not_restored() -> Iterator[None]:
    """The saved state is lost, and a wrong step is not rolled back."""
    keep = PostValidation._save_state

    def faulty(self: PostValidation) -> None:
        keep(self)
        self._saved_state = self._state()

    with patch.object(PostValidation, "_save_state", faulty):
        yield


FAULTS = {None: nullcontext, "not restored": not_restored}


def run_cases(rank: int, world_size: int, store: dist.Store, payload: dict[str, Any]) -> list[dict[str, Any]]:
    """Each case of `payload["cases"]` in turn, in a world of its own."""
    found = []
    for index, case in enumerate(payload["cases"]):
        factors = {int(step): float(factor) for step, factor in case.pop("factors", {}).items()}
        with (
            patch.object(RoughUpdater, "factors", factors),
            patch("muster.train.post_validation.MIN_UNCLIPPED_STEPS", 3),
        ):
            found.append(_run_case(rank, world_size, store, index, payload["folder"], **case))
    return found


def _run_case(
    rank: int,
    world_size: int,
    store: dist.Store,
    generation: int,
    folder: str,
    plan: str,
    steps: int = 13,
    run: str = "",
    stop_at: int = 0,
    fault: str | None = None,
    **more: Any,
) -> dict[str, Any]:
    config = _config(steps, **more)
    full_plan = parse_plan_name(plan, Plan(precision="fp32", micro_batch_size=1))
    require_runnable(full_plan, config.model, config.workload, world_size)
    with open_world(store, rank, world_size, full_plan, generation) as world, FAULTS[fault]():
        data = open_data(config, folder)
        if run:
            return _run(TrainingLoop, config, full_plan, world, data, Path(folder) / run, stop_at)
        trainer = RoughTrainer(config, full_plan, world, data)
        post_validation = PostValidation(trainer) if full_plan.post_validation else None
        results = []
        while trainer.step_count < steps:
            is_last = trainer.step_count == steps - 1
            results += post_validation.advance(is_last) if post_validation else [trainer.step()]
        digest = hashlib.sha256()
        for tensor in [
            *trainer.updater.parameters.values(),
            *(one for _, one in trainer.updater.optimizer.state().values()),
        ]:
            digest.update(tensor.numpy().tobytes())
        return {
            "digest": digest.hexdigest(),
            "steps": [result.step for result in results],
            "told": [[result.loss, result.grad_norm, result.learning_rate, result.skip_reason] for result in results],
            "taken_back": post_validation.num_rollbacks if post_validation else None,
            "finite": all(bool(torch.isfinite(local).all()) for local in trainer.updater.parameters.values()),
        }


def _run(
    kind: type[TrainingLoop], config: RunConfig, plan: Plan, world: Any, data: Any, run_dir: Path, stop_at: int
) -> dict:
    run_dir.mkdir(exist_ok=True)
    with patch("muster.train.loop.Trainer", RoughTrainer):
        body = kind(config, plan, world, data, run_dir, limit_of_run(config, plan, world))
        feed = body.trainer.load_batch

        def feed_and_ask() -> StepState:
            body.carried.stop_requested = body.trainer.step_count + 1 == stop_at
            return feed()

        body.trainer.load_batch = feed_and_ask  # type: ignore[method-assign]
        try:
            return {"code": body.run()}
        except MusterError as error:
            return {"said": str(error)}


def _config(steps: int, tied: bool = False, layers: int = 4, optim: str = "adamw", **train: Any) -> RunConfig:
    config = small_run(tied, steps, layers, optim=optim)
    quick = {"sample_tokens": 0, **train}
    return config.model_copy(
        update={
            "train": config.train.model_copy(update=quick),
            "eval": EvalConfig(batches=0),
            "optim": config.optim.model_copy(update={"clip_norm": 50.0}),
        }
    )
