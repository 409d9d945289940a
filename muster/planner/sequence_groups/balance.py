"""Balanced assignments without a solver.

`balanced_step` is hybrid data parallelism's strategy (ByteScale, arXiv:2502.21231 §5.2): the ranks share a queue of
work; long sequences take as many ranks as they need, short ones fill up those that have least to do. Groups come in the
order of their sizes, so that the ranks of a block of 2^k have gone through the same groups when a group of 2^k takes
them, and no rank waits for another one.

`packed_micro_batch` is for ranks that begin each micro-batch together: groups of one micro-batch with times as equal as
can be.
"""

from heapq import heapify, heappop, heappush
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from muster.planner.sequence_groups.assignment import SequenceGroup, StepAssignment
from muster.planner.sequence_groups.sequence_costs import SequenceCosts

LIMITS = (np.inf, 1.0, 0.7, 0.5, 0.35, 0.25, 0.15, 0.1)
"""Longest times of a sequence that are tried, in units of the mean work of a rank."""


class Sequences(NamedTuple):
    """Lengths of a step's sequences and what they cost by degree."""

    lengths_B: NDArray[np.int64]
    share_s: NDArray[np.float64]
    positions: NDArray[np.int64]

    @staticmethod
    def of(lengths: NDArray[np.int64], costs: SequenceCosts) -> "Sequences":
        """Return the costs of sequences of some lengths."""
        return Sequences(lengths, costs.share_s(lengths), costs.positions(lengths))

    def rows_within(self, costs: SequenceCosts, limit_s: float) -> NDArray[np.intp]:
        """Return for each sequence the index of the degree that costs least work among those that take at most
        `limit_s`; the fastest where none does."""
        work_s = self.share_s * np.array(costs.degrees)[:, None]
        slow = self.share_s + np.array(costs.fixed_s)[:, None] > limit_s
        rows = np.where(slow, np.inf, work_s).argmin(0)
        return np.where(slow.all(0), self.share_s.argmin(0), rows)


# ----------------------------------------------------------------------------------------------------------------------
# A step


def balanced_step(sequences: Sequences, costs: SequenceCosts, num_ranks: int, limit: float) -> StepAssignment:
    """Return the assignment in which no sequence takes longer than `limit` times the mean work of a rank, where more
    ranks can help that."""
    mean_s = float((sequences.share_s * np.array(costs.degrees)[:, None]).min(0).sum()) / num_ranks
    rows = sequences.rows_within(costs, limit * mean_s)
    ready_s = np.zeros(num_ranks)
    counts = np.zeros(num_ranks, int)
    micro_batches: list[list[SequenceGroup]] = []
    for row in reversed(range(len(costs.degrees))):
        (chosen,) = np.nonzero(rows == row)
        if len(chosen):
            degree = costs.degrees[row]
            blocks = _fill_blocks(sequences, costs, chosen, row, ready_s.reshape(-1, degree)[:, 0].tolist())
            for block, (seconds, bins) in enumerate(blocks):
                ranks = slice(block * degree, (block + 1) * degree)
                for index, (_, members) in enumerate(bins, int(counts[ranks][0])):
                    while len(micro_batches) <= index:
                        micro_batches.append([])
                    micro_batches[index].append(SequenceGroup(block * degree, degree, tuple(members)))
                ready_s[ranks], counts[ranks] = seconds, counts[ranks] + len(bins)
    return StepAssignment(num_ranks, tuple(tuple(sorted(groups)) for groups in micro_batches))


_Bins = list[tuple[int, list[int]]]
"""Positions that are left in each of a block's groups, and the sequences in it."""


def _fill_blocks(
    sequences: Sequences, costs: SequenceCosts, chosen: NDArray[np.intp], row: int, ready_s: list[float]
) -> list[tuple[float, _Bins]]:
    """Give each sequence, those that take longest first, to the block of ranks that has least to do; return the time
    and the groups of each."""
    queue = [(seconds, block) for block, seconds in enumerate(ready_s)]
    heapify(queue)
    bins: list[_Bins] = [[] for _ in ready_s]
    for index in chosen[np.argsort(-sequences.share_s[row, chosen], kind="stable")].tolist():
        seconds, block = heappop(queue)
        size = int(sequences.positions[row, index])
        for place, (room, members) in enumerate(bins[block]):
            if size <= room:
                bins[block][place] = (room - size, [*members, index])
                break
        else:
            bins[block].append((costs.capacity - size, [index]))
            seconds += costs.fixed_s[row]
        heappush(queue, (seconds + float(sequences.share_s[row, index]), block))
    times = {block: seconds for seconds, block in queue}
    return [(times[block], bins[block]) for block in range(len(bins))]


