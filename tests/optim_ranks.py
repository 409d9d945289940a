"""Plain optimizers to compare with, and what each rank does in the tests of Muon over several ranks."""

import hashlib
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from muster.checkpoint.load import load
from muster.checkpoint.local_shard import LocalShard
from muster.checkpoint.save import save
from muster.config.optim_config import OptimConfig
from muster.cost.memory.rank_memory import optimizer_bytes
from muster.layout.mesh import coordinates_of
from muster.layout.tensor_layout import Box, TensorLayout, rank_layouts, stages_on
from muster.optim.base import Optimizer
from muster.optim.build import build_optimizer
from muster.optim.muon import Muon
from muster.optim.peer_exchange import PeerGroup
from muster.parallel.world import World, open_world
from muster.spec.model import ModelSpec, parameter_shapes
from muster.spec.plan import Plan
from muster.spec.plan_name import parse_plan_name

SPEC = ModelSpec(
    vocab_size=11, hidden_size=6, num_layers=2, num_heads=3, num_kv_heads=1, head_dim=2, intermediate_size=5
)
"""On four ranks, 6 rows are cut into 2, 2, 2, 0; 5 rows into 2, 2, 1, 0; 2 rows into 1, 1, 0, 0."""

LR = 0.02


def draw(name: str, shape: tuple[int, ...], step: int) -> Tensor:
    """The whole gradient of one step; step 0 is the initial value."""
    seed = int.from_bytes(hashlib.sha256(f"{name} {step}".encode()).digest()[:6], "little")
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def whole(name: str, shape: tuple[int, ...]) -> TensorLayout:
    return TensorLayout(name, shape, (Box((0,) * len(shape), shape),))


def cut(full: Tensor, boxes: tuple[Box, ...]) -> Tensor:
    """Return the local tensor of a rank with these boxes, as one box or as several one after the other."""
    parts = [full[box.slices].clone() for box in boxes]
    return parts[0] if len(parts) == 1 else torch.cat([full.new_empty(0), *(part.reshape(-1) for part in parts)])


def local_params(layouts: Mapping[str, TensorLayout]) -> dict[str, Tensor]:
    return {name: cut(draw(name, one.shape, 0), one.boxes) for name, one in layouts.items() if one.boxes}


def walk(optimizer: Optimizer, layouts: Mapping[str, TensorLayout], steps: range) -> None:
    """Steps with gradients that are cut from the same whole ones under every layout."""
    for step in steps:
        for name, param in optimizer.params.items():
            param.grad = cut(draw(name, layouts[name].shape, step), layouts[name].boxes)
        optimizer.step(LR / step)


def pieces(optimizer: Optimizer, layouts: Mapping[str, TensorLayout]) -> list[LocalShard]:
    """Return the shards of a checkpoint."""
    model = [LocalShard(f"model/{name}", layouts[name], param) for name, param in optimizer.params.items()]
    own = optimizer.state_layouts()
    return model + [
        LocalShard(f"optim/{key}", own.get(key, layouts[name]), one) for key, (name, one) in optimizer.state().items()
    ]


# ----------------------------------------------------------------------------------------------------------------------
# Optimizers as their papers write them, one whole tensor at a time


def plain(config: OptimConfig, name: str, shape: tuple[int, ...], steps: int) -> Tensor:
    """A parameter after `steps` steps of `walk`."""
    w, m, v = draw(name, shape, 0), torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64)
    is_inner = name.startswith("layers.") and "norm" not in name
    decay = config.weight_decay if is_inner or name.startswith("head") else 0.0
    b1, b2, mu = config.beta1, config.beta2, config.momentum
    for step in range(1, steps + 1):
        g, lr = draw(name, shape, step), LR / step
        if config.name == "sgd":
            m = mu * m + g
            update = g + mu * m if config.nesterov else m
        elif config.name == "lion":
            update, m = (b1 * m + (1 - b1) * g).sign(), b2 * m + (1 - b2) * g
        elif config.name == "muon" and is_inner:
            m = mu * m + g
            update = plain_newton_schulz(g + mu * m if config.nesterov else m)
            rows, cols = shape
            original = max(1, rows / cols) ** 0.5
            update = update * (0.2 * max(rows, cols) ** 0.5 if config.muon_scale == "match_rms" else original)
            lr *= config.muon_lr_ratio
        else:
            m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
            mean = m / (1 - b1**step)
            if config.name == "adamw" and config.nesterov:
                mean = b1 * m / (1 - b1 ** (step + 1)) + (1 - b1) * g / (1 - b1**step)
            update = mean / ((v / (1 - b2**step)).sqrt() + config.eps)
        w = w - lr * decay * w - lr * update
    return w


