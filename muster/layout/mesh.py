"""Mesh coordinates: rank ↔ index on each of the plan's axes."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from muster.spec.mesh_axes import STAGE_AXES, STATE_SHARD_AXES
from muster.spec.plan import Plan


@dataclass(frozen=True, slots=True)
class MeshCoordinates:
    """A rank's index on each mesh axis."""

    pp: int
    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int
    island: int = 0
    """Index of its island, whose ranks follow those of the island before."""


def axis_sizes(plan: Plan, pp_rank: int = 0) -> dict[str, int]:
    """Return degrees by axis, outermost first, as the ranks of one pipeline rank see them."""
    mesh = plan.mesh(pp_rank)
    return {axis: plan.pp if axis == "pp" else getattr(mesh, axis) for axis in plan.axis_order}


def coordinates_of(plan: Plan, rank: int) -> MeshCoordinates:
    """Return the coordinates of world rank `rank`. With unequal stages, each has the ranks after those of the one
    before."""
    island, rank = divmod(rank, plan.island_size)
    if plan.is_uniform:
        return MeshCoordinates(**_index(axis_sizes(plan), rank), island=island)
    pp_rank = 0
    while rank >= (ranks := plan.mesh(pp_rank).num_ranks):
        rank, pp_rank = rank - ranks, pp_rank + 1
    index = _index(axis_sizes(plan, pp_rank) | {"pp": 1}, rank) | {"pp": pp_rank}
    return MeshCoordinates(**index, island=island)


def state_numbers(plan: Plan) -> tuple[int, ...]:
    """Return the number of each rank's state; replicas (`dp_replicate`) have the same."""
    states = [replace(coordinates_of(plan, rank), dp_replicate=0) for rank in range(plan.world_size)]
    numbers = {state: number for number, state in enumerate(dict.fromkeys(states))}
    return tuple(numbers[state] for state in states)


def rank_at(plan: Plan, at: MeshCoordinates) -> int:
    """Return the world rank at `at`: the inverse of `coordinates_of`."""
    first = at.island * plan.island_size
    if plan.is_uniform:
        return first + _number(axis_sizes(plan), at)
    before = first + sum(plan.mesh(pp_rank).num_ranks for pp_rank in range(at.pp))
    return before + _number(axis_sizes(plan, at.pp) | {"pp": 1}, replace(at, pp=0))


def ranks_of_pp_rank(plan: Plan, pp_rank: int, island: int = 0) -> Iterator[tuple[int, MeshCoordinates]]:
    """Yield the world ranks of one pipeline rank of an island with their coordinates, tp changing fastest whatever the
    axis order."""
    mesh = plan.mesh(pp_rank)
    for index in product(*(range(getattr(mesh, axis)) for axis in STAGE_AXES)):
        at = MeshCoordinates(pp_rank, *index, island=island)
        yield rank_at(plan, at), at


def dp_index_of(plan: Plan, at: MeshCoordinates) -> int:
    """Return the index of the rank's slice of every micro-batch: 0 … dp_size − 1."""
    return at.dp_replicate * plan.mesh(at.pp).dp_shard + at.dp_shard


def state_shard_index(plan: Plan, at: MeshCoordinates) -> int:
    """Return which part of a stage's parameters and optimizer state a rank holds: 0 … state_shards − 1, in the order of
    the ranks that share them."""
    sizes = axis_sizes(plan, at.pp)
    return _number({axis: size for axis, size in sizes.items() if axis in STATE_SHARD_AXES}, at)


@dataclass(frozen=True, slots=True)
class ExpertCoordinates:
    """A rank's index on the axes of the experts' mesh."""

    edp: int
    """Index of the part of its experts' state that the rank holds, among the ranks with the same experts."""
    ep: int
    etp: int


def expert_coordinates(plan: Plan, at: MeshCoordinates) -> ExpertCoordinates:
    """Return the coordinates of a rank in the experts' mesh edp · ep · etp, which is folded over the ranks that share
    one copy of a stage's experts: tp innermost, then the axes that shard state (arXiv:2504.14960 §3.2)."""
    mesh = plan.mesh(at.pp)
    rest, etp = divmod(state_shard_index(plan, at) * mesh.tp + at.tp, mesh.etp)
    edp, ep = divmod(rest, mesh.ep)
    return ExpertCoordinates(edp, ep, etp)


def _index(sizes: dict[str, int], number: int) -> dict[str, int]:
    index: dict[str, int] = {}
    for axis, size in reversed(sizes.items()):
        number, index[axis] = divmod(number, size)
    return index


def _number(sizes: dict[str, int], at: MeshCoordinates) -> int:
    number = 0
    for axis, size in sizes.items():
        number = number * size + getattr(at, axis)
    return number
