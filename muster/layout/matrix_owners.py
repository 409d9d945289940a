"""Matrices sharded over several ranks: the rank that assembles each (for Muon), and the transfers for it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from muster.layout.mesh import MeshCoordinates, coordinates_of
from muster.layout.tensor_layout import Box
from muster.spec.plan import Plan

BATCH_NUMEL = 1 << 24
"""Elements per member that are assembled at once: few beside a model, enough to keep a link busy."""


@dataclass(frozen=True, slots=True)
class OwnedMatrix:
    """A matrix, the boxes of it that each member of a group of ranks holds, and the member that assembles it."""

    name: str
    shape: tuple[int, ...]
    boxes: tuple[tuple[Box, ...], ...]
    """Boxes by member; several members may hold equal boxes."""
    owner: int

    @property
    def is_whole(self) -> bool:
        """True if the members hold each element once, or in equal boxes."""
        return sum(box.numel for box in {box for held in self.boxes for box in held}) == prod(self.shape)


@dataclass(frozen=True, slots=True)
class BoxMove:
    """One box of a matrix, moved between a holder and the owner."""

    name: str
    box: Box
    index: int
    """Index among the holder's boxes of the matrix."""


def assign_owners(shapes: Mapping[str, tuple[int, ...]], members: int) -> list[dict[str, int]]:
    """Return batches of matrices, the most work first, with the owner of each by name.

    Greedy load balancing (longest processing time first): each matrix goes to the member with the least work so far. A
    batch has at least one matrix per member while there are as many. A pure function, so that all members agree.
    """
    batches: list[dict[str, int]] = []
    numel = 0
    load = [0] * members
    for name in sorted(shapes, key=lambda name: (-newton_schulz_work(shapes[name]), name)):
        if not batches or (len(batches[-1]) >= members and numel >= members * BATCH_NUMEL):
            batches.append({})
            numel = 0
        owner = load.index(min(load))
        batches[-1][name] = owner
        load[owner] += newton_schulz_work(shapes[name])
        numel += prod(shapes[name])
    return batches


def peer_ranks(plan: Plan, at: MeshCoordinates) -> tuple[int, ...]:
    """Return the world ranks, in rising order, that hold the same stages in the same data-parallel replica of an
    island: the members that share matrices."""
    coordinates = [coordinates_of(plan, rank) for rank in range(plan.world_size)]
    local = (at.island, at.pp, at.dp_replicate)
    return tuple(rank for rank, one in enumerate(coordinates) if (one.island, one.pp, one.dp_replicate) == local)


def newton_schulz_work(shape: tuple[int, ...]) -> int:
    """Return the multiplications of one Newton–Schulz step, the building block of orthogonalization."""
    short, long = sorted(shape)
    return short * short * (2 * long + short)


def boxes_to_owner(matrices: Sequence[OwnedMatrix], holder: int, owner: int) -> list[BoxMove]:
    """Return the boxes that the holder sends so that the owner has its matrices: those that no earlier member sends."""
    items = []
    for matrix in matrices:
        if matrix.owner == owner:
            earlier = {box for boxes in matrix.boxes[:holder] for box in boxes}
            held = enumerate(matrix.boxes[holder])
            items += [BoxMove(matrix.name, box, place) for place, box in held if box not in earlier]
    return items


def boxes_from_owner(matrices: Sequence[OwnedMatrix], holder: int, owner: int) -> list[BoxMove]:
    """Return the boxes that the holder gets back: every box of the owner's matrices that it holds."""
    mine = [matrix for matrix in matrices if matrix.owner == owner]
    return [BoxMove(matrix.name, box, place) for matrix in mine for place, box in enumerate(matrix.boxes[holder])]


def sent_numel(matrices: Sequence[OwnedMatrix], member: int) -> int:
    """Return the elements that a member sends to others in one step: its boxes to the owners, and updates of what it
    owns."""
    others = [other for other in range(len(matrices[0].boxes)) if other != member] if matrices else []
    items = (
        item
        for other in others
        for item in boxes_to_owner(matrices, member, other) + boxes_from_owner(matrices, other, member)
    )
    return sum(item.box.numel for item in items)