def plain_newton_schulz(g: Tensor) -> Tensor:
    """On the singular values: x becomes 3.4445 x − 4.7750 x³ + 2.0315 x⁵, five times."""
    u, s, vt = torch.linalg.svd(g / g.norm(), full_matrices=False)
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u @ torch.diag(s) @ vt


# ----------------------------------------------------------------------------------------------------------------------
# Ranks


def on_rank(rank: int, world_size: int, store: dist.Store, payload: dict[str, Any]) -> list[dict[str, Any]]:
    """Each case of the payload in turn, in a world of its own."""
    return [run_case(rank, world_size, store, index, **case) for index, case in enumerate(payload["cases"])]


def run_case(
    rank: int,
    world_size: int,
    store: dist.Store,
    generation: int,
    plan: str,
    steps: tuple[int, int] = (1, 4),
    load_from: str | None = None,
    save_to: str | None = None,
    fault: bool = False,
    optim: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Steps Muon, or another optimizer, under a plan; how far this rank's parameters are from one process's, and a hash
    of all that it has."""
    config = OptimConfig(**{"name": "muon", "lr": LR} | (optim or {}))
    full_plan = parse_plan_name(plan, Plan(precision="fp64"))
    layouts = {layout.name: layout for layout in rank_layouts(SPEC, full_plan, rank)}
    params = local_params(layouts)
    with open_world(store, rank, world_size, full_plan, generation) as world:
        peers = PeerGroup.from_world(world)
        make = shards_as_wholes if fault else build_optimizer
        optimizer = make(config, params, layouts, world)
        if load_from is not None:
            optimizer.step_count = load(Path(load_from), pieces(optimizer, layouts)).step
        walk(optimizer, layouts, range(*steps))
        if save_to is not None:
            info = {"plan": {}, "model": {}, "counters": {}}
            save(
                Path(save_to), steps[1] - 1, pieces(optimizer, layouts), info, rank, world_size, world.all_gather_object
            )
    wholes = {name: whole(name, shape) for name, shape in parameter_shapes(SPEC)}
    alone = build_optimizer(config, local_params(wholes), wholes)
    walk(alone, wholes, range(1, steps[1]))
    at = coordinates_of(full_plan, rank)
    expected = [cut(alone.params[name], layouts[name].boxes) for name in params]
    everything = [*params.values(), *(tensor for _, tensor in optimizer.state().values())]
    return {
        "error": max(float((a - b).abs().max()) for a, b in zip(params.values(), expected, strict=True)),
        "state": (
            sum(tensor.nbytes for _, tensor in optimizer.state().values()),
            sum(optimizer_bytes(SPEC, full_plan, stage, at, config) for stage in stages_on(full_plan, at.pp)),
        ),
        "held": sorted(params),
        "peers": list(peers.ranks),
        "digest": hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in everything)).hexdigest(),
    }


def shards_as_wholes(
    config: OptimConfig, params: Mapping[str, Tensor], layouts: Mapping[str, TensorLayout], world: World
) -> Optimizer:
    """A bug, sown on purpose: each rank makes its own rows orthogonal."""
    return Muon(config, params, {n: whole(n, tuple(p.shape)) for n, p in params.items()}, PeerGroup.from_world(None))


# ----------------------------------------------------------------------------------------------------------------------
# Threads, for layouts that no plan has yet


@dataclass(frozen=True)
class ThreadPeers(PeerGroup):
    """Members that are threads of this process."""

    table: list[Any]
    barrier: threading.Barrier
    sent: list[int]
    """Numbers sent to others, by member."""

    def all_gather_object(self, value: Any) -> list[Any]:
        self.table[self.member] = value
        self.barrier.wait()
        values = list(self.table)
        self.barrier.wait()
        return values

    def all_to_all(self, sends: Sequence[Tensor], receives: Sequence[Tensor]) -> None:
        self.sent[self.member] += sum(tensor.numel() for n, tensor in enumerate(sends) if n != self.member)
        for received, sent in zip(receives, self.all_gather_object(sends), strict=True):
            received.copy_(sent[self.member])
        self.barrier.wait()


def run_members(
    config: OptimConfig, layouts: list[dict[str, TensorLayout]], steps: int
) -> tuple[list[Optimizer], list[int]]:
    """Muon for each member's layouts, after `steps` steps, and the numbers each sent; raises what a member raises."""
    size = len(layouts)
    barrier, table, sent = threading.Barrier(size, timeout=120), [None] * size, [0] * size

    def member(index: int) -> Optimizer:
        try:
            peers = ThreadPeers(None, tuple(range(size)), index, table, barrier, sent)
            optimizer = Muon(config, local_params(layouts[index]), layouts[index], peers)
            walk(optimizer, layouts[index], range(1, steps + 1))
            return optimizer
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(member, index) for index in range(size)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    if errors:
        raise min(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError))
    return [future.result() for future in futures], sent
