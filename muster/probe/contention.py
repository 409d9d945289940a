"""Contention between ranks that train together: whole measured steps against the sum of their measured parts."""

from dataclasses import dataclass
from statistics import median
from typing import cast

import numpy as np
import torch.distributed as dist

from muster.config.run_config import RunConfig, TrainConfig
from muster.cost.time.profiled_times import profiled_times, storage_level
from muster.data.dataset import Batch, SampleStream
from muster.parallel.world import open_world
from muster.probe.runtime_overhead import tiny_runs
from muster.schedule.build import build_program
from muster.simulate.simulator import simulate
from muster.spec.machine_rates import MachineRates
from muster.spec.model import ModelSpec
from muster.train.trainer import Trainer

_MODEL = ModelSpec(vocab_size=1024, hidden_size=256, num_layers=1, num_heads=8, num_kv_heads=8, intermediate_size=704)
_TRAIN = TrainConfig(steps=1, seq_len=256, global_batch_size=1)
LAYERS_PER_STAGE, MICRO_BATCHES, MICRO_BATCH_SIZE = 2, 4, 2
WARM_UP_STEPS, STEPS = 2, 5


@dataclass(frozen=True)
class RandomDataset:
    """Minimal Dataset of random tokens, all of which count."""

    vocab_size: int
    seq_len: int

    def num_valid_tokens(self, first: int, count: int) -> int:
        """Return the number of labels of `count` samples."""
        return count * self.seq_len

    def lengths(self, index: np.ndarray, validation: bool = False) -> None:
        """Return None: all samples are equally long."""

    def rows(self, index: np.ndarray, validation: bool = False) -> Batch:
        """Return samples by their indices."""
        drawn = np.random.default_rng(int(index[0])).integers(self.vocab_size, size=(2, len(index), self.seq_len))
        return Batch(drawn[0], drawn[1], drawn[0].size)


def contention_runs(num_ranks: int) -> list[RunConfig]:
    """Return one run for each way in which the runtime stores a stage, large enough that kernels dominate a step."""
    return [_larger(config) for config in tiny_runs(num_ranks)]


def _larger(config: RunConfig) -> RunConfig:
    plan = config.parallel
    layers = plan.pp * LAYERS_PER_STAGE
    return config.model_copy(
        update={
            "model": _MODEL.model_copy(update={"num_layers": layers}),
            "parallel": plan.model_copy(update={"stages": (), "micro_batch_size": MICRO_BATCH_SIZE}),
            "train": _TRAIN.model_copy(
                update={"global_batch_size": MICRO_BATCHES * MICRO_BATCH_SIZE * plan.mesh(0).dp_size}
            ),
        }
    )


def time_steps(
    config: RunConfig, store: dist.Store, rank: int, generation: int, warm_up: int = WARM_UP_STEPS, steps: int = STEPS
) -> float:
    """Return the median seconds of a step on random tokens, as seen by this rank; all ranks must call it."""
    plan = config.parallel
    dataset = RandomDataset(config.model.vocab_size, config.train.seq_len)
    with open_world(store, rank, plan.world_size, plan, generation) as world:
        trainer = Trainer(config, plan, world, cast(SampleStream, dataset))
        times_s = [trainer.step().time_s for _ in range(warm_up + steps)]
    return median(times_s[warm_up:])


def contention_factors(runs: list[tuple[RunConfig, float]], machine: MachineRates) -> dict[str, float]:
    """Return by storage level the ratio of a measured step to the simulation of its measured parts; at least 1."""
    found = {}
    for config, step_s in runs:
        plan, model = config.parallel, config.model
        program = build_program(plan, model, config.workload)
        times = profiled_times(model, plan, config.workload, machine)
        found[storage_level(plan, 0)] = max(1.0, step_s / simulate(program, times).makespan_s)
    return found
