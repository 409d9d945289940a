"""Schedules: for each pipeline rank, the order of its compute actions. Pure functions make them (`registry`)."""

from dataclasses import dataclass

from muster.schedule.action import Action


@dataclass(frozen=True, slots=True)
class Schedule:
    """Order of the passes on each pipeline rank.

    Stages are numbered replica by replica, each from the model's first layers to its last: with `replicas` 2 and a
    depth of 4, stages 0 to 3 are one copy of the model and 4 to 7 the other. A micro-batch runs through one replica.
    """

    name: str
    placement: tuple[int, ...]
    """Pipeline rank of each stage."""
    num_micro_batches: int
    ranks: tuple[tuple[Action, ...], ...]
    replicas: int = 1

    @property
    def num_stages(self) -> int:
        """Number of stages of all replicas."""
        return len(self.placement)

    @property
    def chunks(self) -> int:
        """Stages per rank over all replicas, where all ranks have the same number."""
        return len(self.placement) // len(self.ranks)

    @property
    def depth(self) -> int:
        """Number of stages of one replica."""
        return len(self.placement) // self.replicas
