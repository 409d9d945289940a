"""Ranks of the tests of resuming under another plan: train, save, load under the next plan, compare."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch.distributed as dist

from muster.checkpoint import load as load_module
from muster.checkpoint.async_saver import AsyncSaver, SaveRequest
from muster.checkpoint.checkpoint_dir import RetentionPolicy, checkpoint_path
from muster.checkpoint.load import load
from muster.checkpoint.local_shard import LocalShard
from muster.checkpoint.read_plan import plan_reads
from muster.config.run_config import RunConfig
from muster.launch.store_waits import wait_for_keys
from muster.optim.weight_average import average_decay
from muster.parallel.world import World, open_world
from muster.spec.context_kinds import CP_COMM_TYPES
from muster.spec.errors import MusterError
from muster.spec.layer_strategy import LayerStrategy
from muster.spec.legality import schedules_for_vpp
from muster.spec.mesh import Mesh
from muster.spec.nearest_plans import require_runnable
from muster.spec.plan import Plan, StageSpec
from muster.train.step_state import StepHooks
from muster.train.trainer import Trainer
from tests.parity import open_data

SEARCHED = ("auto", "exact")
"""Schedules that are orders found for one plan; where numbers lie under them is what it is under 1f1b."""


def _draw_context(draw: random.Random, cp: int) -> dict[str, Any]:
    kind = draw.choice(CP_COMM_TYPES) if cp > 1 else "p2p"
    window = draw.choice([1, 2]) if kind == "p2p" and cp == 4 else 1
    return {"cp_comm_type": kind, "cp_ulysses_degree": 2 if kind == "a2a+p2p" else 1, "cp_window_size": window}


def draw_plan(draw: random.Random, config: RunConfig, precision: str, most: int = 8) -> Plan:
    """A random plan that can train the run's model, of up to `most` processes."""
    while True:
        pp = draw.choice([pp for pp in (1, 1, 2, 2, 3, 4) if pp <= most])
        meshes = [_draw_mesh(draw, most // pp) for _ in range(pp)]
        unequal = pp > 1 and draw.random() < 0.25
        mesh = meshes[0]
        vpp = 1 if pp == 1 or unequal else draw.choice([1, 1, 2, 4])
        stages = _draw_layers(draw, config.model.num_layers, pp) if vpp == 1 and draw.random() < 0.5 else ()
        if unequal:
            layers = stages or _draw_layers(draw, config.model.num_layers, pp)
            stages = tuple(replace_mesh(stage, one) for stage, one in zip(layers, meshes, strict=True))
        try:
            plan = Plan(
                dp_replicate=mesh.dp_replicate,
                dp_shard=mesh.dp_shard,
                cp=mesh.cp,
                **_draw_context(draw, mesh.cp),
                tp=mesh.tp,
                pp=pp,
                vpp=vpp,
                stages=stages,
                schedule=draw.choice([name for name in schedules_for_vpp(vpp) if name not in SEARCHED]),
                micro_batch_size=draw.choice([1, 2, 4, 4, 8]),  # few micro-batches: collectives of many are slow here
                default_strategy=LayerStrategy(zero=draw.choice(["z1", "z2", "z3"]), sp=draw.random() < 0.5),
                vocab_parallel=pp > 1 and draw.random() < 0.3,
                precision=precision,  # type: ignore[arg-type]
            )
            if plan.world_size <= most:
                require_runnable(plan, config.model, config.workload, plan.world_size)
                return plan
        except (MusterError, ValueError):
            continue


def _draw_mesh(draw: random.Random, most: int) -> Mesh:
    while True:
        mesh = Mesh(
            dp_replicate=draw.choice([1, 1, 2]),
            dp_shard=draw.choice([1, 2, 2, 3, 4]),
            cp=draw.choice([1, 1, 1, 2, 4]),
            tp=draw.choice([1, 1, 2, 4]),
        )
        if mesh.num_ranks <= most:
            return mesh


def _draw_layers(draw: random.Random, layers: int, pp: int) -> tuple[StageSpec, ...]:
    cuts = [0, *sorted(draw.sample(range(1, layers), pp - 1)), layers]
    return tuple(StageSpec(layers=b - a) for a, b in zip(cuts, cuts[1:], strict=False))


def replace_mesh(stage: StageSpec, mesh: Mesh) -> StageSpec:
    return stage.model_copy(update={"mesh": mesh})


# ----------------------------------------------------------------------------------------------------------------------
# On the ranks


def chains(rank: int, size: int, store: dist.Store, payload: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """Each chain of plans in turn. What rank 0 found of each pair of neighbours; nothing on other ranks."""
    found, generation = [], 0
    for number, chain in enumerate(payload["chains"]):
        config = RunConfig.model_validate(chain["config"])
        plans = [Plan.model_validate(plan) for plan in chain["plans"]]
        link = Link(config, payload["cache"], Path(payload["root"]) / str(number), chain.get("fault"), payload["steps"])
        results = []
        for plan in plans:
            generation += 1
            result = None
            if rank < plan.world_size:
                with open_world(store, rank, plan.world_size, plan, generation) as world:
                    result = link.go_on(world, plan)
            if rank == 0:
                store.set(f"told-{generation}", str(link.step))
            wait_for_keys(store, [f"told-{generation}"], timedelta(seconds=300))
            link.step = int(store.get(f"told-{generation}"))
            if result is not None:
                results.append(result)
        found.append(results)
    return found


class Link:
    """One chain: what the plan before has saved, and what it did in so many steps after that."""

    def __init__(self, config: RunConfig, cache: str, root: Path, fault: str | None, num_steps: int) -> None:
        self.config, self.cache, self.root, self.fault, self.num_steps = config, cache, root, fault, num_steps
        self.step = 0
        self.losses: list[float] = []
        self.whole: dict[str, np.ndarray] = {}

    def go_on(self, world: World, plan: Plan) -> dict[str, Any] | None:
        """Load the checkpoint, train `num_steps` steps, save, and train as many more for the next to compare with."""
        saver = AsyncSaver(world.rank, world.size, world.store)
        hooks = StepHooks(before_update=saver.wait_staged)
        trainer = Trainer(self.config, plan, world, open_data(self.config, self.cache), hooks)
        result: dict[str, Any] = {}
        if self.step:
            folder = checkpoint_path(self.root, self.step)
            with FAULTS[self.fault]():
                manifest = load(folder, trainer.local_shards())
                trainer.restore(manifest.step, manifest.counters)
            result = {"tensors": _unequal(self.whole, assemble(world, trainer.local_shards()))}
            losses = [trainer.step().loss]
            if self.config.optim.ema_decay:
                result["average"] = self._average_error(assemble(world, trainer.local_shards()), trainer.step_count)
            losses += [trainer.step().loss for _ in range(self.num_steps - 1)]
            pairs = list(zip(losses, self.losses, strict=True)) if world.rank == 0 else []
            result |= {"error": max((abs(a - b) / abs(b) for a, b in pairs), default=0.0)}
        else:
            trainer.step()
            if self.config.optim.ema_decay:  # from here on its step count is another than the run's
                trainer.updater.optimizer.begin_state(["layers.3.attn.q.weight"])
        self.step = trainer.step_count
        if world.rank == 0:
            self.root.mkdir(exist_ok=True, parents=True)
        info = {"plan": plan.model_dump(mode="json"), "model": {}, "counters": trainer.counters()}
        saver.start(SaveRequest(self.root, self.step, info, RetentionPolicy()), trainer.local_shards())
        self.whole = assemble(world, trainer.local_shards())
        self.losses = [trainer.step().loss for _ in range(self.num_steps)]
        assert saver.wait(60)
        assert saver.error is None, saver.error
        saver.close()
        return result if world.rank == 0 else None

    def _average_error(self, after: dict[str, np.ndarray], step: int) -> float:
        """The largest difference of the averages after a step from those of whole weights; 0 on other ranks than 0."""
        decay, largest = average_decay(self.config.optim.ema_decay, step), 0.0
        for name in (name for name in after if name.endswith(".ema")):
            weight = after[name.replace("optim/", "model/").removesuffix(".ema")]
            expected = decay * self.whole[name] + (1 - decay) * weight
            largest = max(largest, float(np.abs(after[name] - expected).max()))
        return largest


def assemble(world: World, shards: list[LocalShard]) -> dict[str, np.ndarray]:
    """Every tensor whole, on rank 0, from what the ranks hold in memory, without a checkpoint. Copies must agree."""
    own = [
        (shard.name, shard.layout.shape, [(box.slices, part.numpy().copy()) for box, part in shard.box_views()])
        for shard in shards
    ]
    whole: dict[str, np.ndarray] = {}
    known: dict[str, np.ndarray] = {}
    everyone = world.all_gather_object(own)
    for name, shape, parts in (entry for rank in everyone for entry in rank) if world.rank == 0 else ():
        for slices, part in parts:
            into = whole.setdefault(name, np.zeros(shape, part.dtype))[slices]
            found = known.setdefault(name, np.zeros(shape, bool))[slices]
            assert np.array_equal(into[found], part[found]), f"the copies of {name} differ"
            into[...], found[...] = part, True
    assert all(found.all() for found in known.values()), "some tensor isn't whole"
    return whole


def _unequal(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> list[str]:
    """The tensors that aren't the same to the bit."""
    names = sorted(ours.keys() | theirs.keys())
    return [name for name in names if name not in ours or name not in theirs or not _same(ours[name], theirs[name])]


def _same(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


# ----------------------------------------------------------------------------------------------------------------------
# Bugs, sown on purpose


@contextmanager
def no_fault() -> Iterator[None]:
    yield


@contextmanager
def other_position() -> Iterator[None]:
    """The data go on one step too early."""
    restore = Trainer.restore

    def faulty(self: Trainer, step: int, counters: Any) -> None:
        restore(self, step, {**counters, "samples_consumed": counters["samples_consumed"] - 8})

    with patch.object(Trainer, "restore", faulty):
        yield


@contextmanager
def other_step() -> Iterator[None]:
    """The learning rate and the optimizer are one step behind."""
    restore = Trainer.restore
    with patch.object(Trainer, "restore", lambda self, step, counters: restore(self, step - 1, counters)):
        yield


@contextmanager
def no_optimizer() -> Iterator[None]:
    """The optimizer's state stays as it was."""
    fill = load_module.fill_shards

    def faulty(folder: Path, manifest: Any, wanted: Any, convert: bool = False) -> None:
        fill(folder, manifest, [shard for shard in wanted if shard.name.startswith("model/")], convert)

    with patch.object(load_module, "fill_shards", faulty):
        yield


@contextmanager
def swapped_pieces() -> Iterator[None]:
    """The first two pieces of equal size that lie side by side change places."""

    def faulty(manifest: Any, wanted: Any) -> list:
        reads = plan_reads(manifest, wanted)
        for i, (a, b) in enumerate(zip(reads, reads[1:], strict=False)):
            if a.box.size == b.box.size:
                reads[i : i + 2] = [
                    replace(a, target_index=b.target_index, box=b.box),
                    replace(b, target_index=a.target_index, box=a.box),
                ]
                return reads
        raise AssertionError("no two pieces to swap")

    with patch.object(load_module, "plan_reads", faulty):
        yield


FAULTS = {
    None: no_fault,
    "other position": other_position,
    "other step": other_step,
    "no optimizer": no_optimizer,
    "swapped pieces": swapped_pieces,
}
