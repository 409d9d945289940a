"""A trainer whose stages a swarm serves, beside a training of one process: the work of one rank of the tests."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from muster.config.optim_config import OptimConfig
from muster.config.run_config import RunConfig
from muster.config.swarm_config import SwarmConfig
from muster.launch.peers.channel import create_secret
from muster.parallel.world import World, open_world
from muster.spec.plan_name import parse_plan_name
from muster.train.trainer import Trainer
from tests.parity import open_data, small_run
from tests.swarm_peers import Faults, Nursery, seed_bug
from tests.toy_peers import free_ports


def configuration(case: dict[str, Any], folder: Path) -> RunConfig:
    """A run of small batches in float64, whose updates are its gradients times the learning rate."""
    own = SwarmConfig(
        listen=f"127.0.0.1:{free_ports(1)[0]}",
        secret_file=str(folder / "secret"),
        **{"timeout_s": 0.5, "silence_s": 5.0, "rebalance_every": 0} | case.get("swarm", {}),
    )
    run = small_run(steps=case["steps"], optim=case.get("optim", "sgd"), packing=case.get("packing", "concatenate"))
    optim = OptimConfig(name=case.get("optim", "sgd"), lr=0.05, warmup_steps=0, clip_norm=case.get("clip_norm", 0.0))
    plan = parse_plan_name(case.get("plan", "mb1-fp64"))
    return run.model_copy(update={"swarm": own, "optim": optim, "parallel": plan})


def train_in_swarm(rank: int, world_size: int, store: dist.Store, payload: dict[str, Any]) -> list[dict[str, Any]]:
    """By case: the largest difference to a training of one process, of a step's gradients and of its loss."""
    found = []
    for index, case in enumerate(payload["cases"]):
        folder = Path(payload["cache"]) / f"case-{index}"
        folder.mkdir()
        with seed_bug(case["bug"]) if case.get("bug") else nullcontext():
            found.append(_train(case, configuration(case, folder), folder, store, payload["cache"], index))
    return found


def _train(
    case: dict[str, Any], config: RunConfig, folder: Path, store: dist.Store, cache: str, index: int
) -> dict[str, Any]:
    create_secret(folder / "secret")
    assert config.swarm is not None
    port = int(config.swarm.listen.rpartition(":")[2])
    nursery = Nursery(port, folder / "secret", folder, case.get("deaths", 0))  # before this process has threads
    said: list[str] = []
    for name, faults in case["peers"].items():
        nursery.start(name, Faults(**faults))
    events = {int(step): event for step, event in case.get("events", {}).items()}
    with open_world(store, 0, 1, config.parallel, index) as world:
        trainer = _trainer(config, world, cache)
        swarm = trainer.swarm
        assert swarm is not None
        swarm.say = said.append
        trainer.join_peers()

        def act(step: int) -> None:
            if step in events:
                what, name, *faults = events[step]
                nursery.kill(name) if what == "kill" else nursery.start(name, Faults(*faults))

        steps = _steps(trainer, config, act)
        rows = swarm.pop_rows()
        swarm.leave(is_over=True)
        deaths = nursery.close()
    with open_world(store, 0, 1, config.parallel, 1000 + index) as world:
        expected = _steps(_trainer(config.model_copy(update={"swarm": None}), world, cache), config)
    pairs = list(zip(steps, expected, strict=True))
    return {
        "gradient": max(max(float((g - h).abs().max()) for g, h in zip(a[0], b[0], strict=True)) for a, b in pairs),
        "size": max(float(h.abs().max()) for h in expected[0][0]),
        "loss": max(abs(a[1] - b[1]) for a, b in pairs),
        "norm": max(abs(a[2] - b[2]) for a, b in pairs),
        "deaths": deaths,
        "retried": sum(row["retried"] for row in rows),
        "rows": rows,
        "said": said,
    }


def _trainer(config: RunConfig, world: World, cache: str) -> Trainer:
    return Trainer(config, config.parallel, world, open_data(config, cache))


def _steps(
    trainer: Trainer, config: RunConfig, act: Callable[[int], None] = lambda step: None
) -> list[tuple[list[Tensor], float, float]]:
    """Gradients, loss and gradient norm of each step; the gradients are what parameters have changed by, over the
    learning rate."""
    found = []
    for step in range(config.train.num_steps):
        act(step)
        before = [x.detach().clone() for x in trainer.updater.parameters.values()]
        result = trainer.step()
        if trainer.swarm is not None:
            trainer.swarm.pull()
        after = trainer.updater.parameters.values()
        with torch.no_grad():
            gradients = [(x - y) / result.learning_rate for x, y in zip(before, after, strict=True)]
        found.append((gradients, result.loss, result.grad_norm))
    return found
