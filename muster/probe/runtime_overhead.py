"""Overhead of the runtime beside its kernels: whole instructions of models so small that it is most of their time."""

from collections.abc import Iterator
from typing import cast

import torch
import torch.distributed as dist

from muster.config.optim_config import OptimConfig
from muster.config.run_config import DataConfig, RunConfig, TrainConfig
from muster.cost.time.op_times import OpTimes
from muster.cost.time.profiled_times import overhead_name, profiled_times, storage_level
from muster.data.dataset import SampleStream
from muster.parallel.world import open_world
from muster.schedule.action import Kind
from muster.spec.layer_strategy import LayerStrategy, ZeroLevel
from muster.spec.machine_rates import MachineRates
from muster.spec.model import ModelSpec
from muster.spec.plan import Plan, StageSpec
from muster.train.trainer import Trainer

LAYERS = (1, 4)
"""Layers of a pipeline's stages, in turn: the difference between two stages is the overhead of a layer."""
KINDS = (Kind.F, Kind.B, Kind.UNSHARD, Kind.REDUCE_GRAD)
_MODEL = ModelSpec(vocab_size=257, hidden_size=32, num_layers=1, num_heads=2, intermediate_size=64)


def tiny_runs(num_ranks: int) -> Iterator[RunConfig]:
    """Yield one run for each way in which the runtime stores a stage."""
    pairs = num_ranks // 2
    zeros: tuple[ZeroLevel, ...] = ("z1", "z2", "z3")
    yield _run(Plan(pp=num_ranks))
    if pairs:
        for zero in zeros:
            yield _run(Plan(pp=pairs, dp_shard=2, default_strategy=LayerStrategy(zero=zero)))
        yield _run(Plan(pp=pairs, tp=2))
    if pairs > 1:
        for zero in zeros[::2]:
            yield _run(Plan(pp=pairs // 2, dp_shard=2, tp=2, default_strategy=LayerStrategy(zero=zero)))


def _run(plan: Plan) -> RunConfig:
    counts = [LAYERS[index % len(LAYERS)] for index in range(plan.pp)]
    stages = tuple(StageSpec(layers=count) for count in counts)
    return RunConfig(
        model=_MODEL.model_copy(update={"num_layers": sum(counts)}),
        parallel=plan.model_copy(update={"stages": stages, "precision": "fp32"}),
        data=DataConfig(source="none"),
        train=TrainConfig(steps=1, seq_len=16, global_batch_size=2 * plan.mesh(0).dp_size * plan.pp),
        optim=OptimConfig(lr=1e-3),
    )


def profile_run(config: RunConfig, store: dist.Store, rank: int, generation: int) -> OpTimes:
    """Time every instruction of the run's plan on these ranks; all must call it, and get the same times."""
    plan = config.parallel
    with open_world(store, rank, plan.world_size, plan, generation) as world:
        # No dataset: only steps read it, and none is made.
        trainer = Trainer(config, plan, world, cast(SampleStream, None))
        found = trainer.profile().times
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return found


def runtime_overheads(runs: list[tuple[RunConfig, OpTimes]], machine: MachineRates) -> dict[str, float]:
    """Return the time of measured instructions beyond their kernels and collectives, by storage level, base and
    layer."""
    found: dict[str, float] = {}
    for config, measured in runs:
        plan, model = config.parallel, config.model
        modelled = profiled_times(model, plan, config.workload, machine)
        level = storage_level(plan, 0)
        for kind in KINDS:
            points = [
                (len(plan.layers(stage, model.num_layers)), time_s - modelled.seconds[kind, stage])
                for stage in range(plan.num_stages)
                if (time_s := measured.seconds.get((kind, stage))) is not None
            ]
            if points:
                base, layer = _fit_line(points)
                found[overhead_name(level, kind, "base")] = base
                found[overhead_name(level, kind, "layer")] = layer
        mean_layers = model.num_layers / plan.pp
        for kind in (Kind.GRAD_NORM, Kind.STEP):
            rest_s = measured.seconds.get((kind, -1), 0.0) - modelled.seconds[kind, -1]
            found[overhead_name(level, kind, "layer")] = max(0.0, rest_s / mean_layers)
    return found


def _fit_line(points: list[tuple[int, float]]) -> tuple[float, float]:
    """Return (value at 0, slope) of the best-fitting line with neither below 0."""
    counts = sorted({count for count, _ in points})
    means = [sum(y for x, y in points if x == count) / sum(x == count for x, _ in points) for count in counts]
    if len(counts) == 1:
        return 0.0, max(0.0, means[0] / counts[0])
    slope = max(0.0, (means[-1] - means[0]) / (counts[-1] - counts[0]))
    return max(0.0, means[0] - slope * counts[0]), slope
