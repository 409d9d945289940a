"""Point-to-point transfers between ranks that may shard the same tensor differently."""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import permutations

import torch
import torch.distributed as dist
from torch import Tensor

from muster.layout.stage_resharding import BoxTransfer, hidden_state_box, stage_transfers, tied_grad_transfers
from muster.layout.tensor_layout import Box, slices_within, stage_layouts
from muster.parallel.world import World
from muster.spec.model import ModelSpec

RankSlice = tuple[int, tuple[slice, ...]]
"""A world rank, and the slice of this rank's tensor that goes to it or comes from it."""


@dataclass(frozen=True)
class P2PRoute:
    """Sends and receives of this rank with another group of ranks, for one tensor."""

    sends: tuple[RankSlice, ...] = ()
    receives: tuple[RankSlice, ...] = ()

    @classmethod
    def whole_to(cls, rank: int) -> "P2PRoute":
        """Return the route of whole tensors to and from one rank."""
        return cls(((rank, ()),), ((rank, ()),))

    def send(self, tensor: Tensor, tag: int = 0) -> list[tuple[dist.Work, Tensor]]:
        """Start to send slice by slice; return each work with the buffer that must stay alive until it has finished."""
        sending = []
        for rank, rank_slice in self.sends:
            buffer = tensor[rank_slice].contiguous()
            work = dist.isend(buffer, rank, tag=tag)
            assert work is not None
            sending.append((work, buffer))
        return sending

    def receive(self, into: Tensor, tag: int = 0) -> "PendingReceive":
        """Start to receive into the slices of `into`."""
        pending = PendingReceive([])
        for rank, rank_slice in self.receives:
            target = into[rank_slice]
            buffer = target if target.is_contiguous() else target.new_empty(target.shape)
            work = dist.irecv(buffer, rank, tag=tag)
            assert work is not None
            pending.parts.append((work, buffer, target))
        return pending

    def exchange(self, tensor: Tensor) -> Tensor:
        """Return the other group's tensor at the place of `tensor`, whose slices that group receives in exchange."""
        received = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        buffers = [received.new_empty(received[part].shape) for _, part in self.receives]
        operations = [dist.P2POp(dist.isend, tensor[part].contiguous(), rank) for rank, part in self.sends]
        for buffer, (rank, _) in zip(buffers, self.receives, strict=True):
            operations.append(dist.P2POp(dist.irecv, buffer, rank))
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()
        for buffer, (_, part) in zip(buffers, self.receives, strict=True):
            received[part] = buffer
        return received


@dataclass(frozen=True)
class VariableLengthRoute(P2PRoute):
    """A route for hidden states whose number of positions varies; `route_for_length` maps this rank's number of
    positions to a route."""

    route_for_length: Callable[[int], P2PRoute] = lambda _: P2PRoute()

    def send(self, tensor: Tensor, tag: int = 0) -> list[tuple[dist.Work, Tensor]]:
        return self.route_for_length(tensor.shape[1]).send(tensor, tag)

    def receive(self, into: Tensor, tag: int = 0) -> "PendingReceive":
        return self.route_for_length(into.shape[1]).receive(into, tag)


@dataclass(frozen=True)
class PendingReceive:
    """A tensor under way: the work, the buffer, and the destination of each slice."""

    parts: list[tuple[dist.Work, Tensor, Tensor]]

    def wait(self) -> None:
        """Wait until every slice is at its destination."""
        for work, buffer, target in self.parts:
            work.wait()
            if buffer is not target:
                target.copy_(buffer)


def direct_routes(placement: Sequence[int]) -> dict[tuple[int, int], P2PRoute]:
    """Return the routes of whole tensors between any two stages where each pipeline rank is one rank."""
    return {pair: P2PRoute.whole_to(placement[pair[1]]) for pair in permutations(range(len(placement)), 2)}


def stage_routes(
    spec: ModelSpec, world: World, seq_len: int, stages: Collection[int]
) -> dict[tuple[int, int], P2PRoute]:
    """Return by (stage, stage on another pipeline rank before or after it on some path) the route of a micro-batch's
    hidden states and their gradients."""
    plan = world.plan
    routes = {}
    for stage, other in (pair for hop in plan.hops for pair in (hop, hop[::-1]) if pair[0] in stages):
        own = hidden_state_box(spec, plan, seq_len, stage, world.at)
        outgoing, incoming = (
            stage_transfers(spec, plan, seq_len, *ends, world.at.island) for ends in ((stage, other), (other, stage))
        )
        routes[stage, other] = _route_of_rank(world.rank, own, outgoing, incoming)
    return routes


def variable_length_routes(
    spec: ModelSpec, world: World, seq_len: int, stages: Collection[int]
) -> dict[tuple[int, int], P2PRoute]:
    """Return the routes as `stage_routes` does, for micro-batches of at most `seq_len` positions."""

    def route_for_length(pair: tuple[int, int], positions: int) -> P2PRoute:
        parts = seq_len // hidden_state_box(spec, world.plan, seq_len, pair[0], world.at).size[1]
        return stage_routes(spec, world, positions * parts, pair[:1])[pair]

    return {
        pair: VariableLengthRoute(route_for_length=cache(partial(route_for_length, pair)))
        for pair in stage_routes(spec, world, seq_len, stages)
    }


def tied_embedding_routes(spec: ModelSpec, world: World, stages: Iterable[int]) -> dict[int, P2PRoute]:
    """Return by stage the route of the gradient of a tied weight to the replica's other end, where that lies on other
    ranks."""
    routes = {}
    # Under vocabulary parallelism a tied weight is one parameter, sharded over all pipeline ranks: there is no copy.
    for stage in stages if spec.embeds_on_last_stage and not world.plan.vocab_parallel else ():
        other = world.plan.tied_embedding_peer(stage)
        layouts = {layout.name: layout for layout in stage_layouts(spec, world.plan, stage, world.at)}
        if other is not None:
            outgoing, incoming = (
                tied_grad_transfers(spec, world.plan, *ends, world.at.island)
                for ends in ((stage, other), (other, stage))
            )
            boxes = layouts["embed.weight"].boxes
            routes[stage] = _route_of_rank(world.rank, boxes[0], outgoing, incoming) if boxes else P2PRoute()
    return routes


def _route_of_rank(rank: int, own: Box, outgoing: Sequence[BoxTransfer], incoming: Sequence[BoxTransfer]) -> P2PRoute:
    """Keep the transfers of one rank, as slices of the box `own` that it holds; whole tensors, which may hold such a
    box several times, have none."""

    def slices(message: BoxTransfer) -> tuple[slice, ...]:
        return () if message.box == own else slices_within(message.box, own)

    return P2PRoute(
        tuple((message.target, slices(message)) for message in outgoing if message.source == rank),
        tuple((message.source, slices(message)) for message in incoming if message.target == rank),
    )
