"""Process groups of one rank: those that it belongs to, along axes with more than one rank.

Only the members of a group make it together (`use_local_synchronization`). A world of thousands of ranks has hundreds
of groups, and a barrier of the whole world for each of them would take minutes.
"""

from collections.abc import Sequence
from dataclasses import astuple, replace
from datetime import timedelta
from itertools import product

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from muster.layout.mesh import (
    ExpertCoordinates,
    MeshCoordinates,
    expert_coordinates,
    rank_at,
    ranks_of_pp_rank,
)
from muster.parallel.axis import ExpertAxis, IslandAxis, PipelineAxis
from muster.parallel.shard_levels import ShardLevels
from muster.spec.mesh_axes import STAGE_AXES, STATE_SHARD_AXES
from muster.spec.plan import Plan

ISLANDS_TIMEOUT = timedelta(days=1)
"""Time after which an island gives up waiting for the others, which may be slower."""
_REPLICATE, _SHARD = "dp_replicate", "dp_shard"


class ProcessGroups:
    """The groups of the rank at `at`; every rank makes them after joining the world, in the same order of axes."""

    def __init__(self, plan: Plan, at: MeshCoordinates, device: torch.device, timeout: timedelta | None = None) -> None:
        """`timeout`: time after which a rank gives up waiting for the others in a collective of a group; None:
        PyTorch's own."""
        self._plan, self._at, self._device, self._timeout = plan, at, device, timeout
        self._alone: dist.ProcessGroup | None = None
        mesh = plan.mesh(at.pp)
        self.by_axis = {
            axis: self._new_group(ranks_along(plan, at, (axis,))) for axis in STAGE_AXES if getattr(mesh, axis) > 1
        }
        """This rank's group by the axis within a stage along which it lies."""
        self.replicas = self.by_axis.get(_REPLICATE)
        """Ranks with the same parts of a stage's parameters and other data; None for one."""
        self.state_shards = self.by_axis.get(_SHARD)
        """Ranks that shard a stage's optimizer state, and by the ZeRO level gradients and parameters; None for one.
        Attention has a group of its own, whose collectives don't wait for those of parameters."""
        if any(axis in self.by_axis for axis in STATE_SHARD_AXES if axis != _SHARD):
            self.state_shards = self._new_group(sorted(ranks_along(plan, at, STATE_SHARD_AXES)))
        self.shard_levels = self._shard_levels() if plan.has_shard_levels else None
        """Neighbours among `state_shards` that share parameters and gradients, where these aren't all of them."""
        self.ulysses = self._ulysses_group()
        """Part of the context-parallel ranks with which this one exchanges positions for heads; None without groups."""
        context = plan.context_ranks(mesh)
        self.second_ring = self._new_group(ranks_along(plan, at, ("cp",))) if context.has_second_ring else None
        """The context-parallel ranks once more, for sends that overlap with those in their other group."""
        self.tp_beside = self.by_axis.get("tp")
        """The tensor-parallel ranks, for sums of gradients beside passes: under an asynchronous schedule each rank
        begins them at a time of its own, so that they need a group of their own."""
        if self.tp_beside is not None and plan.schedule_entry.is_asynchronous:
            self.tp_beside = self._new_group(ranks_along(plan, at, ("tp",)))
        self.context_blocks = self._context_blocks() if plan.dynamic_context_parallel else {}
        """Aligned blocks of 2, 4, 8 … context-parallel ranks that this one belongs to, all but the whole, by size."""
        own = expert_coordinates(plan, at)
        self.experts = self._expert_axis(own) if mesh.ep > 1 else None
        """Ranks that share the experts of this rank's tokens; None where each has all."""
        self._expert_data_mesh = self._make_expert_data_mesh(own) if mesh.ep > 1 else None
        self.pipeline = self._pipeline_axis() if plan.vocab_parallel else None
        """Ranks that share the vocabulary with this one under vocabulary parallelism over pipeline ranks."""
        self.pipeline_replicas = self._replica_pair() if plan.pipeline_replicas > 1 else None
        """This rank and the one with the same layers in the other replica of a bidirectional pipeline."""
        self.island = self._island_group() if plan.islands > 1 and plan.island_size > 1 else None
        """Ranks of this one's island; None for a single rank, and without islands."""
        self.islands = self._islands_axis() if plan.islands > 1 else None
        """Ranks of the same place in all islands; None without islands."""

    def data_mesh(self) -> DeviceMesh | None:
        """Return the mesh of ranks that hold the same stage and different data, as fully_shard takes it; None for a
        single rank, unless fully_shard gathers its parameters from where they lie off the device. Context-parallel
        ranks see different tokens, too, so they shard as dp_shard does. Under an asynchronous schedule ranks hold
        whole weights, whose versions nothing gathers."""
        if self._plan.schedule_entry.is_asynchronous:
            return None
        if _REPLICATE in self.by_axis:
            replicas = (replace(self._at, dp_replicate=n) for n in range(self._plan.mesh(self._at.pp).dp_replicate))
            ranks = [sorted(ranks_along(self._plan, at, STATE_SHARD_AXES)) for at in replicas]
            return DeviceMesh.from_group(
                [self.by_axis[_REPLICATE], self.state_shards or self._group_of_itself()],
                self._device.type,
                torch.tensor(ranks, dtype=torch.int),
                mesh_dim_names=(_REPLICATE, _SHARD),
            )
        if self.state_shards is None and self._plan.offloads_params:
            return self._shard_mesh(self._group_of_itself())
        return None if self.state_shards is None else self._shard_mesh(self.state_shards)

    def expert_data_mesh(self) -> DeviceMesh | None:
        """Return the mesh of ranks that hold the same experts, as fully_shard takes it: those over which experts'
        gradients are summed (edp). None where they are those of `data_mesh`."""
        return self._expert_data_mesh

    def _expert_axis(self, own: ExpertCoordinates) -> ExpertAxis:
        ranks = self._expert_ranks(self._at.dp_replicate, edp=own.edp, etp=own.etp)
        axis = ExpertAxis(self._new_group(ranks), len(ranks), own.ep)
        inner = self._plan.expert_dispatch(self._plan.mesh(self._at.pp)).inner
        if inner == 1:
            return axis
        group, place = divmod(own.ep, inner)
        near, far = ranks[group * inner : (group + 1) * inner], ranks[place::inner]
        return replace(
            axis,
            inner=ExpertAxis(self._new_group(near), len(near), place),
            outer=ExpertAxis(self._new_group(far), len(far), group),
        )

    def _make_expert_data_mesh(self, own: ExpertCoordinates) -> DeviceMesh:
        mesh = self._plan.mesh(self._at.pp)
        group = self._group_of_itself()
        ranks = [self._expert_ranks(n, ep=own.ep, etp=own.etp) for n in range(mesh.dp_replicate)]
        if mesh.expert_state_shards > 1:
            group = self._new_group(ranks[self._at.dp_replicate])
        if _REPLICATE not in self.by_axis:
            return self._shard_mesh(group)
        return DeviceMesh.from_group(
            [self.by_axis[_REPLICATE], group],
            self._device.type,
            torch.tensor(ranks, dtype=torch.int),
            mesh_dim_names=(_REPLICATE, _SHARD),
        )

    def _expert_ranks(self, dp_replicate: int, **fixed: int) -> list[int]:
        """Return the ranks of a replica of this stage whose coordinates in the experts' mesh are the given ones, in the
        order of the others."""
        found = [
            (astuple(own), rank)
            for rank, at in ranks_of_pp_rank(self._plan, self._at.pp, self._at.island)
            if at.dp_replicate == dp_replicate
            for own in (expert_coordinates(self._plan, at),)
            if all(getattr(own, axis) == index for axis, index in fixed.items())
        ]
        return [rank for _, rank in sorted(found)]

    def _shard_levels(self) -> ShardLevels:
        mesh = self._plan.mesh(self._at.pp)
        ranks = sorted(ranks_along(self._plan, self._at, STATE_SHARD_AXES))
        here = ranks.index(rank_at(self._plan, self._at))

        def neighbours(size: int) -> dist.ProcessGroup | None:
            return None if size == len(ranks) else self._new_group(ranks[here // size * size :][:size])

        grads = self._plan.reduce_ranks(mesh)
        params, near = neighbours(self._plan.gather_ranks(mesh)), neighbours(grads)
        return ShardLevels(params, near, None if near is None else self._new_group(ranks[here % grads :: grads]))

    def _shard_mesh(self, group: dist.ProcessGroup) -> DeviceMesh:
        return DeviceMesh.from_group(group, self._device.type, mesh_dim_names=(_SHARD,))

    def _group_of_itself(self) -> dist.ProcessGroup:
        self._alone = self._alone or self._new_group([rank_at(self._plan, self._at)])
        return self._alone

    def _ulysses_group(self) -> dist.ProcessGroup | None:
        context = self._plan.context_ranks(self._plan.mesh(self._at.pp))
        if context.ulysses in (1, context.size):
            return None
        first = self._at.cp // context.ulysses * context.ulysses
        return self._new_group(ranks_along(self._plan, self._at, ("cp",))[first : first + context.ulysses])

    def _context_blocks(self) -> dict[int, dist.ProcessGroup]:
        ranks, found, size = ranks_along(self._plan, self._at, ("cp",)), {}, 2
        while size < len(ranks):
            first = self._at.cp // size * size
            found[size] = self._new_group(ranks[first : first + size])
            size *= 2
        return found

    def _island_group(self) -> dist.ProcessGroup:
        size = self._plan.island_size
        return self._new_group(range(self._at.island * size, (self._at.island + 1) * size))

    def _islands_axis(self) -> IslandAxis:
        """Make the groups for exchanges between islands; none of them serves anything else, so that exchanges may run
        beside the passes."""
        ranks = [rank_at(self._plan, replace(self._at, island=island)) for island in range(self._plan.islands)]
        peers, everyone = (self._new_group(them, ISLANDS_TIMEOUT) for them in (ranks, range(self._plan.world_size)))
        return IslandAxis(peers, everyone, self._plan.islands, self._at.island)

    def _replica_pair(self) -> dist.ProcessGroup:
        """Make the group for sums over both replicas, which run beside the passes: one replica has its stages in the
        opposite order of ranks. The first collective of NCCL makes a communicator, and the host waits for the other
        rank, whose passes may need this one's: it comes here, before any."""
        pair = sorted((self._at.pp, self._plan.pp - 1 - self._at.pp))
        group = self._new_group([rank_at(self._plan, replace(self._at, pp=pp_rank)) for pp_rank in pair])
        if self._device.type == "cuda":
            dist.all_reduce(torch.zeros(1, device=self._device), group=group)
        return group

    def _pipeline_axis(self) -> PipelineAxis:
        """Make the group of ranks with one member on each pipeline rank that this one belongs to."""
        ranks = tuple(rank_at(self._plan, replace(self._at, pp=pp_rank)) for pp_rank in range(self._plan.pp))
        return PipelineAxis(self._new_group(ranks), ranks, self._at.pp)

    def _new_group(self, ranks: Sequence[int], timeout: timedelta | None = None) -> dist.ProcessGroup:
        group = dist.new_group(list(ranks), timeout=timeout or self._timeout, use_local_synchronization=True)
        assert isinstance(group, dist.ProcessGroup)
        return group


def ranks_along(plan: Plan, at: MeshCoordinates, axes: Sequence[str]) -> list[int]:
    """Return the world ranks that differ from the one at `at` along `axes` only, the last axis changing fastest."""
    sizes = (range(getattr(plan.mesh(at.pp), axis)) for axis in axes)
    return [rank_at(plan, replace(at, **dict(zip(axes, index, strict=True)))) for index in product(*sizes)]
