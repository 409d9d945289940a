"""Schedule of forwards alone, for evaluation."""

from collections.abc import Sequence

from muster.schedule.action import Action, Kind
from muster.schedule.schedule import Schedule


def forward_only(placement: Sequence[int], num_micro_batches: int, num_slices: int = 1) -> Schedule:
    """Return a schedule of every micro-batch through every stage; `placement` gives the pipeline rank of each stage.

    With several stages per rank, groups of as many micro-batches as ranks go through one stage before the next, which
    keeps all ranks busy.
    """
    num_ranks = max(placement) + 1
    ranks = tuple(
        tuple(
            Action(Kind.F, stage, index, part)
            for first in range(0, num_micro_batches, num_ranks)
            for stage, holder in enumerate(placement)
            if holder == rank
            for index in range(first, min(first + num_ranks, num_micro_batches))
            for part in range(num_slices)
        )
        for rank in range(num_ranks)
    )
    return Schedule("forward-only", tuple(placement), num_micro_batches, ranks, num_slices=num_slices)
