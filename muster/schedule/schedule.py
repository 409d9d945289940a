"""A Schedule: for each pipeline rank, the order of its compute actions. A pure function makes one (`registry`)."""

from dataclasses import dataclass

from muster.schedule.action import Action


@dataclass(frozen=True, slots=True)
class Schedule:
    """The order in which each pipeline rank computes.

    Stages are numbered replica by replica, in each from the model's first layers to its last: with `replicas` 2 and a
    depth of 4, stages 0 to 3 are one copy of the model and 4 to 7 the other. A micro-batch runs through one replica.
    """

    name: str
    placement: tuple[int, ...]
    """The pipeline rank of each stage."""
    num_micro_batches: int
    ranks: tuple[tuple[Action, ...], ...]
    replicas: int = 1

    @property
    def num_stages(self) -> int:
        """Over all replicas."""
        return len(self.placement)

    @property
    def chunks(self) -> int:
        """Stages on each rank, over all replicas, where all have as many."""
        return len(self.placement) // len(self.ranks)

    @property
    def depth(self) -> int:
        """Stages of one replica."""
        return len(self.placement) // self.replicas
