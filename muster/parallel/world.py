"""A World: the processes that run one attempt at a job, and how they reach each other."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from muster.launch.heartbeat import Heartbeat, open_heartbeat
from muster.layout.mesh import MeshCoordinates, coordinates_of, rank_at, ranks_of_pp_rank
from muster.parallel.axis import PipelineAxis, TensorAxis
from muster.spec.mesh_axes import STAGE_AXES
from muster.spec.plan import LayerStrategy, Plan

T = TypeVar("T")

COLLECTIVE_TIMEOUT = timedelta(minutes=5)
"""How long a rank waits for another before it gives up."""
FINALIZE_TIMEOUT = timedelta(days=1)
"""How long rank 0 may work alone at the end, while the others wait for it."""


@dataclass(frozen=True)
class World:
    """One generation of ranks under one plan. Everything that communicates receives a World."""

    generation: int
    rank: int
    size: int
    plan: Plan
    at: MeshCoordinates
    device: torch.device
    store: dist.Store
    mesh: DeviceMesh
    """The ranks that hold the same stages as this one, by the axes within a stage."""
    pipeline: PipelineAxis | None = None
    """The ranks that share a spread vocabulary with this one."""
    heartbeat: Heartbeat = field(default_factory=open_heartbeat)
    """Says to the launcher what this rank begins."""

    def fsdp_mesh(self) -> DeviceMesh | None:
        """The ranks that hold the same stage and different data, as fully_shard wants them; None for one alone."""
        mesh = self.plan.mesh(self.at.pp)
        if mesh.dp_replicate > 1:
            return self.mesh["dp_replicate", "dp_shard"]
        return self.mesh["dp_shard"] if mesh.dp_shard > 1 else None

    def tensor_axis(self, strategy: LayerStrategy) -> TensorAxis | None:
        """The ranks that share each layer with this one; None where it has them whole."""
        size = self.plan.mesh(self.at.pp).tp
        if size == 1:
            return None
        chunked = strategy.tp_overlap == "async_tp"
        return TensorAxis(self.mesh["tp"].get_group(), size, self.at.tp, strategy.sp, chunked)

    def pipeline_axis(self) -> PipelineAxis:
        """The ranks that share the vocabulary with this one, where the plan spreads it."""
        assert self.pipeline is not None, "the plan's vocabulary is not spread"
        return self.pipeline

    def wait_for_rank_0(self) -> None:
        """Lets rank 0 finish what it does alone, however long it takes; every rank calls it."""
        self.heartbeat.update("finish")
        if self.rank == 0:
            self.store.set("main is done", "")
        else:
            self.store.wait(["main is done"], FINALIZE_TIMEOUT)

    def all_reduce(self, values: torch.Tensor) -> torch.Tensor:
        """Sums `values` over all ranks, in place."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def all_reduce_async(self, values: torch.Tensor) -> dist.Work:
        """Begins to sum `values` over all ranks, of which there are several; they hold the sum once that is over."""
        work = dist.all_reduce(values, async_op=True)
        assert work is not None
        return work

    def barrier(self) -> None:
        """Waits until every rank is here."""
        if self.size > 1:
            dist.barrier()

    def all_gather_object(self, value: T) -> list[T]:
        """Every rank's `value`, in rank order, on every rank. For small things only."""
        values = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value)
        return values

    def all_gather_object_via_store(self, name: str, value: T, limit: timedelta) -> list[T]:
        """As `exchange`, for what JSON can say, where a rank may come so much later than another. Each call wants a
        name of its own. It goes over the store: a collective would give up after WAIT_LIMIT."""
        keys = [f"exchange/{name}/{rank}" for rank in range(self.size)]
        self.store.set(keys[self.rank], json.dumps(value))
        everyone = f"exchange/{name}/all"
        if self.rank == 0:
            self.store.wait(keys, limit)
            self.store.set(everyone, json.dumps([json.loads(self.store.get(key)) for key in keys]))
        self.store.wait([everyone], limit)
        return json.loads(self.store.get(everyone))

    def broadcast_object(self, value: T) -> T:
        """Rank 0's `value`, on every rank. For small things only."""
        box = [value]
        if self.size > 1:
            dist.broadcast_object_list(box)
        return box[0]


@contextmanager
def open_world(
    store: dist.Store, rank: int, size: int, plan: Plan, generation: int = 0, device: torch.device | None = None
) -> Iterator[World]:
    """Joins `size` ranks, each under its own prefix of the launcher's store, and leaves together at the end.

    Leaving without a last barrier can abort the ranks that are slower, so a normal exit waits for all; an exception
    doesn't, because the others may never come.
    """
    device = device or pick_device(rank, size)
    where = open_heartbeat()
    where.update("join")
    prefixed = dist.PrefixStore(f"generation-{generation}", store)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=prefixed,
        rank=rank,
        world_size=size,
        timeout=COLLECTIVE_TIMEOUT,
    )
    at = coordinates_of(plan, rank)
    meshes = [_stage_mesh(plan, pp_rank, device) for pp_rank in range(plan.pp)]  # all ranks make all groups, in order
    pipe = _pipeline_axis(plan, at) if plan.vocab_parallel else None
    world = World(generation, rank, size, plan, at, device, prefixed, meshes[at.pp], pipe, where)
    try:
        yield world
        world.barrier()
    finally:
        dist.destroy_process_group()


def fake_world(plan: Plan, rank: int, store: dist.Store) -> World:
    """The world as `rank` sees it where all ranks are one process's fiction: the process group is there already, and it
    is PyTorch's fake one."""
    at, device = coordinates_of(plan, rank), torch.device("cpu")
    pipe = _pipeline_axis(plan, at) if plan.vocab_parallel else None
    return World(0, rank, plan.world_size, plan, at, device, store, _stage_mesh(plan, at.pp, device), pipe)


def _stage_mesh(plan: Plan, pp_rank: int, device: torch.device) -> DeviceMesh:
    """The ranks of one pipeline rank. Every rank of the world must call it."""
    ranks, mesh = [rank for rank, _ in ranks_of_pp_rank(plan, pp_rank)], plan.mesh(pp_rank)
    sizes = [getattr(mesh, axis) for axis in STAGE_AXES]
    return DeviceMesh(device.type, torch.tensor(ranks).view(sizes), mesh_dim_names=STAGE_AXES)


def _pipeline_axis(plan: Plan, at: MeshCoordinates) -> PipelineAxis:
    """Every rank of the world must call it."""
    own: PipelineAxis | None = None
    for ranks in zip(
        *([rank for rank, _ in ranks_of_pp_rank(plan, pp_rank)] for pp_rank in range(plan.pp)), strict=True
    ):
        group = dist.new_group(list(ranks))
        if rank_at(plan, at) in ranks:
            assert isinstance(group, dist.ProcessGroup)
            own = PipelineAxis(group, ranks, at.pp)
    assert own is not None
    return own


def pick_device(rank: int, size: int) -> torch.device:
    """This rank's own GPU where the machine has one for each of its ranks, the CPU for all of them otherwise.

    torchrun says how many ranks a machine has; without it all of them are on this one.
    """
    local_rank, local_size = int(os.environ.get("LOCAL_RANK", rank)), int(os.environ.get("LOCAL_WORLD_SIZE", size))
    if torch.cuda.is_available() and torch.cuda.device_count() >= local_size:
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        return device
    return torch.device("cpu")
