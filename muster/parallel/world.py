"""World of ranks: the processes of one attempt at a job, their meshes and their process groups."""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cached_property
from typing import TypeVar

import torch
import torch.distributed as dist

from muster.launch.heartbeat import Heartbeat, open_heartbeat
from muster.launch.store_waits import wait_for_keys
from muster.layout.mesh import MeshCoordinates, coordinates_of
from muster.parallel.axis import ContextAxis, ExpertAxis, PipelineAxis, TensorAxis
from muster.parallel.cpu_matmul import use_wide_matmuls
from muster.parallel.flight_recorder import enable_flight_recorder
from muster.parallel.gpu_settings import use_expandable_segments, use_full_float32
from muster.parallel.process_groups import ProcessGroups
from muster.parallel.symmetric_memory import overlap_of
from muster.parallel.turns import Turns
from muster.spec.layer_strategy import LayerStrategy
from muster.spec.plan import Plan
from muster.spec.units import pluralize

T = TypeVar("T")

COLLECTIVE_TIMEOUT = timedelta(minutes=5)
"""Time after which a rank gives up waiting for the others in a collective of all ranks, or for a message."""
GROUP_TIMEOUT = timedelta(minutes=30)
"""The same in a collective of some of the ranks, where more time than COLLECTIVE_TIMEOUT is wanted; else PyTorch's own
(30 minutes with gloo, 10 with NCCL)."""
HANG_MARGIN = timedelta(minutes=2)
"""Time from when a hang is noticed until its cause is found and said; nobody gives up before."""
FINALIZE_TIMEOUT = timedelta(days=1)
"""Time for which the other ranks wait at the end while rank 0 works alone."""


@dataclass(frozen=True)
class World:
    """One generation of ranks under one plan; everything that communicates receives a World."""

    generation: int
    rank: int
    size: int
    plan: Plan
    at: MeshCoordinates
    device: torch.device
    store: dist.Store
    groups: ProcessGroups
    heartbeat: Heartbeat = field(default_factory=open_heartbeat)
    """Page on which this rank tells the launcher the instruction that it is working on."""

    def tensor_axis(self, strategy: LayerStrategy) -> TensorAxis | None:
        """Return the tensor-parallel ranks of this one's layers; None where a rank has whole layers."""
        size = self.plan.mesh(self.at.pp).tp
        if size == 1:
            return None
        group = self.groups.by_axis["tp"]
        overlap = overlap_of(group, self.device) if strategy.tp_overlap == "async_tp" else "none"
        turns = self.turns if strategy.tp_overlap in ("domino", "pairs") else None
        return TensorAxis(group, size, self.at.tp, strategy.sp, overlap, turns, strategy.tp_overlap == "domino")

    def context_axis(self) -> ContextAxis | None:
        """Return the context-parallel ranks of this one; None where a rank has whole sequences."""
        context = self.plan.context_ranks(self.plan.mesh(self.at.pp))
        if context.size == 1:
            return None
        neighbours = None
        if self.groups.ulysses is not None:
            neighbours = ContextAxis(self.groups.ulysses, context.ulysses, self.at.cp % context.ulysses)
        return ContextAxis(
            self.groups.by_axis["cp"],
            context.size,
            self.at.cp,
            ulysses=neighbours,
            is_contiguous=context.is_contiguous,
            window=context.window,
            second_group=self.groups.second_ring,
        )

    def context_blocks(self) -> dict[int, ContextAxis]:
        """Return the blocks of context-parallel ranks that this one is in, by size; all of them are the last. Empty but
        under `cpdyn`."""
        whole = self.context_axis()
        if whole is None or not self.plan.dynamic_context_parallel:
            return {}
        blocks = {
            size: ContextAxis(group, size, self.at.cp % size) for size, group in self.groups.context_blocks.items()
        }
        return {**blocks, whole.size: whole}

    def expert_axis(self) -> ExpertAxis | None:
        """Return the ranks that share this one's experts with it; None where it has all."""
        axis = self.groups.experts
        if axis is None:
            return None
        inner, outer = (None if one is None else replace(one, turns=self.turns) for one in (axis.inner, axis.outer))
        return replace(axis, inner=inner, outer=outer, turns=self.turns)

    @cached_property
    def turns(self) -> Turns:
        """Turns that the passes of this rank's pairs take, or slices of a micro-batch."""
        return Turns(self.device)

    def pipeline_axis(self) -> PipelineAxis:
        """Return the pipeline ranks that share the vocabulary with this one; only under `vocab_parallel`."""
        assert self.groups.pipeline is not None, "the plan's vocabulary is not spread"
        return self.groups.pipeline

    def wait_for_rank_0(self) -> None:
        """Wait until rank 0 has finished the work that it does alone; every rank must call it."""
        self.heartbeat.update("finish")
        if self.rank == 0:
            self.store.set("main is done", "")
        else:
            wait_for_keys(self.store, ["main is done"], FINALIZE_TIMEOUT)

    def all_reduce(self, values: torch.Tensor) -> torch.Tensor:
        """Sum `values` over all ranks, in place, and return it."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def sum_over_island(self, values: torch.Tensor) -> torch.Tensor:
        """Sum `values` over the ranks of this one's island, in place, and return it; without islands, over all."""
        if self.plan.islands == 1:
            return self.all_reduce(values)
        if self.groups.island is not None:
            dist.all_reduce(values, group=self.groups.island)
        return values

    def all_reduce_async(self, values: torch.Tensor) -> dist.Work:
        """Start to sum `values` over all ranks, of which there are at least two; it holds the sum once the returned
        work is done."""
        work = dist.all_reduce(values, async_op=True)
        assert work is not None
        return work

    def barrier(self) -> None:
        """Wait until every rank has reached this call."""
        if self.size > 1:
            dist.barrier()

    def all_gather_object(self, value: T) -> list[T]:
        """Return every rank's `value`, in rank order, on every rank; for small objects only."""
        values = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value)
        return values

    def all_gather_object_via_store(self, name: str, value: T, limit: timedelta) -> list[T]:
        """Do the same as `all_gather_object` where a rank may come up to `limit` later than another.

        The values must be JSON. They go over the store, since a collective would give up after COLLECTIVE_TIMEOUT. Each
        call needs a `name` of its own.
        """
        keys = [f"exchange/{name}/{rank}" for rank in range(self.size)]
        self.store.set(keys[self.rank], json.dumps(value))
        everyone = f"exchange/{name}/all"
        if self.rank == 0:
            wait_for_keys(self.store, keys, limit)
            self.store.set(everyone, json.dumps([json.loads(self.store.get(key)) for key in keys]))
        wait_for_keys(self.store, [everyone], limit)
        return json.loads(self.store.get(everyone))

    def broadcast_object(self, value: T) -> T:
        """Return rank 0's `value` on every rank; for small objects only."""
        box = [value]
        if self.size > 1:
            dist.broadcast_object_list(box)
        return box[0]


