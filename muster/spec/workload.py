"""The workload: the amount of data in one step."""

from pydantic import NonNegativeInt, PositiveInt

from muster.spec.base import Frozen
from muster.spec.routing_load import RoutingLoad

MAX_PROGRAM_MICRO_BATCHES = 2**18
"""Largest product of micro-batches of a step and pipeline ranks: programs of more take minutes to build."""


class Workload(Frozen):
    """Sequences of one optimizer step, independent of the plan."""

    seq_len: PositiveInt
    global_batch_size: PositiveInt
    """Sequences per optimizer step, over all ranks."""
    earlier_positions: NonNegativeInt = 0
    """Positions before these `seq_len` whose keys attention sees, too: 0 but in the cost of a slice of sequences."""
    next_positions: NonNegativeInt | None = None
    """Positions of the slice after this one, 0 for the last; None: sequences aren't cut."""

    expert_load: RoutingLoad | None = None
    """Load of the experts; None: an even one."""

    @property
    def tokens_per_step(self) -> int:
        return self.seq_len * self.global_batch_size
