"""How this rank's part of a tensor travels to and from ranks that may cut the tensor otherwise."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial

import torch
import torch.distributed as dist
from torch import Tensor

from muster.parallel.world import World
from muster.spec.boundary import Message, hidden_box, stage_messages, tied_messages
from muster.spec.layout import Box, stage_layouts, within
from muster.spec.model import ModelSpec

Part = tuple[int, tuple[slice, ...]]
"""A world rank, and the part of this rank's tensor that goes to it or comes from it."""


@dataclass(frozen=True)
class Route:
    """What this rank exchanges with another group of ranks."""

    sends: tuple[Part, ...] = ()
    receives: tuple[Part, ...] = ()

    @classmethod
    def to(cls, rank: int) -> "Route":
        """Whole tensors, to and from one rank."""
        return cls(((rank, ()),), ((rank, ()),))

    def send(self, tensor: Tensor, tag: int = 0) -> list[tuple[dist.Work, Tensor]]:
        """Begins to send, part by part: the work, and the memory that must live until it is over."""
        begun = []
        for rank, part in self.sends:
            buffer = tensor[part].contiguous()
            work = dist.isend(buffer, rank, tag=tag)
            assert work is not None
            begun.append((work, buffer))
        return begun

    def receive(self, into: Tensor, tag: int = 0) -> "Arrival":
        """Begins to fill `into`."""
        arrival = Arrival([])
        for rank, part in self.receives:
            place = into[part]
            buffer = place if place.is_contiguous() else place.new_empty(place.shape)
            work = dist.irecv(buffer, rank, tag=tag)
            assert work is not None
            arrival.parts.append((work, buffer, place))
        return arrival

    def swap(self, tensor: Tensor) -> Tensor:
        """What the other group has at the place of `tensor`, which it gets parts of in exchange."""
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
class VaryingRoute(Route):
    """Hidden states whose number of positions differs from one to the next: `of` gives the route of those of which this
    rank has so many positions."""

    of: Callable[[int], Route] = lambda _: Route()

    def send(self, tensor: Tensor, tag: int = 0) -> list[tuple[dist.Work, Tensor]]:
        return self.of(tensor.shape[1]).send(tensor, tag)

    def receive(self, into: Tensor, tag: int = 0) -> "Arrival":
        return self.of(into.shape[1]).receive(into, tag)


@dataclass(frozen=True)
class Arrival:
    """A tensor under way: the work, buffer and place of each part."""

    parts: list[tuple[dist.Work, Tensor, Tensor]]

    def wait(self) -> None:
        """Until it is all in its place."""
        for work, buffer, place in self.parts:
            work.wait()
            if buffer is not place:
                place.copy_(buffer)


def direct_routes(placement: Sequence[int]) -> dict[tuple[int, int], Route]:
    """Between all neighbouring stages, whole tensors, where each pipeline rank is one rank."""
    pairs = [(stage, other) for stage in range(len(placement)) for other in (stage - 1, stage + 1)]
    return {pair: Route.to(placement[pair[1]]) for pair in pairs if 0 <= pair[1] < len(placement)}


def stage_routes(spec: ModelSpec, world: World, seq_len: int, stages: Iterable[int]) -> dict[tuple[int, int], Route]:
    """By (own stage, neighbouring stage on other ranks): the hidden states and gradients of a micro-batch."""
    plan = world.plan
    routes = {}
    for stage in stages:
        own = hidden_box(spec, plan, seq_len, stage, world.at)
        for other, is_end in ((stage - 1, plan.is_first), (stage + 1, plan.is_last)):
            if not is_end(stage) and plan.pp_rank(other) != world.at.pp:
                outgoing, incoming = (
                    stage_messages(spec, plan, seq_len, *ends) for ends in ((stage, other), (other, stage))
                )
                routes[stage, other] = _route(world.rank, own, outgoing, incoming)
    return routes


def varying_routes(spec: ModelSpec, world: World, seq_len: int, stages: Iterable[int]) -> dict[tuple[int, int], Route]:
    """As `stage_routes`, of micro-batches that have `seq_len` positions at most."""

    def of(pair: tuple[int, int], positions: int) -> Route:
        parts = seq_len // hidden_box(spec, world.plan, seq_len, pair[0], world.at).size[1]
        return stage_routes(spec, world, positions * parts, pair[:1])[pair]

    return {pair: VaryingRoute(of=cache(partial(of, pair))) for pair in stage_routes(spec, world, seq_len, stages)}


def tied_routes(spec: ModelSpec, world: World, stages: Iterable[int]) -> dict[int, Route]:
    """By own stage, the gradient of the weight that it shares with the other end of its replica on other ranks."""
    routes = {}
    # A spread vocabulary's one weight lies in parts on all ranks, and is shared with nobody.
    for stage in stages if spec.tied_embeddings and not world.plan.spread_vocab else ():
        other = world.plan.tied_stage(stage)
        layouts = {layout.name: layout for layout in stage_layouts(spec, world.plan, stage, world.at)}
        if other is not None:
            outgoing, incoming = (tied_messages(spec, world.plan, *ends) for ends in ((stage, other), (other, stage)))
            boxes = layouts["embed.weight"].boxes
            routes[stage] = _route(world.rank, boxes[0], outgoing, incoming) if boxes else Route()
    return routes


def _route(rank: int, own: Box, outgoing: Sequence[Message], incoming: Sequence[Message]) -> Route:
    """Of all messages those of one rank, as parts of the box that it holds."""
    return Route(
        tuple((message.target, within(message.box, own)) for message in outgoing if message.source == rank),
        tuple((message.source, within(message.box, own)) for message in incoming if message.target == rank),
    )
