"""Matrices sharded over several ranks: each is gathered on its owner, updated there as a whole, and scattered again."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from muster.layout.matrix_owners import BoxMove, OwnedMatrix, assign_owners, boxes_from_owner, boxes_to_owner
from muster.layout.tensor_layout import Box
from muster.optim.peer_exchange import PeerGroup
from muster.spec.errors import MusterError


class MatrixBatch:
    """Matrices that travel together: at most one message from any member to any other, each way."""

    def __init__(
        self, matrices: Sequence[OwnedMatrix], peers: PeerGroup, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.names = [matrix.name for matrix in matrices]
        self._peers, self._dtype, self._device = peers, dtype, device
        me, members = peers.member, range(len(peers.ranks))
        self.owned_shapes = {matrix.name: matrix.shape for matrix in matrices if matrix.owner == me}
        """Shapes of the matrices that this rank owns, by name."""
        self._gather_sends = [boxes_to_owner(matrices, me, owner) for owner in members]
        self._gather_receives = [boxes_to_owner(matrices, holder, me) for holder in members]
        self._scatter_sends = [boxes_from_owner(matrices, holder, me) for holder in members]
        self._scatter_receives = [boxes_from_owner(matrices, me, owner) for owner in members]

    def gather(self, parts: Mapping[str, Sequence[Tensor]]) -> dict[str, Tensor]:
        """Return the whole matrices that this rank owns, made of every member's parts (by matrix, box by box)."""
        sends = [self._pack(parts[item.name][item.index] for item in items) for items in self._gather_sends]
        wholes = {
            n: torch.empty(shape, dtype=self._dtype, device=self._device) for n, shape in self.owned_shapes.items()
        }
        for item, tensor in self._exchange(sends, self._gather_receives):
            wholes[item.name][item.box.slices] = tensor
        return wholes

    def scatter(self, wholes: Mapping[str, Tensor]) -> dict[str, list[Tensor]]:
        """Return this rank's parts of all matrices (box by box), cut from their owners' whole ones."""
        sends = [self._pack(wholes[item.name][item.box.slices] for item in items) for items in self._scatter_sends]
        parts: dict[str, list[Tensor]] = {name: [] for name in self.names}
        for item, tensor in self._exchange(sends, self._scatter_receives):
            parts[item.name].append(tensor)  # a matrix has one owner, which sends its boxes in the holder's order
        return parts

    def _pack(self, tensors: Iterable[Tensor]) -> Tensor:
        empty = torch.empty(0, dtype=self._dtype, device=self._device)
        return torch.cat([empty, *(tensor.reshape(-1) for tensor in tensors)])

    def _exchange(
        self, sends: Sequence[Tensor], expected: Sequence[Sequence[BoxMove]]
    ) -> Iterable[tuple[BoxMove, Tensor]]:
        """Yield the expected boxes, by sending member, each with its received tensor in the shape of the box."""
        sizes = [[item.box.numel for item in items] for items in expected]
        receives = [torch.empty(sum(numels), dtype=self._dtype, device=self._device) for numels in sizes]
        self._peers.all_to_all(sends, receives)
        for items, numels, flat in zip(expected, sizes, receives, strict=True):
            for item, part in zip(items, flat.split(numels) if numels else (), strict=True):
                yield item, part.view(item.box.size)


def assign_matrices(
    shapes: Mapping[str, tuple[int, ...]],
    boxes: Mapping[str, tuple[Box, ...]],
    peers: PeerGroup,
    dtype: torch.dtype,
    device: torch.device,
) -> list[MatrixBatch]:
    """Assign the matrices with these global shapes, of which this rank holds `boxes`, to batches and owners.

    All ranks of the world must call it. Raises MusterError if the members' boxes don't cover a matrix.
    """
    everyone = peers.all_gather_object(dict(boxes))
    batches = []
    for owners in assign_owners(shapes, len(peers.ranks)):
        held = {name: tuple(member[name] for member in everyone) for name in owners}
        matrices = [OwnedMatrix(name, shapes[name], held[name], owner) for name, owner in owners.items()]
        if broken := [matrix.name for matrix in matrices if not matrix.is_whole]:
            ranks = ", ".join(map(str, peers.ranks))
            raise MusterError(f"{broken[0]}: expected ranks {ranks} to hold every element once, or in equal boxes")
        batches.append(MatrixBatch(matrices, peers, dtype, device))
    return batches


def box_views(local: Tensor, boxes: Sequence[Box]) -> list[Tensor]:
    """Return a view of each box of a local tensor that stores several of them one after the other."""
    if len(boxes) == 1:
        return [local]
    flats = local.view(-1).split([box.numel for box in boxes]) if boxes else ()
    return [flat.view(box.size) for flat, box in zip(flats, boxes, strict=True)]
