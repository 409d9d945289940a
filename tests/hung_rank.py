"""A training rank that goes wrong as asked: `python -m tests.hung_rank FAULT STEP RANK` and a worker's arguments."""

import os
import signal
import sys
import time
from typing import Any

import torch

from muster.data.dataset import Dataset
from muster.parallel.stage import DecoderStage
from muster.train import worker
from muster.train.trainer import Trainer


def main() -> int:
    """Trains, and after `STEP` steps does on one rank what `FAULT` says."""
    fault, step, faulty = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    del sys.argv[1:4]
    rank = int(sys.argv[sys.argv.index("--rank") + 1])
    if rank == faulty:
        seed_fault(fault, step)
    return worker.main()


def seed_fault(fault: str, step: int) -> None:
    """Makes this process misbehave in the step after `step`."""
    made = [0]
    feed_step, batch, forward = Trainer.feed_step, Dataset.train_batch, DecoderStage.forward

    def fed(self: Trainer) -> None:
        made[0] = self.step_count
        if made[0] == step and fault in ("stopped", "dead"):
            os.kill(os.getpid(), signal.SIGSTOP if fault == "stopped" else signal.SIGKILL)
        feed_step(self)

    def read_forever(self: Dataset, *args: Any) -> Any:
        while made[0] >= step and fault == "data":
            time.sleep(1)
        return batch(self, *args)

    def compute_forever(self: DecoderStage, *args: Any) -> Any:
        while made[0] == step and fault == "compute":
            torch.ones(8).sum()
        return forward(self, *args)

    if fault == "plan":
        load_plan = worker.load_plan
        worker.load_plan = lambda path: load_plan(path).model_copy(update={"micro_batch_size": 6})
    Trainer.feed_step, Dataset.train_batch, DecoderStage.forward = fed, read_forever, compute_forever


if __name__ == "__main__":
    worker.leave(main())
