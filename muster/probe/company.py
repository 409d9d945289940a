"""Whole steps beside the sum of their parts: what ranks that train together take from each other."""

from statistics import median
from typing import cast

import numpy as np
import torch.distributed as dist

from muster.cost.measured import level_of, measured_times
from muster.data.dataset import Batch, Dataset
from muster.parallel.world import open_world
from muster.probe.bookkeeping import tiny_runs
from muster.schedule.build import program_of
from muster.simulate.simulator import simulate
from muster.spec.model import ModelSpec
from muster.spec.rates import MachineRates
from muster.spec.run import RunConfig, TrainConfig
from muster.train.trainer import Trainer

_MODEL = ModelSpec(vocab_size=2048, hidden_size=224, num_layers=1, num_heads=7, num_kv_heads=7, intermediate_size=640)
_TRAIN = TrainConfig(steps=1, seq_len=192, global_batch_size=1)
LAYERS_PER_STAGE, MICRO_BATCHES = 3, 4
WARM_UP_STEPS, STEPS = 3, 7


class _Noise:
    """As much of a Dataset as a step reads: any tokens, all of which count."""

    def num_valid(self, first: int, count: int) -> int:
        return count * _TRAIN.seq_len

    def train_batch(self, first: int, count: int) -> Batch:
        drawn = np.random.default_rng(first).integers(_MODEL.vocab_size, size=(2, count, _TRAIN.seq_len))
        return Batch(drawn[0], drawn[1], drawn[0].size)


def company_runs(num_ranks: int) -> list[RunConfig]:
    """One for each way in which the runtime holds a stage, of a size whose kernels are most of a step."""
    return [_larger(config) for config in tiny_runs(num_ranks)]


def _larger(config: RunConfig) -> RunConfig:
    plan = config.parallel
    layers = plan.pp * LAYERS_PER_STAGE
    return config.model_copy(
        update={
            "model": _MODEL.model_copy(update={"num_layers": layers}),
            "parallel": plan.model_copy(update={"stages": ()}),
            "train": _TRAIN.model_copy(update={"global_batch_size": MICRO_BATCHES * plan.mesh(0).data_ranks}),
        }
    )


def time_steps(config: RunConfig, store: dist.Store, rank: int, generation: int) -> float:
    """Seconds of a step, as this rank saw the median one. All ranks must call it."""
    plan = config.parallel
    with open_world(store, rank, plan.world_size, plan, generation) as world:
        trainer = Trainer(config, plan, world, cast(Dataset, _Noise()))
        times_s = [trainer.step().time_s for _ in range(WARM_UP_STEPS + STEPS)]
    return median(times_s[WARM_UP_STEPS:])


def company_of(runs: list[tuple[RunConfig, float]], machine: MachineRates) -> dict[str, float]:
    """Way to hold a stage → how many times as long a step took as its parts say; at least 1."""
    found = {}
    for config, step_s in runs:
        plan, model = config.parallel, config.model
        program = program_of(plan, model, config.workload)
        times = measured_times(model, plan, config.workload, machine)
        found[level_of(plan, 0)] = max(1.0, step_s / simulate(program, times).makespan_s)
    return found
