"""Moves of experts between ranks: which parts of a tensor go where when experts are placed anew."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import NamedTuple

from muster.layout.box import Box
from muster.layout.expert_placement import expert_order
from muster.layout.mesh import MeshCoordinates, expert_coordinates, ranks_of_pp_rank
from muster.layout.tensor_layout import chunk_bounds, intersect, is_expert, stage_shards, state_shard_dim
from muster.spec.mesh import Mesh
from muster.spec.model import ModelSpec, layer_prefix
from muster.spec.plan import Plan


class BoxTransfer(NamedTuple):
    """A box of a tensor that one member of a group sends to another, or moves within its own memory."""

    sender: int
    receiver: int
    box: Box


def box_transfers(before: Sequence[Sequence[Box]], after: Sequence[Sequence[Box]]) -> Iterator[BoxTransfer]:
    """Yield the boxes that fill what each member is to hold from what each holds, which is each element once; in the
    same order for all members."""
    for receiver, wanted in enumerate(after):
        for sender, held in enumerate(before):
            for new in wanted:
                for old in held:
                    if (box := intersect(old, new)) is not None:
                        yield BoxTransfer(sender, receiver, box)


def expert_members(plan: Plan, at: MeshCoordinates) -> tuple[dict[int, MeshCoordinates], int]:
    """Return the ranks that together hold one copy of the slices of a stage's experts that the rank at `at` has a part
    of, in rising order, and the rank's index among them."""
    own = expert_coordinates(plan, at).etp
    members = {
        rank: other
        for rank, other in sorted(ranks_of_pp_rank(plan, at.pp, at.island), key=lambda one: one[0])
        if other.dp_replicate == at.dp_replicate and expert_coordinates(plan, other).etp == own
    }
    return members, list(members.values()).index(at)


def stage_of_layer(plan: Plan, num_layers: int, layer: int) -> int:
    """Return the first stage that has a layer."""
    return next(stage for stage in range(plan.num_stages) if layer in plan.layers(stage, num_layers))


Holder = tuple[int, int]
"""Indices of a rank on the axes ep and edp of the experts' mesh."""


class MovedTensor(NamedTuple):
    """A tensor of stacked experts of which some move."""

    stage: int
    name: str
    shape: tuple[int, ...]
    numel: int
    """Elements that all ranks together send."""
    routes: Mapping[tuple[Holder, Holder], int]
    """Sender and receiver of one slice of the experts to the elements that travel between them. Where edp ranks each
    have a part of every expert, those of the first of them; the others' are alike."""


def moved_tensors(model: ModelSpec, before: Plan, after: Plan) -> Iterator[MovedTensor]:
    """Yield the tensors of experts that move when `before` becomes `after`, on each stage, copies of stages included;
    plans differ in their placement alone."""
    for stage in range(before.num_stages):
        mesh = before.mesh(stage)
        for name, shape, part, _, _ in stage_shards(model, before, stage):
            orders = expert_order(model, before, name), expert_order(model, after, name)
            if is_expert(name) and mesh.ep > 1 and orders[0] != orders[1]:
                old, new = (_holders(mesh, name, part.size, order or range(shape[0])) for order in orders)
                moved = Counter((old[expert], new[expert]) for expert in old if old[expert] != new[expert])
                if not moved:
                    continue
                numel, edp = prod(part.size[1:]), mesh.expert_state_shards
                shards = edp if state_shard_dim(name, part.size, edp) else 1
                routes = {route: count * numel // shards for route, count in moved.items()}
                yield MovedTensor(stage, name, shape, moved.total() * numel * mesh.etp * mesh.dp_replicate, routes)


def num_moved_experts(model: ModelSpec, before: Plan, after: Plan) -> int:
    """Return the experts of all layers that lie on another expert-parallel rank when `before` becomes `after`."""
    moved = 0
    for layer in model.expert_layers:
        prefix, experts = layer_prefix(model, layer), range(model.moe.num_experts if model.moe else 0)
        orders = [expert_order(model, plan, prefix) or experts for plan in (before, after)]
        if orders[0] != orders[1]:
            each = len(experts) // before.mesh(stage_of_layer(before, model.num_layers, layer)).ep
            old, new = ({expert: place // each for place, expert in enumerate(order)} for order in orders)
            moved += sum(old[expert] != new[expert] for expert in experts)
    return moved


def _holders(mesh: Mesh, name: str, size: tuple[int, ...], order: Sequence[int]) -> dict[int, Holder]:
    """Return the ep rank of each expert and the index among its edp ranks that have it; 0 where all have a part.
    `size`: of the part of a tensor that an ep rank holds."""
    each, edp = size[0], mesh.expert_state_shards
    rows = each if state_shard_dim(name, size, edp) else chunk_bounds(each, edp, 0)[1]
    return {expert: (place // each, place % each // rows) for place, expert in enumerate(order)}
