"""Ranks in the tests of sums over two replicas: when they begin and end, and the parameters after some steps."""

from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from muster.config.run_config import RunConfig
from muster.parallel.axis import PendingTensor
from muster.parallel.p2p import P2PRoute
from muster.parallel.stage import DecoderStage
from muster.parallel.world import open_world
from muster.schedule.action import Action
from muster.spec.plan_name import parse_plan_name
from muster.train.trainer import Trainer
from tests.eager_reduction_ranks import started_late
from tests.parity import open_data, small_run

ADD = "muster.train.trainer.add_replica_gradients"


def exchange_gradients(stage: DecoderStage, pair: dist.ProcessGroup) -> None:
    """Send all gradients to the other rank at once, and add those that come back."""
    other = next(rank for rank in dist.get_process_group_ranks(pair) if rank != dist.get_rank())
    stage.attach_local_gradients()
    gradients = [local.grad for local in stage.parameters.values() if local.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    flat += P2PRoute.whole_to(other).exchange(flat)
    for gradient, total in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(total.view_as(gradient))


def run_of(batch: int) -> RunConfig:
    config = small_run(layers=8)
    return config.model_copy(update={"train": config.train.model_copy(update={"global_batch_size": batch})})


def train(rank: int, world_size: int, store: dist.Store, payload: dict[str, Any]) -> list[tuple[str, list[str], bool]]:
    """Per plan: what this rank did in a second step, in order, and whether its parameters have the bits of a run that
    exchanges gradients after all passes."""
    found = []
    for number, name in enumerate(payload["plans"]):
        states = []
        for late in (False, True):
            with open_world(store, rank, world_size, parse_plan_name(name), 2 * number + late) as world:
                config = run_of(payload["batch"])
                faults = (patch(ADD, exchange_gradients), started_late()) if late else (nullcontext(), nullcontext())
                with faults[0], faults[1]:
                    trainer = Trainer(config, world.plan, world, open_data(config, payload["cache"]))
                    trainer.step()
                    seen = follow_step(trainer)
                states.append(
                    {(n, key): own.clone() for n, s in trainer.stages.items() for key, own in s.parameters.items()}
                )
            if not late:
                order = seen
        same = all(torch.equal(own, states[1][key]) for key, own in states[0].items())
        found.append((name, order, same))
    return found


def follow_step(trainer: Trainer) -> list[str]:
    """Run a step, and return the passes, begins and ends of sums, and what needs these, in order."""
    seen: list[str] = []

    def reported(action: Action, waits: bool = False) -> None:
        if action.kind in ("F", "B", "I", "W", "STEP", "GRAD_NORM") or (
            action.kind == "ALL_REDUCE_REPLICAS" and not waits
        ):
            seen.append(str(action))

    class Followed(PendingTensor):
        def wait(self) -> Tensor:
            seen.append("wait")
            return super().wait()

    followed = patch("muster.train.gradients.PendingTensor", Followed)
    with patch.object(trainer._executor, "_report_start", reported), followed:
        trainer.step()
    return seen
