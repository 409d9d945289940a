"""Matrices that lie in parts on several ranks: which rank puts each together, and what travels for it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from muster.layout.tensor_layout import Box

BATCH_NUMEL = 1 << 24
"""Numbers per member that are brought together at once: few beside a model, enough to keep a link busy."""


@dataclass(frozen=True, slots=True)
class OwnedMatrix:
    """A matrix, which boxes of it each member of a group of ranks holds, and the member that puts it together."""

    name: str
    shape: tuple[int, ...]
    boxes: tuple[tuple[Box, ...], ...]
    """By member. Equal boxes may lie on several members."""
    owner: int

    @property
    def is_whole(self) -> bool:
        """Whether the members hold each number once, or in equal boxes."""
        return sum(box.numel for box in {box for held in self.boxes for box in held}) == prod(self.shape)


@dataclass(frozen=True, slots=True)
class BoxMove:
    """One box of a matrix on its way between a holder and the owner."""

    name: str
    box: Box
    index: int
    """Among the holder's boxes of the matrix."""


def assign_owners(shapes: Mapping[str, tuple[int, ...]], members: int) -> list[dict[str, int]]:
    """Batches of matrices, the most work first, with the owner of each by name.

    A batch has a matrix for every member, as long as there are as many; each goes to the member that has the least
    work so far. A pure function, so that all members find the same.
    """
    batches: list[dict[str, int]] = []
    numel, load = 0, [0] * members
    for name in sorted(shapes, key=lambda name: (-newton_schulz_work(shapes[name]), name)):
        if not batches or (len(batches[-1]) >= members and numel >= members * BATCH_NUMEL):
            batches.append({})
            numel = 0
        owner = load.index(min(load))
        batches[-1][name] = owner
        load[owner] += newton_schulz_work(shapes[name])
        numel += prod(shapes[name])
    return batches


def newton_schulz_work(shape: tuple[int, ...]) -> int:
    """Multiplications of one Newton–Schulz step, of which making a matrix orthogonal consists."""
    short, long = sorted(shape)
    return short * short * (2 * long + short)


def boxes_to_owner(matrices: Sequence[OwnedMatrix], holder: int, owner: int) -> list[BoxMove]:
    """What the holder sends to put the owner's matrices together: the boxes that no earlier member sends."""
    items = []
    for matrix in matrices:
        if matrix.owner == owner:
            earlier = {box for boxes in matrix.boxes[:holder] for box in boxes}
            held = enumerate(matrix.boxes[holder])
            items += [BoxMove(matrix.name, box, place) for place, box in held if box not in earlier]
    return items


def boxes_from_owner(matrices: Sequence[OwnedMatrix], holder: int, owner: int) -> list[BoxMove]:
    """What the holder gets back of the owner's matrices: every box of them that it holds."""
    mine = [matrix for matrix in matrices if matrix.owner == owner]
    return [BoxMove(matrix.name, box, place) for matrix in mine for place, box in enumerate(matrix.boxes[holder])]


def sent_numel(matrices: Sequence[OwnedMatrix], member: int) -> int:
    """Numbers that a member sends to others in one step: to bring its boxes together, and to give back what it owns."""
    others = [other for other in range(len(matrices[0].boxes)) if other != member] if matrices else []
    items = (
        item
        for other in others
        for item in boxes_to_owner(matrices, member, other) + boxes_from_owner(matrices, other, member)
    )
    return sum(item.box.numel for item in items)
