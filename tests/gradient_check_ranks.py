"""Ranks that compare the gradients of one micro-batch, on some of which a bit of a gradient is wrong."""

from typing import Any

import torch
import torch.distributed as dist

from muster.parallel.fsdp import unreduced_gradients
from muster.parallel.stage import DecoderStage
from muster.parallel.world import open_world
from muster.spec.plan import Plan
from muster.spec.plan_name import parse_plan_name
from muster.train.gradient_check import GradientCheck
from muster.train.trainer import Trainer
from tests.parity import open_data, small_run

EVERY = 2


def flip_a_bit(stage: DecoderStage) -> None:
    """Let each backward of a stage flip the lowest bit of one element of one gradient."""
    run_backward = stage.run_backward

    def run(micro_batch: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        found = run_backward(micro_batch, gradient)
        unreduced_gradients(stage.module)[-1].view(-1)[:1].view(torch.int32).bitwise_xor_(1)
        return found

    stage.run_backward = run  # type: ignore[method-assign]


def check(rank: int, world_size: int, store: dist.Store, payload: dict[str, Any]) -> list[Any]:
    """For each case, the rows and sentences of three steps, and whether training without checks gives the same bits."""
    told = []
    for index, (name, wrong_ranks) in enumerate(payload["cases"]):
        plan = parse_plan_name(name, Plan(precision="fp32", micro_batch_size=1))
        config = small_run(False)
        with open_world(store, rank, world_size, plan, index) as world:
            trainer, undisturbed = (Trainer(config, plan, world, open_data(config, payload["cache"])) for _ in range(2))
            gradient_check = GradientCheck(trainer, EVERY)
            checks = []
            for step in range(1, 4):
                trainer.step()
                undisturbed.step()
                if step == EVERY and rank in wrong_ranks:
                    sound = {at: stage.run_backward for at, stage in trainer.stages.items()}
                    for stage in trainer.stages.values():
                        flip_a_bit(stage)
                found = gradient_check.after_step(step)
                if step == EVERY and rank in wrong_ranks:
                    for at, stage in trainer.stages.items():
                        stage.run_backward = sound[at]  # type: ignore[method-assign]
                if found is not None:
                    checks.append((found.row, found.sentences))
            pairs = zip(trainer.local_shards(), undisturbed.local_shards(), strict=True)
            told.append((checks, all(torch.equal(one.tensor, other.tensor) for one, other in pairs)))
    return told
