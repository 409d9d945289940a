"""Schedules: for each pipeline rank, the order of its compute actions. Pure functions make them (`registry`)."""

from dataclasses import dataclass

from muster.schedule.action import Action
from muster.schedule.paths import Paths


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
    num_slices: int = 1
    """Slices of each sequence, of which each pass takes one; see `muster.schedule.slices`."""
    pairs: frozenset[Action] = frozenset()
    """Forwards that run as one with the backward after them on their rank, of another stage: both begin once both have
    their inputs, take turns, and end together."""
    num_steps: int = 1
    """Optimizer steps of an asynchronous schedule between two flushes: micro-batches are numbered through them."""
    paths: Paths = ()
    """Stages that each micro-batch passes through, where these aren't all in turn."""

    @property
    def num_units(self) -> int:
        """Number of slices of all micro-batches: of a stage's passes of each kind."""
        return self.num_micro_batches * self.num_slices

    @property
    def size_text(self) -> str:
        """Micro-batches, and slices, in words."""
        slices = f" of {self.num_slices} slices" if self.num_slices > 1 else ""
        steps = f" of {self.num_steps} steps" if self.num_steps > 1 else ""
        return f"{self.num_micro_batches} micro-batch{'es' if self.num_micro_batches != 1 else ''}{steps}{slices}"

    @property
    def num_stages(self) -> int:
        """Number of stages of all replicas."""
        return len(self.placement)

    def stages_on(self, rank: int) -> list[int]:
        """Return the stages of a rank."""
        return [stage for stage, holder in enumerate(self.placement) if holder == rank]

    @property
    def chunks(self) -> int:
        """Stages per rank over all replicas, where all ranks have the same number."""
        return len(self.placement) // len(self.ranks)

    @property
    def depth(self) -> int:
        """Number of stages of one replica."""
        return len(self.placement) // self.replicas
