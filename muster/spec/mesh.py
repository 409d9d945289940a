"""Where a rank stands: rank ↔ coordinates on the plan's axes."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from muster.spec.plan import AXES, Plan

STAGE_AXES = tuple(axis for axis in AXES if axis != "pp")
"""The axes within one stage."""


@dataclass(frozen=True, slots=True)
class Coordinates:
    """A rank's index on each mesh axis."""

    pp: int
    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int


def axis_sizes(plan: Plan, pp_rank: int = 0) -> dict[str, int]:
    """Degrees by axis, outermost first, as the ranks of one pipeline rank see them."""
    mesh = plan.mesh(pp_rank)
    return {axis: plan.pp if axis == "pp" else getattr(mesh, axis) for axis in plan.axis_order}


def coordinates(plan: Plan, rank: int) -> Coordinates:
    """The coordinates of world rank `rank`. Where stages are unequal, each has the ranks after those of the one
    before."""
    if plan.is_uniform:
        return Coordinates(**_index(axis_sizes(plan), rank))
    pp_rank = 0
    while rank >= (ranks := plan.mesh(pp_rank).ranks):
        rank, pp_rank = rank - ranks, pp_rank + 1
    return Coordinates(**_index(axis_sizes(plan, pp_rank) | {"pp": 1}, rank) | {"pp": pp_rank})


def rank_at(plan: Plan, at: Coordinates) -> int:
    """The world rank at `at`: the inverse of `coordinates`."""
    if plan.is_uniform:
        return _number(axis_sizes(plan), at)
    before = sum(plan.mesh(pp_rank).ranks for pp_rank in range(at.pp))
    return before + _number(axis_sizes(plan, at.pp) | {"pp": 1}, replace(at, pp=0))


def members(plan: Plan, pp_rank: int) -> Iterator[tuple[int, Coordinates]]:
    """The world ranks of one pipeline rank with their coordinates, tp changing fastest whatever the axis order."""
    mesh = plan.mesh(pp_rank)
    for index in product(*(range(getattr(mesh, axis)) for axis in STAGE_AXES)):
        at = Coordinates(pp_rank, *index)
        yield rank_at(plan, at), at


def data_index(plan: Plan, at: Coordinates) -> int:
    """Which share of every micro-batch the rank reads: 0 … data_ranks − 1."""
    return at.dp_replicate * plan.mesh(at.pp).dp_shard + at.dp_shard


def _index(sizes: dict[str, int], number: int) -> dict[str, int]:
    index: dict[str, int] = {}
    for axis, size in reversed(sizes.items()):
        number, index[axis] = divmod(number, size)
    return index


def _number(sizes: dict[str, int], at: Coordinates) -> int:
    number = 0
    for axis, size in sizes.items():
        number = number * size + getattr(at, axis)
    return number
