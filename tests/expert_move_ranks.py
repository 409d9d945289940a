"""Ranks of the tests of moving experts: runs in which experts move, beside the same runs in which they stay."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

from muster.checkpoint.load import fill_shards
from muster.checkpoint.local_shard import LocalShard
from muster.checkpoint.manifest import read_manifest
from muster.checkpoint.save import save
from muster.config.cluster_files import load_cluster
from muster.config.run_config import RunConfig
from muster.parallel.world import World, open_world
from muster.schedule.resolve import resolve_schedule
from muster.simulate.expert_moves import PredictedMoves
from muster.simulate.predict import predict
from muster.spec.nearest_plans import require_runnable
from muster.spec.plan import Plan
from muster.spec.plan_name import parse_plan_name
from muster.spec.routing_load import RoutingLoad
from muster.train.expert_mover import ExpertMover
from muster.train.step_result import ExpertMoves, StepResult
from muster.train.trainer import Trainer
from tests.parity import open_data, small_run

STEPS, EVERY, SAVED = 6, 2, 3
"""Steps of a run, steps between moves, and the step whose state is saved: after moves, and between two of them."""


@contextmanager
def stale_moment() -> Iterator[None]:
    """The first moments of experts stay where they were."""
    exchange = ExpertMover._exchange_shard

    def faulty(self: ExpertMover, shard: LocalShard, *layouts: Any) -> None:
        if not shard.name.endswith(".exp_avg"):
            exchange(self, shard, *layouts)

    with patch.object(ExpertMover, "_exchange_shard", faulty):
        yield


def run_moves(rank: int, world_size: int, store: dist.Store, payload: dict[str, Any]) -> list[dict[str, Any]]:
    """Results of each case of the payload."""
    return [
        _run_case(rank, world_size, store, 10 * number, payload["cache"], **case)
        for number, case in enumerate(payload["cases"])
    ]


def _run_case(
    rank: int,
    world_size: int,
    store: dist.Store,
    generation: int,
    cache: str,
    plan: str,
    fault: bool = False,
    later: str = "",
    ema: bool = False,
    is_free: bool = True,
    **kind: Any,
) -> dict[str, Any]:
    """Losses with experts that stay and with ones that move, and those after a resume from the latter's checkpoint:
    under the same plan, and under `later` with experts that stay. `is_free`: moves are taken to cost nothing."""
    config = small_run(**({"family": "experts"} | kind))
    config = config.model_copy(update={"optim": config.optim.model_copy(update={"ema_decay": 0.9 if ema else 0.0})})
    moving = _with_moves(config)
    own = _plan(plan, config, world_size)
    root = Path(cache) / f"saved-{generation}"
    cost = patch("muster.cost.expert_moves.exchange_cost", lambda *_: 0.0) if is_free else nullcontext()
    found: dict[str, Any] = {}
    with open_world(store, rank, world_size, own, generation) as world:
        trainer = Trainer(config, own, world, open_data(config, cache))
        found["stayed"] = [trainer.step().loss for _ in range(STEPS)]
        with cost, stale_moment() if fault else nullcontext():
            trainer = Trainer(moving, own, world, open_data(config, cache))
            assert trainer.expert_mover is not None
            trainer.expert_mover.profile(own)
            results = [trainer.step() for _ in range(EVERY)]
            predicted = _predicted(moving, own, results)
            found["predicted"] = [predicted.plan.expert_placement, predicted.num_experts, predicted.num_bytes]
            assert results[-1].expert_moves is not None
            found["executed"] = [trainer.plan.expert_placement, *_sizes(results[-1].expert_moves)]
            program = trainer._program_of(own, moves_experts=True)
            found["programs"] = program == predicted.program
            results += [trainer.step() for _ in range(SAVED - EVERY)]
            if rank == 0:
                root.mkdir()
            world.barrier()
            info = {"plan": trainer.plan.model_dump(mode="json"), "model": config.model.model_dump(mode="json")}
            info |= {"counters": trainer.counters()}
            save(root, SAVED, trainer.local_shards(), info, rank, world_size, world.all_gather_object)
            results += [trainer.step() for _ in range(STEPS - SAVED)]
            found["placement"] = trainer.plan.expert_placement
            found["resumed"] = _resumed(root, moving, own, world, cache)
        found["moved"] = [one.loss for one in results]
        moves = [one.expert_moves for one in results if one.expert_moves]
        found["predicted_s"] = [one.predicted_s for one in moves]
        found["moves"] = [[m.num_experts, m.max_over_mean_before, m.max_over_mean_after] for m in moves]
        found["bytes"] = [trainer.expert_mover.sent_bytes, sum(one.num_bytes for one in moves)]
        found["instructions"] = [
            str(event.action) for _, events in trainer.step_events().items() for event in events
        ].count("MOVE_EXPERTS")
    if later:
        other = _plan(later, config, world_size)
        with open_world(store, rank, world_size, other, generation + 1) as world:
            found["later"] = _resumed(root, config, other, world, cache)
    return found


def _predicted(config: RunConfig, plan: Plan, results: Sequence[StepResult]) -> PredictedMoves:
    """The moves that the load of these steps, measured, makes a prediction expect."""
    sums = [
        [sum(counts) for counts in zip(*(load.counts for load in layer), strict=True)]
        for layer in zip(*(one.expert_load for one in results), strict=True)
    ]
    load = RoutingLoad(tuple(tuple(count / sum(row) for count in row) for row in sums), "a test")
    workload = config.workload.model_copy(update={"expert_load": load})
    plan, cluster = plan.model_copy(update={"precision": "fp32"}), load_cluster(f"{plan.world_size}xh100")
    found = predict(config.model, plan, workload, cluster, optim=config.optim, rebalance_experts_every=EVERY).moves
    assert found is not None
    return found


def _sizes(moves: ExpertMoves) -> list[int]:
    return [moves.num_experts, moves.num_bytes // 2]  # a prediction is of float32, a run here of float64


def _with_moves(config: RunConfig) -> RunConfig:
    return config.model_copy(update={"train": config.train.model_copy(update={"rebalance_experts_every": EVERY})})


def _plan(name: str, config: RunConfig, world_size: int) -> Plan:
    plan = parse_plan_name(name, Plan(precision="fp64", micro_batch_size=2))
    plan = resolve_schedule(plan, config.model, config.workload)
    require_runnable(plan, config.model, config.workload, world_size)
    return plan


def _resumed(root: Path, config: RunConfig, plan: Plan, world: World, cache: str) -> list[float]:
    """Losses of the steps after the checkpoint."""
    trainer = Trainer(config, plan, world, open_data(config, cache))
    manifest = read_manifest(folder := next(path for path in root.iterdir() if path.name.startswith("step-")))
    trainer.take_expert_placement(manifest)
    fill_shards(folder, manifest, trainer.shards_to_load(manifest.step))
    trainer.restore(manifest.step, manifest.counters)
    return [trainer.step().loss for _ in range(STEPS - SAVED)]