@contextmanager
def open_world(
    store: dist.Store,
    rank: int,
    size: int,
    plan: Plan,
    generation: int = 0,
    device: torch.device | None = None,
    heartbeat: Heartbeat | None = None,
    hang_timeout_s: float = 0.0,
) -> Iterator[World]:
    """Join `size` ranks under this generation's prefix of the launcher's store, yield the World, and leave together at
    the end.

    A rank that leaves early can abort slower ones, so a normal exit ends with a barrier. An exception skips it, because
    the others may never come. A process that has opened a World before gives that one's `heartbeat`. Where a hang is
    noticed after `hang_timeout_s`, ranks wait for each other for longer than that.
    """
    timeout = max(COLLECTIVE_TIMEOUT, timedelta(seconds=hang_timeout_s) + HANG_MARGIN)
    where = open_heartbeat() if heartbeat is None else heartbeat
    where.update("join")
    prefixed = dist.PrefixStore(f"generation-{generation}", store)
    device = device or pick_device(rank, size, prefixed)
    # Names of groups, and so their keys in the store, are numbered: an attempt to join that failed has taken a number.
    dist.distributed_c10d._world.group_count = 0
    try:
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=prefixed,
            rank=rank,
            world_size=size,
            timeout=timeout,
        )
        at = coordinates_of(plan, rank)
        groups = ProcessGroups(plan, at, device, None if timeout == COLLECTIVE_TIMEOUT else max(GROUP_TIMEOUT, timeout))
        world = World(generation, rank, size, plan, at, device, prefixed, groups, where)
        where.generation = generation
        where.update("join")  # the launcher sees by the generation that this rank is there
        yield world
        world.barrier()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def fake_world(plan: Plan, rank: int, store: dist.Store) -> World:
    """Build the World of one `rank` of a plan whose other ranks don't exist: the process group, already initialised, is
    PyTorch's fake one."""
    at, device = coordinates_of(plan, rank), torch.device("cpu")
    return World(0, rank, plan.world_size, plan, at, device, store, ProcessGroups(plan, at, device))


def pick_device(rank: int, size: int, store: dist.Store | None = None) -> torch.device:
    """Return this rank's GPU if the machine has one for each of its ranks, else the CPU, which all of them share.

    torchrun sets the number of ranks on a machine; without it all of them run on this one. Where a workload manager
    lets each process see a GPU of its own, as Slurm does with --gpus-per-task=1, each takes the one that it sees; the
    ranks find that out over the `store`. Rank 0 says where GPUs are left unused.
    """
    local_rank, local_size = int(os.environ.get("LOCAL_RANK", rank)), int(os.environ.get("LOCAL_WORLD_SIZE", size))
    visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if visible >= local_size:
        return _use_gpu(local_rank)
    if visible == 1 and store is not None and _sees_own_gpu(store, rank, size):
        return _use_gpu(0)
    if visible and rank == 0:
        gpus, ranks = pluralize(visible, "GPU"), pluralize(local_size, "rank")
        print(
            f"ranks compute on the CPU: this machine has {gpus} for {ranks}, and each rank needs one of its own;"
            f" --nproc {visible} uses {'it' if visible == 1 else 'them'}",
            file=sys.stderr,
            flush=True,
        )
    use_wide_matmuls()
    return torch.device("cpu")


def _use_gpu(index: int) -> torch.device:
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    use_expandable_segments()
    use_full_float32()
    enable_flight_recorder()
    return device


def _sees_own_gpu(store: dist.Store, rank: int, size: int) -> bool:
    """Return True if no two ranks see the same GPU; all ranks must call it."""
    keys = [f"gpu of rank {other}" for other in range(size)]
    store.set(keys[rank], str(torch.cuda.get_device_properties(0).uuid))
    store.wait(keys, COLLECTIVE_TIMEOUT)
    return len({store.get(key) for key in keys}) == size
