"""Which samples of a global batch a rank reads, micro-batch by micro-batch."""

from collections.abc import Callable, Iterator

import numpy as np

from muster.data.dataset import IGNORE_INDEX, Batch
from muster.layout.mesh import MeshCoordinates, dp_index_of
from muster.spec.plan import Plan


def read_dp_slice(
    read: Callable[[int, int], Batch], plan: Plan, coordinates: MeshCoordinates, first: int, count: int
) -> Batch:
    """What the rank at `at` computes of the `count` global samples from `first` on, one micro-batch after the other.

    The data-parallel ranks of the first stage each take consecutive samples (`Plan.samples_of`), and every stage works
    on the same micro-batches. So ranks of a stage with fewer data-parallel ranks read the samples of several, those of
    one with more a part of one's. `read` gives samples by their first number and their count.
    """
    size, rows = plan.micro_batch_size, plan.local_micro_batch_size(coordinates.pp)
    start = dp_index_of(plan, coordinates) * rows
    begin, end = start // size, -(-(start + rows) // size)  # the ranks of the first stage that work on the same samples
    samples = plan.sample_range(begin, count)
    share = len(samples)  # of each of these, which are several only where all have as many
    batch = read(first + samples.start, (end - begin) * share)

    def cut(array_BS: np.ndarray) -> np.ndarray:
        shape = (end - begin, share // size, size, array_BS.shape[1])
        by_micro_batch = array_BS.reshape(shape).swapaxes(0, 1).reshape(shape[1], -1, shape[3])
        own = by_micro_batch[:, start - begin * size :][:, :rows]
        return np.ascontiguousarray(own).reshape(-1, shape[3])

    labels_BS = cut(batch.labels_BS)
    positions_BS = None if batch.positions_BS is None else cut(batch.positions_BS)
    return Batch(cut(batch.tokens_BS), labels_BS, int((labels_BS != IGNORE_INDEX).sum()), positions_BS)


def samples_of_micro_batch(
    plan: Plan, coordinates: MeshCoordinates, micro_batch: int, count: int
) -> Iterator[tuple[slice, int]]:
    """What `read_share` gives the rank at `at` for one micro-batch of a step of `count` samples, in runs of consecutive
    samples: (rows of the micro-batch, the step's sample in the first of them)."""
    size, rows = plan.micro_batch_size, plan.local_micro_batch_size(coordinates.pp)
    start = dp_index_of(plan, coordinates) * rows
    row = 0
    while row < rows:
        rank, within = divmod(start + row, size)  # of the first stage, and in its rows
        end = min(row + size - within, rows)
        yield slice(row, end), plan.sample_range(rank, count).start + micro_batch * size + within
        row = end
