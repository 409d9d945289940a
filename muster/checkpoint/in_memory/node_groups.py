"""Grouping of ranks by node, and assignment of second copies to other nodes; free of torch."""

from collections.abc import Sequence
from functools import cached_property


class NodeGroups:
    """Ranks of a world grouped by the node whose memory they write to, in the order of their first ranks."""

    def __init__(self, marks: Sequence[str]) -> None:
        """Group ranks by their marks: the word that each rank read in its node's directory."""
        self._marks = tuple(marks)

    @cached_property
    def groups(self) -> list[list[int]]:
        """Ranks of each node."""
        found: dict[str, list[int]] = {}
        for rank, mark in enumerate(self._marks):
            found.setdefault(mark, []).append(rank)
        return list(found.values())

    def node_index(self, rank: int) -> int:
        """Return the index of a rank's node among the groups."""
        return next(index for index, ranks in enumerate(self.groups) if rank in ranks)

    def ranks_on_node_of(self, rank: int) -> list[int]:
        """Return the ranks on the same node as `rank`."""
        return self.groups[self.node_index(rank)]

    def partner(self, rank: int) -> int | None:
        """Return the rank on the next node that receives this one's part; None if there is no other node."""
        if len(self.groups) == 1:
            return None
        others = self.groups[(self.node_index(rank) + 1) % len(self.groups)]
        return others[self.ranks_on_node_of(rank).index(rank) % len(others)]

    def received_ranks(self, rank: int) -> list[int]:
        """Return the ranks of other nodes whose parts are sent to the node of `rank`."""
        return [other for other in range(len(self._marks)) if self.partner(other) in self.ranks_on_node_of(rank)]
