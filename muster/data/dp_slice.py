"""Slice of a global batch that one rank computes, micro-batch by micro-batch."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from muster.data.dataset import IGNORE_INDEX, Batch
from muster.layout.mesh import MeshCoordinates, dp_index_of
from muster.spec.errors import InfeasibleError
from muster.spec.mesh_cuts import divisors
from muster.spec.plan import Plan


def read_dp_slice(
    read: Callable[[int, int], Batch], plan: Plan, coordinates: MeshCoordinates, first: int, count: int
) -> Batch:
    """Return the rows of the rank at `coordinates` of `count` global samples from `first` on, by micro-batch.

    Each data-parallel rank of the first stage takes consecutive samples (`Plan.sample_range`), and all stages work on
    the same micro-batches. So a rank of a stage with fewer data-parallel ranks reads the samples of several of them, a
    rank of one with more reads a part of one's. `read(first, count)` reads global samples.

    Example: 8 samples, micro_batch_size 2, two data-parallel ranks on stage 0 and one on stage 1. Rank 0 of stage 0
    has samples 0 1 | 2 3, rank 1 has 4 5 | 6 7, and the rank of stage 1 has 0 1 4 5 | 2 3 6 7.
    """
    size = plan.micro_batch_size
    rows = plan.local_micro_batch_size(coordinates.pp)
    start = dp_index_of(plan, coordinates) * rows
    # Data-parallel ranks of the first stage whose samples this rank reads, begin … end − 1.
    begin = start // size
    end = -(-(start + rows) // size)
    samples = plan.sample_range(begin, count)
    samples_per_rank = len(samples)  # several ranks are read only where all have equally many
    batch = read(first + samples.start, (end - begin) * samples_per_rank)

    def cut(array_BS: np.ndarray) -> np.ndarray:
        shape = (end - begin, samples_per_rank // size, size, array_BS.shape[1])
        by_micro_batch = array_BS.reshape(shape).swapaxes(0, 1).reshape(shape[1], -1, shape[3])
        local = by_micro_batch[:, start - begin * size :][:, :rows]
        return np.ascontiguousarray(local).reshape(-1, shape[3])

    labels_BS = cut(batch.labels_BS)
    positions_BS = None if batch.positions_BS is None else cut(batch.positions_BS)
    return Batch(cut(batch.tokens_BS), labels_BS, int((labels_BS != IGNORE_INDEX).sum()), positions_BS)


def join_by_micro_batch(shares: Sequence[Batch], num_micro_batches: int) -> Batch:
    """Return the rows of several ranks as `read_dp_slice` has them, in each micro-batch one rank's after another's."""
    if len(shares) == 1:
        return shares[0]

    def join(arrays_BS: Sequence[np.ndarray]) -> np.ndarray:
        by_micro_batch = [array.reshape(num_micro_batches, -1, array.shape[1]) for array in arrays_BS]
        return np.concatenate(by_micro_batch, axis=1).reshape(-1, arrays_BS[0].shape[1])

    positions = [share.positions_BS for share in shares]
    return Batch(
        join([share.tokens_BS for share in shares]),
        join([share.labels_BS for share in shares]),
        sum(share.num_valid_tokens for share in shares),
        None if any(one is None for one in positions) else join([one for one in positions if one is not None]),
    )


def samples_of_micro_batch(
    plan: Plan, coordinates: MeshCoordinates, micro_batch: int, count: int
) -> Iterator[tuple[slice, int]]:
    """Yield the samples behind the rows of one micro-batch of a step of `count` samples, as `read_dp_slice` cuts it.

    Each item is a run of consecutive samples: (rows of the micro-batch, the step's sample in the first of them).
    """
    size = plan.micro_batch_size
    rows = plan.local_micro_batch_size(coordinates.pp)
    start = dp_index_of(plan, coordinates) * rows
    row = 0
    while row < rows:
        first_stage_rank, row_there = divmod(start + row, size)
        end = min(row + size - row_there, rows)
        sample = plan.sample_range(first_stage_rank, count).start + micro_batch * size + row_there
        yield slice(row, end), sample
        row = end


def parts_of_micro_batches(
    plan: Plan, coordinates: MeshCoordinates, num_micro_batches: int, count: int, parts: int
) -> tuple[int, ...]:
    """Return which of `parts` equal parts of `count` samples each micro-batch of a rank is of.

    Raises InfeasibleError where the parts aren't equal, or a micro-batch has samples of several.
    """
    if count % parts:
        legal = ", ".join(str(number) for number in divisors(count))
        raise InfeasibleError(
            f"adapter.parts {parts} doesn't divide the {count} samples of a step: expected one of {legal}"
        )
    found = []
    for micro_batch in range(num_micro_batches):
        own = {
            sample * parts // count
            for rows, first in samples_of_micro_batch(plan, coordinates, micro_batch, count)
            for sample in range(first, first + rows.stop - rows.start)
        }
        if len(own) > 1:
            raise InfeasibleError(
                f"a micro-batch of {plan.micro_batch_size} samples has some of {len(own)} of the {parts} parts"
                f" (adapter.parts) of {count // parts} samples each, and belongs to one: expected a smaller"
                f" micro_batch_size, which divides {count // parts}, or fewer adapter.parts"
            )
        found += own
    return tuple(found)
