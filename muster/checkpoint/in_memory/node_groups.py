"""Which ranks share a memory, and who keeps the second copy of whose part; free of torch."""

from collections.abc import Sequence
from functools import cached_property


class NodeGroups:
    """The ranks of a world by the memory that each writes to, in the order of their first ranks."""

    def __init__(self, marks: Sequence[str]) -> None:
        """`marks` are, by rank, what the rank found written in its memory: those of one memory are equal."""
        self._marks = tuple(marks)

    @cached_property
    def groups(self) -> list[list[int]]:
        """The ranks of each node."""
        found: dict[str, list[int]] = {}
        for rank, mark in enumerate(self._marks):
            found.setdefault(mark, []).append(rank)
        return list(found.values())

    def node_index(self, rank: int) -> int:
        """The place of a rank's node among the groups."""
        return next(index for index, ranks in enumerate(self.groups) if rank in ranks)

    def ranks_on_node_of(self, rank: int) -> list[int]:
        """The ranks of the same node."""
        return self.groups[self.node_index(rank)]

    def partner(self, rank: int) -> int | None:
        """The rank on the next node that receives this one's copy; None where there is no other node."""
        if len(self.groups) == 1:
            return None
        others = self.groups[(self.node_index(rank) + 1) % len(self.groups)]
        return others[self.ranks_on_node_of(rank).index(rank) % len(others)]

    def received_ranks(self, rank: int) -> list[int]:
        """The ranks whose copies come to the node of this one."""
        return [other for other in range(len(self._marks)) if self.partner(other) in self.ranks_on_node_of(rank)]