# ----------------------------------------------------------------------------------------------------------------------
# One micro-batch


def packed_micro_batch(
    sequences: Sequences, costs: SequenceCosts, num_ranks: int, chosen: NDArray[np.intp], tries: int = 14
) -> tuple[SequenceGroup, ...] | None:
    """Return groups of one micro-batch that hold the chosen sequences, the slowest as fast as a bisection over their
    time finds; None where the ranks' memory doesn't hold them."""
    own = Sequences(sequences.lengths_B[chosen], sequences.share_s[:, chosen], sequences.positions[:, chosen])
    degrees = np.array(costs.degrees)
    work_s = float((own.share_s * degrees[:, None]).min(0).sum()) / num_ranks
    low = max(work_s, float((own.share_s + np.array(costs.fixed_s)[:, None]).min(0).max()))
    best, high = None, np.inf
    for _ in range(tries):
        limit_s = (low + high) / 2 if np.isfinite(high) else 2 * low
        found = _packed_within(own, costs, num_ranks, limit_s)
        if found is not None:
            best, high = found, limit_s
        elif np.isfinite(high):
            low = limit_s
        elif limit_s > 64 * work_s:  # memory, not time, is what lacks
            found = _packed_within(own, costs, num_ranks, np.inf)
            if found is None:
                return None
            best, high = found, max(_seconds(own, costs, group) for group in found)
        else:
            low = limit_s
    if best is None:
        best = _packed_within(own, costs, num_ranks, np.inf)
    return None if best is None else tuple(group._replace(sequences=_renamed(group, chosen)) for group in best)


def _renamed(group: SequenceGroup, chosen: NDArray[np.intp]) -> tuple[int, ...]:
    return tuple(chosen[list(group.sequences)].tolist())


def _seconds(sequences: Sequences, costs: SequenceCosts, group: SequenceGroup) -> float:
    row = costs.degrees.index(group.degree)
    return costs.fixed_s[row] + float(sequences.share_s[row, list(group.sequences)].sum())


def _packed_within(
    sequences: Sequences, costs: SequenceCosts, num_ranks: int, limit_s: float
) -> list[SequenceGroup] | None:
    """Return groups that take at most `limit_s` each; None where best fit finds none."""
    rows = sequences.rows_within(costs, limit_s)
    own_s = sequences.share_s[rows, np.arange(len(rows))]
    seconds, room, row_of = np.zeros(num_ranks), np.zeros(num_ranks, int), np.zeros(num_ranks, int)
    members: list[list[int]] = []
    left = num_ranks
    for index in np.lexsort((-own_s, -rows)).tolist():
        row, count = int(rows[index]), len(members)
        held = row_of[:count]
        total = seconds[:count] + sequences.share_s[held, index]
        fits = (total <= limit_s) & (sequences.positions[held, index] <= room[:count])
        same = np.nonzero(fits & (held == row))[0]
        if len(same):
            place = int(same[total[same].argmax()])
        elif left >= costs.degrees[row]:
            place, left = count, left - costs.degrees[row]
            members.append([])
            seconds[place], room[place], row_of[place] = costs.fixed_s[row], costs.capacity, row
        elif fits.any():
            place = int(np.where(fits, total, np.inf).argmin())
        else:
            return None
        members[place].append(index)
        seconds[place] += sequences.share_s[row_of[place], index]
        room[place] -= sequences.positions[row_of[place], index]
    return aligned_groups([(costs.degrees[row_of[place]], found) for place, found in enumerate(members)])


def aligned_groups(found: list[tuple[int, list[int]]]) -> list[SequenceGroup]:
    """Give ranks to groups of some sizes: with the largest first, each begins at a multiple of its size."""
    groups, first = [], 0
    for degree, members in sorted(found, key=lambda one: -one[0]):
        groups.append(SequenceGroup(first, degree, tuple(members)))
        first += degree
    return groups
